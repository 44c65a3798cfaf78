"""The contract of an advantage estimator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from avspo_lightning.functional import collapsed_groups
from avspo_lightning.types import AdvantageContext


class AdvantageEstimator(ABC):
    """Turns the rewards of an iteration into advantages.

    The rewards are those of all ranks, and every rank calls the estimator with the same ones: it needs no collective,
    and whatever state it keeps is the same everywhere.
    """

    @abstractmethod
    def __call__(self, rewards: Tensor, context: AdvantageContext) -> Tensor:
        """Advantages float64 [N, G] of ``rewards`` float64 [N, G]; NaN rewards get advantage 0."""

    def num_virtual(self, group_size: int, context: AdvantageContext) -> int:
        """Virtual samples per augmented group in this iteration; 0 where nothing is augmented."""
        return 0

    def still_collapsed(self, rewards: Tensor, context: AdvantageContext) -> Tensor:
        """Bool [N]: the groups that are collapsed after augmentation, for the effective ACR."""
        return collapsed_groups(rewards)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; plain tensors and numbers."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
