from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from avspo_lightning.functional import (
    advantage_collapse_rate,
    augmented_rewards,
    avspo_advantages,
    collapsed_groups,
    group_advantages,
    num_virtual_samples,
)
from tests.functional.reference import GOLDEN, assert_close, loop_avspo, loop_group_advantages

NAN = math.nan
AUGMENT = {"both": "both", "error_only": "wrong", "correct_only": "right"}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def binary(num_groups: int, size: int, seed: int = 0) -> Tensor:
    """Groups of every difficulty, so that many have collapsed."""
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(num_groups, 1, generator=generator).mul(1.6).sub(0.3)
    return (torch.rand(num_groups, size, generator=generator) < chance).double()


@DTYPES
def test_golden_group_advantages(dtype: torch.dtype) -> None:
    section = GOLDEN["grpo_advantages"]
    for case in section["cases"]:
        actual = group_advantages(
            torch.tensor(section["rewards"], dtype=dtype), scale=case["scale"], ddof=case["ddof"], eps=case["eps"]
        )
        assert actual.dtype == torch.float64
        assert_close(actual, case["advantages"], dtype, case["name"])


@DTYPES
def test_golden_batches(dtype: torch.dtype) -> None:
    for case in GOLDEN["avspo_batches"]:
        options = {
            "threshold": case["tau_adapt"],
            "alpha": case["alpha"],
            "r_anchor": case["r_anchor"],
            "augment": AUGMENT[case["mode"]],
            "atol": case["tau"],
        }
        rewards, expected = torch.tensor(case["rewards"], dtype=dtype), case["expected"]
        actual = avspo_advantages(
            rewards, ddof_group=case["ddof"], ddof_augmented=case["ddof"], eps=case["eps"], **options
        )
        assert_close(actual, expected["advantages"], dtype, case["name"])
        virtual = augmented_rewards(rewards, **options)[:, rewards.shape[1] :]
        assert virtual.shape[1] == expected["K"]
        for row, values in zip(virtual, expected["virtual"], strict=True):
            assert_close(row[~row.isnan()], values, message=case["name"])


@DTYPES
def test_golden_contract(dtype: torch.dtype) -> None:
    for case in GOLDEN["contract_default"]:
        options = {name: case[name] for name in ("threshold", "augment", "ddof_group", "ddof_augmented", "eps")}
        rewards = torch.tensor(case["rewards"], dtype=dtype)
        assert_close(avspo_advantages(rewards, **options), case["advantages"], dtype, str(options))
        assert_close(avspo_advantages(rewards, acr=case["acr"], **options), case["advantages"], dtype, str(options))
        assert_close(advantage_collapse_rate(rewards), case["acr"])


@DTYPES
def test_golden_edge_cases(dtype: torch.dtype) -> None:
    cases = [case for case in GOLDEN["edge_cases"] if not case["name"].endswith("NAIVE") and "G1" not in case["name"]]
    assert len(cases) == 4
    for case in cases:
        rewards = torch.tensor(case["rewards"], dtype=dtype)
        actual = avspo_advantages(rewards, threshold=case["tau_adapt"], ddof_group=0)
        # In float32 the reward 0.99999 is off by 1e-8, a thousandth of the group's spread.
        if case["name"] == "noise_1e-5" and dtype == torch.float32:
            assert_close(actual, loop_avspo(rewards.tolist(), threshold=case["tau_adapt"], ddof_group=0))
        else:
            assert_close(actual, case["expected"]["advantages"], dtype, case["name"])


@DTYPES
def test_golden_general_form(dtype: torch.dtype) -> None:
    for case in GOLDEN["general_form"]:
        given = dict(case["kwargs"])
        reward_range = (given.pop("lo", 0.0), given.pop("hi", 1.0))
        actual = avspo_advantages(
            torch.tensor(case["rewards"], dtype=dtype), threshold=given.pop("tau_adapt"), ddof_group=0,
            reward_range=reward_range, **given,
        )  # fmt: skip
        assert_close(actual, case["expected"]["advantages"], dtype, case["name"])


