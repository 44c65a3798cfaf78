"""Rewards for answers that are compared as text."""

from __future__ import annotations

from collections.abc import Sequence

from avspo_lightning.rewards.base import Reward
from avspo_lightning.types import Completion, Prompt


class ExactMatchReward(Reward):
    """1 where the completion is the gold answer, outer white space aside, else 0; None where the gold is empty."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
        """One reward for each (prompt, completion) pair."""
        pairs = zip(prompts, completions, strict=True)
        return [self._judge(prompt.answer.strip(), completion.text.strip()) for prompt, completion in pairs]

    @staticmethod
    def _judge(gold: str, answer: str) -> float | None:
        return float(answer == gold) if gold else None
