"""Rewards for answers that are numbers in running text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Literal

from avspo_lightning.rewards.base import Reward
from avspo_lightning.types import Completion, Prompt

_NUMBER = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|-?\d+(?:\.\d+)?")


class NumericReward(Reward):
    """1 where the number in the completion equals the gold number exactly, else 0; None where the gold is no number.

    Thousands commas are read (``1,234``); a completion without a number is wrong.

    Args:
        position: Which number of the completion is its answer: the ``first`` or the ``last``.
    """

    def __init__(self, position: Literal["first", "last"] = "last") -> None:
        if position not in ("first", "last"):
            raise ValueError(f"`position` must be 'first' or 'last', got {position!r}.")
        self.position = position

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
        """One reward for each (prompt, completion) pair."""
        return [self._judge(p.answer, c.text) for p, c in zip(prompts, completions, strict=True)]

    def _judge(self, gold: str, text: str) -> float | None:
        expected = _NUMBER.fullmatch(gold.strip())
        if expected is None:
            return None
        found = _NUMBER.findall(text)
        if not found:
            return 0.0
        answer = found[0] if self.position == "first" else found[-1]
        return float(_value(answer) == _value(expected.group()))


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
