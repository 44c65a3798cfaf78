"""Advantages with virtual samples."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from avspo_lightning.advantages.base import AdvantageEstimator
from avspo_lightning.functional import (
    augmented_rewards,
    avspo_advantages,
    collapsed_groups,
    num_virtual_triggered,
)
from avspo_lightning.seeds import derive_seed
from avspo_lightning.types import AdvantageContext


class AVSPO(AdvantageEstimator):
    """GRPO, with virtual rewards in the statistics of collapsed groups while ACR exceeds tau (arXiv 2605.21125, 4).

    Off the trigger, and in mixed groups always, the advantages are those of GRPO to the last bit.

    Args:
        alpha: Sensitivity of the number of virtual samples, K = ceil(G * ACR^alpha).
        exponent: ``alpha`` (eq. 8), or ``one_minus_alpha``, which fits the paper's prose; equal at 0.5.
        num_virtual: This K, whatever the ACR; default: by the formula.
        strategy: Virtual rewards: ``stratified`` (eq. 9), ``fixed``, ``exp``, ``uniform``, or ``none`` of them.
        r_anchor: Largest virtual reward above an all-wrong group's own.
        r_max_source: What ``fixed``, ``exp`` and ``uniform`` scale with: the ``achievable`` or the ``observed`` reward.
        augment: Collapsed groups to augment: ``both`` kinds, the all-``wrong`` or the all-``right`` ones.
        reward_range: Lowest and highest reward of the task; rewards are mapped from it to [0, 1] first.
        success_threshold: Reward above which a collapsed group is right; default: the lower end of the range.
        eps: Added to the std of every group, in units of the mapped reward.
        ddof_group: 1 for the sample std in plain groups (as TRL), 0 for the population's.
        ddof_augmented: The same for groups with virtual samples.
    """

    def __init__(
        self,
        alpha: float = 0.5,
        exponent: Literal["alpha", "one_minus_alpha"] = "alpha",
        num_virtual: int | None = None,
        strategy: Literal["none", "uniform", "fixed", "exp", "stratified"] = "stratified",
        r_anchor: float = 0.1,
        r_max_source: Literal["achievable", "observed"] = "achievable",
        augment: Literal["both", "wrong", "right"] = "both",
        reward_range: tuple[float, float] = (0.0, 1.0),
        success_threshold: float | None = None,
        eps: float = 1e-4,
        ddof_group: int = 1,
        ddof_augmented: int = 0,
    ) -> None:
        self._trigger: dict[str, Any] = {
            "alpha": alpha,
            "exponent": exponent,
            "num_virtual": num_virtual,
            "strategy": strategy,
        }
        self._augmentation: dict[str, Any] = {
            "r_anchor": r_anchor,
            "r_max_source": r_max_source,
            "augment": augment,
            "reward_range": tuple(reward_range),
            "success_threshold": success_threshold,
        }
        self._spread: dict[str, Any] = {"eps": eps, "ddof_group": ddof_group, "ddof_augmented": ddof_augmented}
        # the functions check every option: let a wrong one fail here, before a model is loaded
        avspo_advantages([[reward_range[0]] * 2], threshold=0.0, **self._trigger, **self._augmentation, **self._spread)

    def __call__(self, rewards: Tensor, context: AdvantageContext) -> Tensor:
        """Advantages float64 [N, G].

        Raises:
            ValueError: If a reward lies below ``reward_range``; eq. 9 says nothing about it.
        """
        lowest = self._augmentation["reward_range"][0]
        if (rewards < lowest).any():
            raise ValueError(
                f"A reward of {rewards.nan_to_num(nan=lowest).min().item()} lies below `reward_range` ="
                f" {self._augmentation['reward_range']}; set `reward_range` of AVSPO to that of the reward."
            )
        return avspo_advantages(rewards, **self._options(context), **self._spread)

    def num_virtual(self, group_size: int, context: AdvantageContext) -> int:
        """K where ACR exceeds tau, else 0."""
        return num_virtual_triggered(context.acr, group_size, threshold=context.tau, **self._trigger)

    def still_collapsed(self, rewards: Tensor, context: AdvantageContext) -> Tensor:
        """Bool [N]: groups whose rewards are all alike even with the virtual ones."""
        return collapsed_groups(augmented_rewards(rewards, **self._options(context)))

    def _options(self, context: AdvantageContext) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(derive_seed(context.seed, context.iteration, "virtual"))
        given = {"threshold": context.tau, "acr": context.acr, "generator": generator}
        return {**given, **self._trigger, **self._augmentation}
