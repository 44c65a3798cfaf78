"""Several rewards as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from avspo_lightning.rewards.base import Reward, RewardScores
from avspo_lightning.types import Completion, Prompt


class WeightedSumReward(Reward):
    """Weighted sum of rewards, one of which says right or wrong.

    A part that cannot judge (NaN) is left out of the sum; where no part can, the total is NaN.

    Args:
        rewards: The parts.
        weights: One weight for each part.
        accuracy: Position of the part that says right or wrong; ACR is measured on it unless told otherwise.
    """

    def __init__(self, rewards: list[Reward], weights: list[float], accuracy: int = 0) -> None:
        if len(rewards) != len(weights) or not rewards:
            raise ValueError(
                f"`weights` must hold one weight per reward; got {len(weights)} for {len(rewards)} rewards."
            )
        if not 0 <= accuracy < len(rewards):
            raise ValueError(f"`accuracy` must be the position of a reward, 0 to {len(rewards) - 1}, got {accuracy}.")
        self.rewards = rewards
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.accuracy = accuracy

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Tensor:
        """The totals."""
        return self.score(prompts, completions).total

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> RewardScores:
        """Totals, with the accuracy part beside them."""
        parts = torch.stack([reward.score(prompts, completions).total for reward in self.rewards], dim=-1)
        total = (parts * self.weights).nansum(-1)
        total[parts.isnan().all(-1)] = float("nan")
        return RewardScores(total=total, accuracy=parts[:, self.accuracy])
