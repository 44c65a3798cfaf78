"""Scores of held-out answers against a count by hand."""

from __future__ import annotations

import math

import pytest
import torch

from avspo_lightning.modules.evaluation import Evaluation
from avspo_lightning.types import Prompt, Rollout
from tests.tiny import completion


def rollout(rewards: list[list[float]], *, name: str = "held", length: int = 2, cut: bool = False) -> Rollout:
    groups = tuple(tuple(completion([3] * length, truncated=cut) for _ in row) for row in rewards)
    return Rollout(
        name=name,
        iteration=0,
        prompts=tuple(Prompt(id=str(i), text="", answer="") for i in range(len(rewards))),
        completions=groups,
        rewards=torch.tensor(rewards, dtype=torch.float64).reshape(len(rewards), -1 if rewards else 4),
    )


def test_means_over_batches_of_unequal_size_and_empty_ones() -> None:
    evaluation = Evaluation()
    evaluation.update(rollout([[1.0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]))
    evaluation.update(rollout([[0.0, 0, 0, 0]], length=6, cut=True))
    evaluation.update(rollout([]))
    evaluation.update(rollout([[1.0], [math.nan], [0.0]], name="greedy"))
    found = evaluation.compute("val", torch.device("cpu"))
    expected = {
        "val/held/accuracy": 5 / 16,
        "val/held/pass@4": 2 / 4,
        "val/held/length": (12 * 2 + 4 * 6) / 16,
        "val/held/truncated": 4 / 16,
        "val/greedy/accuracy": 1 / 2,
        "val/greedy/length": 2.0,
        "val/greedy/truncated": 0.0,
    }
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected)
    assert evaluation.compute("val", torch.device("cpu")) == {}, "the next evaluation starts anew"
