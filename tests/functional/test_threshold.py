from __future__ import annotations

import math

import pytest
import torch

from avspo_lightning.functional import next_threshold
from tests.functional.reference import GOLDEN, assert_close


def test_golden_updates() -> None:
    for case in GOLDEN["tau_update"]:
        tau = next_threshold(
            case["tau"], case["acr"], case["J"], case["J_prev"],
            eta=case["eta"], bounds=(case["lo"], case["hi"]), rule=case["form"],
        )  # fmt: skip
        assert type(tau) is float
        assert_close(tau, case["tau_next"], message=str(case))


@pytest.mark.parametrize("rule", ["sign", "raw"])
def test_golden_trajectories(rule: str) -> None:
    tau, previous = 0.5, None
    for step in GOLDEN[f"tau_trajectory_{rule}"]:
        assert_close(tau, step["tau_used"])
        assert (step["acr"] > tau) == step["triggered"]
        tau, previous = next_threshold(tau, step["acr"], step["J"], previous, rule=rule), step["J"]
        assert_close(tau, step["tau_after"])


def test_tensors_are_taken_and_nothing_measured_moves_nothing() -> None:
    acr, mean = torch.tensor(0.8, dtype=torch.float64), torch.tensor(0.4, dtype=torch.float64)
    assert_close(next_threshold(torch.tensor(0.5), acr, mean, 0.3), 0.503)
    for acr, mean, previous in ((math.nan, 0.4, 0.3), (0.8, math.nan, 0.3), (0.8, 0.4, math.nan)):
        assert next_threshold(0.5, acr, mean, previous) == 0.5


def test_a_step_of_zero_keeps_the_threshold_fixed_and_zero_is_a_bound() -> None:
    assert next_threshold(0.0, 1.0, 1.0, 0.0, eta=0.0, bounds=(0.0, 0.9)) == 0.0
    assert next_threshold(0.02, 0.0, 1.0, 0.0, eta=1.0, bounds=(0.0, 0.9)) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eta": -0.1}, "`eta`"),
        ({"bounds": (0.9, 0.1)}, "`bounds`"),
        ({"bounds": (-0.1, 0.9)}, "`bounds`"),
        ({"bounds": (0.1, 1.1)}, "`bounds`"),
        ({"rule": "ema"}, "sign, raw"),
    ],
)
@pytest.mark.usefixtures("annotations_off")
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next_threshold(0.5, 0.8, 0.4, 0.3, **options)