def test_golden_strategies() -> None:
    for case in GOLDEN["virtual_strategies"]:
        if case["strategy"] not in ("fixed", "exp", "stratified"):
            continue
        rewards = torch.full((1, case["G"]), float(case["group"] == "all_correct"))
        actual = avspo_advantages(
            rewards, threshold=0.5, num_virtual=case["K"], strategy=case["strategy"],
            r_max_source="observed" if case["r_max_source"] == "max_observed" else "achievable",
        )  # fmt: skip
        assert_close(actual, [[case["advantage"]] * case["G"]], message=str(case))


def test_golden_uniform_values_under_the_group_formula() -> None:
    for case in GOLDEN["virtual_strategies"]:
        if case["strategy"] == "uniform":
            real = [float(case["group"] == "all_correct")] * case["G"]
            actual = group_advantages([real + case["values"]], ddof=0)
            assert_close(actual[0, 0], case["advantage"], message=str(case))


def test_uniform_draws_anew_for_every_group_from_its_generator() -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    options = {"threshold": 0.1, "strategy": "uniform"}
    virtual = augmented_rewards(rewards, generator=torch.Generator().manual_seed(3), **options)[:, 3:]
    assert torch.equal(virtual[:2], torch.rand(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    assert virtual[2].isnan().all()
    seeded = [avspo_advantages(rewards, generator=torch.Generator().manual_seed(3), **options) for _ in range(2)]
    assert torch.equal(*seeded)
    assert torch.equal(seeded[0], _standardised(torch.cat([rewards.double(), virtual], 1), rewards))


def _standardised(augmented: Tensor, rewards: Tensor) -> Tensor:
    """What the golden formula gives for known virtual rewards; mixed groups as under GRPO."""
    plain = group_advantages(rewards)
    whole = group_advantages(augmented, ddof=0)[:, : rewards.shape[1]]
    return torch.where(collapsed_groups(rewards)[:, None], whole, plain)


def test_golden_collapsed_advantages() -> None:
    for case in GOLDEN["avspo_collapsed_advantage"]:
        rewards = torch.full((1, case["G"]), float(case["kind"] == "all_correct"))
        actual = avspo_advantages(
            rewards, threshold=0.5, num_virtual=case["K"], r_anchor=case["r_anchor"],
            eps=case["eps"], ddof_augmented=case["ddof"],
        )  # fmt: skip
        assert_close(actual, [[case["advantage"]] * case["G"]], message=str(case))


@pytest.mark.usefixtures("annotations_off")
def test_closed_form_sign_and_bound_for_every_group_size_and_number() -> None:
    for size in range(2, 65):
        rewards = torch.stack([torch.ones(size), torch.zeros(size)])
        for k in range(1, size + 1):
            right, wrong = avspo_advantages(rewards, threshold=0.5, num_virtual=k, eps=0.0)
            pairs = 3 * k * (k + 1)
            closed = math.sqrt(pairs / (2 * (size + k) * (2 * k + 1) - pairs))
            assert_close(right, [closed] * size)
            assert_close(wrong, [-closed] * size)
            assert closed <= math.sqrt(k / size) + 1e-15


@pytest.mark.parametrize("augment", ["both", "wrong", "right"])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6])
def test_random_rewards_match_a_plain_loop(threshold: float, augment: str) -> None:
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        rewards = binary(6, 5, seed)
        rewards[torch.rand(6, 5, generator=generator) < 0.15] = NAN
        if seed % 2:
            rewards = rewards * torch.rand(6, 1, generator=generator).double()
        actual = avspo_advantages(rewards, threshold=threshold, augment=augment, alpha=0.3 + 0.1 * (seed % 4))
        expected = loop_avspo(rewards.tolist(), threshold=threshold, augment=augment, alpha=0.3 + 0.1 * (seed % 4))
        assert_close(actual, expected, message=f"seed {seed}")
        for ddof in (0, 1):
            expected = loop_group_advantages(rewards.tolist(), ddof, 1e-3)
            assert_close(group_advantages(rewards, ddof=ddof, eps=1e-3), expected)


