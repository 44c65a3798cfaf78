"""The contract of a reward, and the one place where its output is checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from avspo_lightning.types import Completion, Prompt

RewardFunction = Callable[[Sequence[Prompt], Sequence[Completion]], Tensor | Sequence[float | None]]
"""What a user may pass for a reward: one value per completion, None or NaN where it cannot judge."""


@dataclass(frozen=True, kw_only=True)
class RewardScores:
    """Scores of n completions."""

    total: Tensor
    """float64 [n], what is trained on; NaN where nothing could judge."""
    accuracy: Tensor
    """float64 [n], the part that says right or wrong; the total itself where there is one reward."""


class Reward(ABC):
    """Scores completions against the gold answers of their prompts."""

    @abstractmethod
    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Tensor | Sequence[float | None]:
        """One reward for each (prompt, completion) pair; None or NaN where it cannot judge."""

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> RewardScores:
        """Checked scores; a reward with several parts overrides this to tell its accuracy from its total."""
        total = checked(self(prompts, completions), len(completions), type(self).__name__)
        return RewardScores(total=total, accuracy=total)


class FunctionReward(Reward):
    """A plain function as a reward."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Tensor | Sequence[float | None]:
        """What the function returns."""
        return self.function(prompts, completions)


def checked(values: Tensor | Sequence[float | None], num_completions: int, name: str) -> Tensor:
    """Reward values as float64 [n], None as NaN.

    Raises:
        ValueError: If their number is not that of the completions, or one is infinite.
    """
    if not isinstance(values, Tensor):
        values = torch.tensor(
            [float("nan") if value is None else float(value) for value in values], dtype=torch.float64
        )
    values = values.detach().to(device="cpu", dtype=torch.float64)
    if values.shape != (num_completions,):
        raise ValueError(
            f"Reward `{name}` returned shape {tuple(values.shape)} for {num_completions} completions;"
            " it must return one value for each of them (None where it cannot judge)."
        )
    if values.isinf().any():
        raise ValueError(
            f"Reward `{name}` returned an infinite value for completion {int(values.isinf().nonzero()[0])};"
            " return None where it cannot judge."
        )
    return values
