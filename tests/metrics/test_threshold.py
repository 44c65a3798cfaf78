from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.aggregation import MeanMetric

from avspo_lightning.metrics import AdaptiveThreshold
from tests.functional.reference import GOLDEN, assert_close


@pytest.mark.parametrize("rule", ["sign", "raw"])
def test_golden_trajectories_with_a_restart_at_every_step(rule: str) -> None:
    metric = AdaptiveThreshold(rule=rule)
    for step in GOLDEN[f"tau_trajectory_{rule}"]:
        tau = metric.compute()
        assert tau.dtype == torch.float64
        assert_close(tau, step["tau_used"])
        assert (step["acr"] > tau).item() == step["triggered"]
        metric.update(step["acr"], step["J"])
        assert_close(metric.compute(), step["tau_after"])
        state, metric = copy.deepcopy(metric.state_dict()), AdaptiveThreshold(rule=rule)
        metric.compute()
        metric.load_state_dict(state)
        assert_close(metric.compute(), step["tau_after"])


@pytest.mark.parametrize("in_collection", [False, True])
def test_one_forward_moves_tau_once(in_collection: bool) -> None:
    metric = AdaptiveThreshold()
    called = MetricCollection({"tau": metric, "acr": MeanMetric()}) if in_collection else metric
    expected = [0.5, 0.503, 0.50597]
    for reward_mean, tau in zip((0.1, 0.2, 0.3), expected, strict=True):
        if in_collection:
            result = called(acr=0.8, reward_mean=reward_mean, value=reward_mean)["tau"]
        else:
            result = called(0.8, reward_mean)
        assert_close(result, tau)
        assert_close(metric.compute(), tau)


def test_reset_leaves_tau_and_the_last_reward_alone() -> None:
    metric = AdaptiveThreshold()
    metric.update(0.8, 0.1)
    metric.reset()
    metric.update(0.8, 0.2)
    metric.reset()
    assert_close(metric.compute(), 0.503)


def test_tau_is_there_before_the_first_update_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert AdaptiveThreshold(0.3).compute() == 0.3


def test_nothing_measured_moves_nothing() -> None:
    metric = AdaptiveThreshold()
    metric.update(0.8, 0.1)
    metric.update(math.nan, 0.9)
    metric.update(0.8, math.nan)
    metric.update(0.8, 0.2)
    assert_close(metric.compute(), 0.503)


@pytest.mark.parametrize("cast", ["to", "bfloat16", "half", "float", "type"])
def test_casting_the_parent_keeps_every_digit(cast: str) -> None:
    module = nn.ModuleDict({"layer": nn.Linear(2, 2), "tau": AdaptiveThreshold(init=1 / 3)})
    module["tau"].update(0.8, 1 / 7)
    before = copy.deepcopy(module["tau"].state_dict())
    getattr(module, cast)(*[torch.bfloat16] * (cast in ("to", "type")))
    assert module["layer"].weight.dtype == {"half": torch.float16, "float": torch.float32}.get(cast, torch.bfloat16)
    after = module["tau"].state_dict()
    assert list(after) == ["tau", "last_reward_mean"]
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(value.dtype == torch.float64 for value in after.values())


def test_it_is_part_of_the_parent_s_checkpoint() -> None:
    module = nn.ModuleDict({"tau": AdaptiveThreshold()})
    assert list(module.state_dict()) == ["tau.tau", "tau.last_reward_mean"]


def test_always_on_is_allowed() -> None:
    metric = AdaptiveThreshold(init=0.0, eta=0.0, bounds=(0.0, 0.9))
    metric.update(1.0, 0.1)
    metric.update(0.0, 0.9)
    assert metric.compute() == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": 0.05}, "`init`"),
        ({"init": 0.95}, "`init`"),
        ({"bounds": (0.9, 0.1)}, "`bounds`"),
        ({"bounds": (0.1, 1.5)}, "`bounds`"),
        ({"eta": -1.0}, "`eta`"),
        ({"eta": math.nan}, "`eta`"),
    ],
)
@pytest.mark.usefixtures("annotations_off")
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveThreshold(**options)