def test_off_the_trigger_and_in_mixed_groups_the_bits_are_grpo_s() -> None:
    for seed in range(20):
        rewards = binary(8, 8, seed)
        acr = advantage_collapse_rate(rewards)
        plain = group_advantages(rewards)
        assert torch.equal(avspo_advantages(rewards, threshold=acr), plain)
        mixed = ~collapsed_groups(rewards)
        assert torch.equal(avspo_advantages(rewards, threshold=0.0)[mixed], plain[mixed])
        assert torch.equal(avspo_advantages(rewards, threshold=0.0, strategy="none"), plain)
        continuous = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(avspo_advantages(continuous, threshold=0.0), group_advantages(continuous))
        mapped = {"reward_range": (-1.0, 2.0)}
        assert torch.equal(avspo_advantages(rewards, threshold=acr, **mapped), group_advantages(rewards, **mapped))


def test_order_and_micro_batches_change_nothing() -> None:
    rewards = binary(10, 6, seed=4)
    acr = advantage_collapse_rate(rewards)
    assert acr > 0.3
    whole = avspo_advantages(rewards, threshold=0.2)
    generator = torch.Generator().manual_seed(0)
    groups, samples = torch.randperm(10, generator=generator), torch.randperm(6, generator=generator)
    assert_close(avspo_advantages(rewards[groups][:, samples], threshold=0.2), whole[groups][:, samples])
    parts = [avspo_advantages(part, threshold=0.2, acr=acr) for part in rewards.split([1, 4, 5])]
    assert torch.equal(torch.cat(parts), whole)


def test_anchor_matters_through_eps_only() -> None:
    rewards = torch.zeros(1, 8)
    small, large = (avspo_advantages(rewards, threshold=0.5, eps=0.0, r_anchor=anchor) for anchor in (0.1, 1.0))
    assert_close(small, large)
    expected = {1.0: -0.8113, 0.1: -0.8092, 0.01: -0.7887, 0.001: -0.6298, 1e-4: -0.2089}
    for anchor, advantage in expected.items():
        assert abs(avspo_advantages(rewards, threshold=0.5, r_anchor=anchor)[0, 0].item() - advantage) < 5e-5


def test_a_single_group_is_always_augmented_with_as_many_as_it_holds() -> None:
    for value in (0.0, 1.0):
        rewards = torch.full((1, 8), value)
        assert num_virtual_samples(advantage_collapse_rate(rewards), 8) == 8
        assert torch.equal(
            avspo_advantages(rewards, threshold=0.9), avspo_advantages(rewards, threshold=0.1, num_virtual=8)
        )


def test_effective_rate_comes_from_the_augmented_groups() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    for options, expected in (
        ({"threshold": 0.5}, 0.0),
        ({"threshold": 0.75}, 0.75),
        ({"threshold": 0.5, "augment": "right"}, 0.5),
        ({"threshold": 0.5, "augment": "wrong"}, 0.25),
        ({"threshold": 0.5, "strategy": "none"}, 0.75),
        ({"threshold": 0.5, "strategy": "fixed", "r_max_source": "observed"}, 0.5),
    ):
        assert advantage_collapse_rate(augmented_rewards(rewards, **options)) == expected, options


def test_unscored_rewards_get_no_advantage_and_fewer_virtual_ones() -> None:
    rewards = torch.tensor([[1, NAN, 0, 0], [0, 0, NAN, 0], [NAN, 1, NAN, NAN], [NAN] * 4], dtype=torch.float64)
    advantages = avspo_advantages(rewards, threshold=0.4)
    assert_close(advantages, loop_avspo(rewards.tolist(), threshold=0.4))
    assert advantages[0, 1] == 0.0
    assert not advantages[2:].any()
    assert (advantages[1] != 0).tolist() == [True, True, False, True]
    virtual = augmented_rewards(rewards, threshold=0.4, num_virtual=4)[:, 4:]
    assert (~virtual.isnan()).sum(-1).tolist() == [0, 3, 0, 0]


