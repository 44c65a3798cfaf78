"""Advantage collapse rate, exact over batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float64
from torch import Tensor
from torchmetrics import Metric

from avspo_lightning.functional import all_right_groups, all_wrong_groups, as_rewards, collapsed_groups, scorable_groups
from avspo_lightning.functional.collapse import Rewards
from avspo_lightning.functional.virtual_samples import check_choice

Outcome = Literal["any", "right", "wrong"]


class AdvantageCollapseRate(Metric):
    """Collapsed groups / scorable groups over everything seen since the last reset (AVSPO paper eq. 6).

    The state is two integer counts, summed over ranks and saved in checkpoints.

    Args:
        outcome: Which collapsed groups count: ``any``, those all ``right`` or all ``wrong``.
        level: Only groups of this difficulty, in numerator and denominator; None: all of them.
        atol: A group has collapsed if its population std is below it.
        success_threshold: A collapsed group is right if its largest reward is above it, in units of the reward.
        kwargs: Of :class:`torchmetrics.Metric`.

    Raises:
        ValueError: If ``outcome`` is unknown.

    Example:
        >>> metric = AdvantageCollapseRate()
        >>> metric.update(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
        >>> metric.update(torch.tensor([[0.0, 0.0]]))
        >>> metric.compute()
        tensor(0.6667, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    def __init__(
        self,
        outcome: Outcome = "any",
        *,
        level: str | None = None,
        atol: float = 1e-6,
        success_threshold: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_choice("outcome", outcome, get_args(Outcome))
        self.outcome = outcome
        self.level = level
        self.atol = atol
        self.success_threshold = success_threshold
        # A MetricCollection shares one state among metrics whose states have equal names and, after the first batch,
        # equal values. All-right and all-wrong counts may well agree once, so each setting names its state.
        self._counts = f"num_collapsed_and_groups[{outcome}, {level}, {atol}, {success_threshold}]"
        self.add_state(self._counts, torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum", persistent=True)

    def update(self, rewards: Rewards, levels: Sequence[str] | None = None) -> None:
        """Counts the groups of ``rewards``.

        Args:
            rewards: [N, G] of this rank, NaN or None where nothing could score.
            levels: Difficulty of each of the N groups; needed where the metric has a ``level``.

        Raises:
            ValueError: If levels are missing or of another number than the groups.
        """
        values = as_rewards(rewards)
        counted = torch.stack([self._collapsed(values), scorable_groups(values)])
        if self.level is not None:
            counted = counted[:, self._of_level(levels, len(values))]
        setattr(self, self._counts, getattr(self, self._counts) + counted.sum(-1).to(self.device))

    def compute(self) -> Float64[Tensor, ""]:
        """The rate in [0, 1], float64; 0 where no group was scorable."""
        num_collapsed, num_groups = getattr(self, self._counts)
        return num_collapsed.double() / num_groups.clamp(min=1)

    def _collapsed(self, rewards: Tensor) -> Tensor:
        if self.outcome == "any":
            return collapsed_groups(rewards, atol=self.atol)
        select = all_right_groups if self.outcome == "right" else all_wrong_groups
        return select(rewards, atol=self.atol, success_threshold=self.success_threshold)

    def _of_level(self, levels: Sequence[str] | None, num_groups: int) -> list[int]:
        if levels is None or len(levels) != num_groups:
            got = "none" if levels is None else str(len(levels))
            raise ValueError(
                f"`levels` must name the level of each of the {num_groups} groups for `level` = {self.level!r},"
                f" got {got}."
            )
        return [index for index, level in enumerate(levels) if level == self.level]
