"""Rewards, and the check of what they return."""

from __future__ import annotations

import math

import pytest
import torch

from avspo_lightning.rewards import ExactMatchReward, FunctionReward, NumericReward, Reward, WeightedSumReward
from avspo_lightning.types import Completion, Prompt
from tests.tiny import completion


def judge(reward: Reward, pairs: list[tuple[str, str]]) -> list[float | None]:
    prompts = [Prompt(id=str(i), text="", answer=gold) for i, (gold, _) in enumerate(pairs)]
    completions = [completion([3], text=text) for _, text in pairs]
    values = reward.score(prompts, completions).total.tolist()
    return [None if math.isnan(value) else value for value in values]


def test_exact_match() -> None:
    pairs = [("570", "570"), ("570", " 570\n"), ("570", "57"), ("570", "5700"), ("", "570"), (" ", ""), ("570", "")]
    assert judge(ExactMatchReward(), pairs) == [1, 1, 0, 0, None, None, 0]


@pytest.mark.parametrize(
    ("position", "expected"), [("first", [1, 0, 0, 1, 0, 1, None, 1, 1]), ("last", [1, 1, 1, 1, 0, 1, None, 1, 0])]
)
def test_numeric(position: str, expected: list[float | None]) -> None:
    pairs = [
        ("56", "56"),
        ("56", "7 * 8 = 56"),
        ("1234", "between 7 and 1,234"),
        ("5", "5.0"),
        ("56", "fifty-six"),
        ("-3", "x = -3."),
        ("seven", "7"),
        ("1,000", "1000"),
        ("12", "12, then 3"),
    ]
    assert judge(NumericReward(position), pairs) == expected


def test_a_function_may_decline_to_judge() -> None:
    assert judge(FunctionReward(lambda p, c: [1.0, None, float("nan"), 0]), [("", "")] * 4) == [1, None, None, 0]
    assert judge(FunctionReward(lambda p, c: torch.tensor([1, 0])), [("", "")] * 2) == [1, 0]


@pytest.mark.parametrize(
    ("values", "message"), [([1.0], r"shape \(1,\) for 2 completions"), ([1.0, math.inf], "infinite.*completion 1")]
)
def test_what_a_function_returns_is_checked(values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judge(FunctionReward(lambda p, c: values), [("", "")] * 2)


def test_weighted_sum() -> None:
    def constant(*values: float | None) -> FunctionReward:
        return FunctionReward(lambda p, c: list(values))

    reward = WeightedSumReward([constant(1, 0, None, None), constant(0.5, 0.5, 0.5, None)], [1.0, 0.2])
    assert judge(reward, [("", "")] * 4) == pytest.approx([1.1, 0.1, 0.1, None])
    prompts, completions = [Prompt(id="", text="", answer="")] * 4, [completion([3])] * 4
    accuracy = reward.score(prompts, completions).accuracy.tolist()
    assert accuracy[:2] == [1, 0]
    assert math.isnan(accuracy[2])
    assert math.isnan(accuracy[3])
    other = WeightedSumReward([constant(1.0), constant(0.5)], [1.0, 1.0], accuracy=1)
    assert other.score(prompts[:1], completions[:1]).accuracy.tolist() == [0.5]
    with pytest.raises(ValueError, match="`weights` must hold one weight per reward; got 1 for 2"):
        WeightedSumReward([constant(1.0), constant(1.0)], [1.0])
    with pytest.raises(ValueError, match="`accuracy` must be the position of a reward, 0 to 0"):
        WeightedSumReward([constant(1.0)], [1.0], accuracy=1)


def test_a_completion_knows_that_it_was_cut() -> None:
    assert Completion(token_ids=(1,), logprobs=(0.0,), finish_reason="length").truncated
