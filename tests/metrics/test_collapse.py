from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection

from avspo_lightning.functional import advantage_collapse_rate
from avspo_lightning.metrics import AdvantageCollapseRate
from tests.functional.reference import assert_close

REWARDS = torch.tensor([[1.0, 1], [0, 0], [1, 0], [0, 0], [math.nan, 1], [0.3, 0.3]])
LEVELS = ["easy", "hard", "hard", "hard", "hard", "easy"]


def collection(**options: bool) -> MetricCollection:
    return MetricCollection(
        {
            "any": AdvantageCollapseRate(),
            "right": AdvantageCollapseRate("right"),
            "wrong": AdvantageCollapseRate("wrong"),
            "strict": AdvantageCollapseRate("right", success_threshold=0.5),
            "easy": AdvantageCollapseRate(level="easy"),
            "hard": AdvantageCollapseRate(level="hard"),
            "hard wrong": AdvantageCollapseRate("wrong", level="hard"),
        },
        **options,
    )


def test_rates_by_outcome_and_level() -> None:
    metrics = collection()
    metrics.update(REWARDS, levels=LEVELS)
    expected = {"any": 4 / 5, "right": 2 / 5, "wrong": 2 / 5, "strict": 1 / 5}
    expected |= {"easy": 1.0, "hard": 2 / 3, "hard wrong": 2 / 3}
    rates = metrics.compute()
    assert all(rate.dtype == torch.float64 and rate.shape == () for rate in rates.values())
    for name, rate in expected.items():
        assert_close(rates[name], rate, message=name)


def test_rates_that_agree_at_first_may_part_later() -> None:
    metrics = collection()
    first = torch.tensor([[1.0, 1], [0, 0]])
    metrics.update(first, levels=["easy", "hard"])
    metrics.update(torch.ones(3, 2), levels=["easy", "easy", "hard"])
    rates = metrics.compute()
    for name, rate in {"any": 1.0, "right": 0.8, "wrong": 0.2, "hard wrong": 0.5}.items():
        assert_close(rates[name], rate, message=name)


def test_batches_of_any_size_count_by_their_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = (torch.rand(23, 3, generator=generator) < 0.8).float()
    rewards[torch.rand(23, 3, generator=generator) < 0.2] = math.nan
    metric = AdvantageCollapseRate()
    batch_rates = [metric(part) for part in rewards.split([1, 9, 0, 13])]
    assert torch.equal(metric.compute(), advantage_collapse_rate(rewards))
    assert torch.equal(batch_rates[1], advantage_collapse_rate(rewards[1:10]))
    assert batch_rates[2] == 0.0


def test_state_is_integer_survives_casts_and_checkpoints() -> None:
    metric = AdvantageCollapseRate()
    for _ in range(300):
        metric.update(torch.ones(1, 2))
    metric.to(torch.bfloat16)
    metric.update([[0, 1]])
    assert [state.dtype for state in metric.metric_state.values()] == [torch.int64]
    assert_close(metric.compute(), 300 / 301)
    restored = AdvantageCollapseRate()
    nn.ModuleDict({"rate": restored}).load_state_dict(nn.ModuleDict({"rate": metric}).state_dict())
    restored.update([[0, 1]])
    assert_close(restored.compute(), 300 / 302)


def test_reset_forgets_and_nothing_seen_is_zero() -> None:
    metric = AdvantageCollapseRate()
    metric.update(REWARDS)
    metric.reset()
    metric.update([[None, None]])
    assert metric.compute() == 0.0


@pytest.mark.usefixtures("annotations_off")
def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="any, right, wrong"):
        AdvantageCollapseRate("all")
    for levels in (None, ["hard"]):
        with pytest.raises(ValueError, match="`levels`"):
            AdvantageCollapseRate(level="hard").update(REWARDS, levels=levels)
