"""Group-relative advantages."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from avspo_lightning.advantages.base import AdvantageEstimator
from avspo_lightning.functional import group_advantages
from avspo_lightning.types import AdvantageContext


class GRPO(AdvantageEstimator):
    """A = (r - mean) / (std + eps) within each group (DeepSeekMath, arXiv 2402.03300). Collapsed groups get 0.

    Args:
        scale: What the centred rewards are divided by: the std of their ``group``, of the whole ``batch``, or ``none``.
        ddof: 1 for the sample std (as TRL), 0 for the population's.
        eps: Added to the std.
    """

    def __init__(self, scale: Literal["group", "batch", "none"] = "group", ddof: int = 1, eps: float = 1e-4) -> None:
        if scale not in ("group", "batch", "none"):
            raise ValueError(f"`scale` must be 'group', 'batch' or 'none', got {scale!r}.")
        if ddof not in (0, 1):
            raise ValueError(f"`ddof` must be 0 or 1, got {ddof}.")
        if eps < 0:
            raise ValueError(f"`eps` must be >= 0, got {eps}.")
        self.scale: Literal["group", "batch", "none"] = scale
        self.ddof = ddof
        self.eps = eps

    def __call__(self, rewards: Tensor, context: AdvantageContext) -> Tensor:
        """Advantages float64 [N, G]."""
        return group_advantages(rewards, scale=self.scale, ddof=self.ddof, eps=self.eps)
