from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from avspo_lightning.metrics import WeightedMeans
from tests.functional.reference import assert_close


def test_means_weigh_by_tokens_and_maxima_stay_maxima() -> None:
    means = WeightedMeans(["entropy", "length"], maxima=["deviation"])
    means.update({"entropy": (1.0, 10), "deviation": (0.5, 10), "length": (torch.tensor(4.0), torch.tensor(2))})
    means.update({"entropy": (torch.tensor(2.0), torch.tensor(90)), "deviation": (0.2, 90)})
    result = means.compute()
    assert list(result) == ["entropy", "length", "deviation"]
    assert all(value.dtype == torch.float64 for value in result.values())
    for name, value in {"entropy": 1.9, "length": 4.0, "deviation": 0.5}.items():
        assert_close(result[name], value, message=name)


def test_what_was_not_measured_is_zero_and_spoils_nothing() -> None:
    means = WeightedMeans(["kl", "entropy"], maxima=["deviation"])
    nothing = torch.tensor(0)
    means.update({"kl": (math.nan, nothing), "deviation": (math.inf, nothing)})
    means.update({"entropy": (3.0, 2)})
    assert {name: value.item() for name, value in means.compute().items()} == {"kl": 0, "entropy": 3, "deviation": 0}
    means.update({"kl": (1.0, 1), "deviation": (-2.0, 1)})
    result = means.compute()
    assert (result["kl"], result["deviation"]) == (1.0, -2.0)


def test_a_broken_run_is_not_hidden() -> None:
    means = WeightedMeans(["loss"], maxima=["deviation"])
    means.update({"loss": (math.nan, 3), "deviation": (math.nan, 3)})
    assert all(value.isnan() for value in means.compute().values())


def test_sums_are_exact_where_float32_would_not_be() -> None:
    means = WeightedMeans(["x"])
    for value in (1e8, 1.0, -1e8):
        means.update({"x": (value, 1)})
    assert_close(means.compute()["x"], 1 / 3)


def test_state_survives_checkpoints_and_casts() -> None:
    means = WeightedMeans(["x", "y"], maxima=["z"])
    means.update({"x": (1 / 3, 7), "y": (1e5 + 1, 1), "z": (1 / 7, 1)})
    parent = nn.ModuleDict({"means": means, "layer": nn.Linear(1, 1)}).to(torch.bfloat16)
    assert parent["layer"].weight.dtype == torch.bfloat16
    restored = WeightedMeans(["x", "y"], maxima=["z"])
    restored.load_state_dict(copy.deepcopy(means.state_dict()))
    for metric in (means, restored):
        metric.update({"x": (1.0, 1)})
        result = metric.compute()
        for name, value in {"x": (7 / 3 + 1) / 8, "y": 1e5 + 1, "z": 1 / 7}.items():
            assert_close(result[name], value, message=name)
    means.reset()
    means.update({"x": (0.0, 0)})
    assert not any(means.compute().values())
    assert means.sums.dtype == torch.float64


@pytest.mark.usefixtures("annotations_off")
def test_wrong_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown names \['z'\]"):
        WeightedMeans(["x"]).update({"z": (1.0, 1)})
    for names, maxima in ((["x", "x"], []), (["x"], ["x"]), ([], ["x"])):
        with pytest.raises(ValueError, match="`names`"):
            WeightedMeans(names, maxima=maxima)
