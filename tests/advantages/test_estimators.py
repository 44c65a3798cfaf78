"""Estimators are the functions with their options, checked early."""

from __future__ import annotations

import pytest
import torch

from avspo_lightning import AVSPO, GRPO, AdvantageContext
from avspo_lightning.functional import avspo_advantages, group_advantages

REWARDS = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1]], dtype=torch.float64)


def context(acr: float, tau: float, **options: int) -> AdvantageContext:
    return AdvantageContext(**{"iteration": 0, "acr": acr, "tau": tau, **options})


@pytest.mark.parametrize(("acr", "tau"), [(0.5, 0.5), (0.2, 0.5), (0.0, 0.1)])
def test_avspo_off_its_trigger_is_grpo_to_the_last_bit(acr: float, tau: float) -> None:
    rewards = torch.rand(32, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    rewards[::3] = rewards[::3, :1]
    assert torch.equal(AVSPO()(rewards, context(acr, tau)), GRPO()(rewards, context(acr, tau)))
    assert AVSPO().num_virtual(8, context(acr, tau)) == 0


def test_avspo_on_its_trigger() -> None:
    on = context(2 / 3, 0.5)
    estimator = AVSPO(alpha=0.7, ddof_augmented=1)
    expected = avspo_advantages(REWARDS, threshold=0.5, acr=2 / 3, alpha=0.7, ddof_augmented=1)
    assert torch.equal(estimator(REWARDS, on), expected)
    assert torch.equal(estimator(REWARDS, on)[2], GRPO()(REWARDS, on)[2]), "mixed groups are never changed"
    assert estimator.num_virtual(4, on) == 4
    assert estimator.still_collapsed(REWARDS, on).tolist() == [False, False, False]
    assert AVSPO(augment="right").still_collapsed(REWARDS, on).tolist() == [False, True, False]
    assert AVSPO(strategy="none").still_collapsed(REWARDS, on).tolist() == [True, True, False]
    assert GRPO().still_collapsed(REWARDS, on).tolist() == [True, True, False]


def test_acr_of_all_ranks_decides_not_that_of_the_rewards_at_hand() -> None:
    assert torch.equal(AVSPO()(REWARDS, context(0.4, 0.5)), group_advantages(REWARDS))
    assert AVSPO()(REWARDS[2:], context(0.9, 0.5)).tolist() == group_advantages(REWARDS[2:]).tolist()


def test_uniform_draws_are_the_same_on_every_rank_and_new_in_every_iteration() -> None:
    estimator, on = AVSPO(strategy="uniform"), context(2 / 3, 0.5, seed=1)
    first = estimator(REWARDS, on)
    assert torch.equal(first, estimator(REWARDS, on))
    assert not torch.equal(first, estimator(REWARDS, context(2 / 3, 0.5, seed=1, iteration=1)))
    assert not torch.equal(first, estimator(REWARDS, context(2 / 3, 0.5, seed=2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, "`alpha`"),
        ({"r_anchor": 0.0}, "`r_anchor`"),
        ({"strategy": "exponential"}, "`strategy` must be one of none, uniform, fixed, exp, stratified"),
        ({"augment": "all"}, "`augment`"),
        ({"exponent": "beta"}, "`exponent`"),
        ({"r_max_source": "largest"}, "`r_max_source`"),
        ({"reward_range": (1.0, 0.0)}, "`reward_range`"),
        ({"num_virtual": 0}, "`num_virtual`"),
        ({"eps": -1.0}, "`eps`"),
        ({"ddof_augmented": 2}, "`ddof_augmented`"),
        ({"ddof_group": 2}, "`ddof"),
    ],
)
def test_bad_options_are_refused_at_once(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AVSPO(**options)


@pytest.mark.parametrize("options", [{"scale": "sum"}, {"ddof": 2}, {"eps": -1.0}])
def test_bad_options_of_grpo(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
        GRPO(**options)


def test_rewards_below_the_range_are_refused_even_off_the_trigger() -> None:
    with pytest.raises(ValueError, match=r"-1.0 lies below `reward_range`"):
        AVSPO()(torch.tensor([[-1.0, 1.0]]), context(0.0, 0.5))
    mapped = AVSPO(reward_range=(-1.0, 1.0))(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]), context(1.0, 0.5))
    torch.testing.assert_close(mapped, avspo_advantages([[0, 0], [1, 1]], threshold=0.5))
