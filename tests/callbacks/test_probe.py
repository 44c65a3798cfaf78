"""Weights that do not arrive are noticed before a single answer is drawn from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from avspo_lightning.callbacks.probe import WeightMismatchError
from tests.callbacks.test_callbacks import Rollouts
from tests.running import fit, largest_difference, weights
from tests.tiny import CopyEngine


def test_an_engine_with_a_copy_draws_what_the_policy_itself_does(tmp_path: Path, tiny_folder: str) -> None:
    own, shared = Rollouts(), Rollouts()
    copied, _ = fit(tmp_path, tiny_folder, rollout={"engine": CopyEngine()}, callbacks=[own])
    plain, _ = fit(tmp_path, tiny_folder, callbacks=[shared])
    assert [r.completions for r in own.seen] == [r.completions for r in shared.seen]
    assert largest_difference(weights(copied), weights(plain)) == 0
    assert [r.policy_version for r in own.seen] == [r.policy_version for r in shared.seen] == [0, 1, 2]


def test_a_corrupted_synchronisation_stops_the_run_with_both_numbers(tmp_path: Path, tiny_folder: str) -> None:
    kept: dict[torch.Size, Tensor] = {}

    def stale(version: int, weight: Tensor) -> Tensor:
        """The third synchronisation brings the second one's matrices again."""
        if version < 2:
            kept[weight.shape] = weight.clone()
        return kept[weight.shape] if version == 2 and weight.shape == (64, 32) else weight

    engine, seen = CopyEngine(stale), Rollouts()
    with pytest.raises(WeightMismatchError, match=r"step 2 .* CopyEngine of rank 0 .* -\d+\.\d+ and the trainer -\d"):
        fit(tmp_path, tiny_folder, rollout={"engine": engine}, callbacks=[seen])
    assert len(seen.seen) == 2, "nothing was drawn from the stale weights"
    assert engine.torn_down == 1


def test_weights_that_are_not_numbers_are_a_mismatch(tmp_path: Path, tiny_folder: str) -> None:
    engine = CopyEngine(lambda version, weight: weight * float("nan"))
    with pytest.raises(WeightMismatchError, match="differ by inf"):
        fit(tmp_path, tiny_folder, rollout={"engine": engine})


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_old_logprobs_are_taken_in_the_precision_of_the_update(
    tmp_path: Path, tiny_folder: str, precision: str
) -> None:
    _, run = fit(
        tmp_path,
        tiny_folder,
        rollout={"num_passes": 2},
        max_epochs=1,
        precision=precision,
        module={"learning_rate": 1e-30},
    )
    assert run.callback_metrics["train/policy/ratio_max_deviation"] == 0