def test_ragged_groups_equal_each_group_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [2, 5, 3, 8]
    groups = [torch.ones(2), torch.zeros(5), torch.rand(3, generator=generator), torch.ones(8)]
    order = torch.randperm(18, generator=generator)
    rewards = torch.cat(groups).double()[order]
    group_ids = torch.repeat_interleave(torch.tensor([30, 10, 20, 40]), torch.tensor(sizes))[order]
    plain = group_advantages(rewards, group_ids=group_ids)
    augmented = avspo_advantages(rewards, threshold=0.5, group_ids=group_ids)
    num_virtual = num_virtual_samples(0.75, 8)
    assert plain.shape == augmented.shape == (18,)
    for group_id, size in zip((30, 10, 20, 40), sizes, strict=True):
        chosen = group_ids == group_id
        alone = rewards[chosen][None]
        assert_close(plain[chosen], group_advantages(alone)[0])
        expected = avspo_advantages(alone, threshold=0.5, num_virtual=min(num_virtual, size))[0]
        assert_close(augmented[chosen], expected)


def test_collapsed_groups_are_exactly_zero_whatever_the_scale_and_eps() -> None:
    rewards = torch.tensor([[0.1] * 7, [1 / 3] * 7, [1.0, 0, 0, 0, 0, 0, 0]])
    for scale in ("group", "batch", "none"):
        advantages = group_advantages(rewards, scale=scale, eps=0.0)
        assert not advantages[:2].any()
        assert advantages[2].all()
    assert not group_advantages(rewards[:2], scale="batch", eps=0.0).any()


def test_scales_match_a_plain_loop() -> None:
    rewards = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rewards[1, 2] = NAN
    valid = rewards[~rewards.isnan()]
    centred = (rewards - rewards.nanmean(-1, keepdim=True)).nan_to_num(nan=0.0)
    assert_close(group_advantages(rewards, scale="none"), centred)
    assert_close(group_advantages(rewards, scale="batch"), centred / (valid.std() + 1e-4))
    assert_close(group_advantages(rewards, scale="batch", ddof=0), centred / (valid.std(correction=0) + 1e-4))


def test_no_gradient_reaches_the_advantages() -> None:
    rewards = torch.ones(2, 4, requires_grad=True)
    assert not group_advantages(rewards).requires_grad
    assert not avspo_advantages(rewards, threshold=0.5).requires_grad


def test_success_threshold_is_in_units_of_the_rewards() -> None:
    rewards = torch.tensor([[0.0, 0.0], [4.0, 4.0]])
    advantages = avspo_advantages(rewards, threshold=0.5, reward_range=(-5.0, 5.0), success_threshold=2.0)
    assert (advantages[0] < 0).all()
    assert (advantages[1] > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "none"}, "both, wrong, right"),
        ({"strategy": "geometric"}, "none, uniform, fixed, exp, stratified"),
        ({"r_max_source": "max"}, "achievable, observed"),
        ({"exponent": "half"}, "alpha, one_minus_alpha"),
        ({"ddof_group": 2}, "`ddof`"),
        ({"ddof_augmented": -1}, "`ddof_augmented`"),
        ({"eps": -1e-4}, "`eps`"),
        ({"acr": 1.2}, "`acr`"),
        ({"r_anchor": -0.1}, "`r_anchor`"),
        ({"num_virtual": 0}, "`num_virtual`"),
        ({"reward_range": (1.0, 0.0)}, "`reward_range`"),
    ],
)
@pytest.mark.usefixtures("annotations_off")
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        avspo_advantages([[1, 1], [0, 1]], threshold=0.1, **options)


@pytest.mark.usefixtures("annotations_off")
def test_wrong_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="`reward_range`"):
        avspo_advantages([[-1, -1], [1, 1]], threshold=0.1)
    with pytest.raises(ValueError, match="at least 2 completions"):
        avspo_advantages([[1.0]], threshold=0.1)
    with pytest.raises(ValueError, match="`scale`"):
        group_advantages([[0, 1]], scale="std")
