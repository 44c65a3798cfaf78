"""The adaptive trigger threshold as a metric with a memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from avspo_lightning.functional import check_threshold_options, next_threshold
from avspo_lightning.functional.threshold import ThresholdRule
from avspo_lightning.metrics.exact import ExactMetric


class AdaptiveThreshold(ExactMetric):
    """The paper's tau_adapt: moves by one step at each update (AVSPO paper eq. 10, arXiv 2605.21125).

    It is a recurrence, not a statistic, so ``reset`` leaves it alone and ranks are not reduced: give every rank the
    global rate and mean. tau and the last mean reward are float64 buffers: checkpoints hold them, and casts of a parent
    module to lower precision do not reach them. One ``forward`` moves tau once and returns the new value.

    Args:
        init: tau before the first update, within ``bounds``.
        eta: Step size; 0 keeps tau fixed.
        bounds: Lowest and highest tau, 0 <= lowest < highest <= 1.
        rule: ``sign`` or ``raw``, see :func:`avspo_lightning.functional.next_threshold`.
        kwargs: Of :class:`torchmetrics.Metric`.

    Raises:
        ValueError: If the bounds, eta or the rule are out of their range, or ``init`` lies outside the bounds.

    Example:
        >>> threshold = AdaptiveThreshold()
        >>> threshold.update(acr=0.8, reward_mean=0.3)
        >>> threshold.update(acr=0.8, reward_mean=0.4)
        >>> threshold.compute()
        tensor(0.5030, dtype=torch.float64)
    """

    is_differentiable = False
    full_state_update = False
    tau: Tensor
    last_reward_mean: Tensor

    def __init__(
        self,
        init: float = 0.5,
        eta: float = 0.01,
        bounds: tuple[float, float] = (0.1, 0.9),
        rule: ThresholdRule = "sign",
        **kwargs: Any,
    ) -> None:
        # A cached result would outlive load_state_dict.
        super().__init__(compute_with_cache=False, sync_on_compute=False, **kwargs)
        check_threshold_options(eta=eta, bounds=bounds, rule=rule)
        if not bounds[0] <= init <= bounds[1]:
            raise ValueError(
                f"`init` must lie within `bounds` {tuple(bounds)}, got {init}; move one of them (a lower bound of 0 is"
                " allowed)."
            )
        self.eta = eta
        self.bounds = (bounds[0], bounds[1])
        self.rule: ThresholdRule = rule
        self.register_buffer("tau", torch.tensor(init, dtype=torch.float64))
        self.register_buffer("last_reward_mean", torch.tensor(torch.nan, dtype=torch.float64))

    @property
    def update_called(self) -> bool:
        """True from the start: tau has a value before the first update."""
        return True

    def update(self, acr: float | Tensor, reward_mean: float | Tensor) -> None:
        """Moves tau by one step.

        Args:
            acr: Share of collapsed groups over all ranks, before augmentation.
            reward_mean: Mean of all real rewards over all ranks. The first one moves nothing, for want of a change.
                Where this or the rate is NaN (nothing was scored), the update does nothing at all.
        """
        rate, mean = float(acr), float(reward_mean)
        if math.isnan(rate) or math.isnan(mean):
            return
        tau = next_threshold(
            self.tau, rate, mean, self.last_reward_mean, eta=self.eta, bounds=self.bounds, rule=self.rule
        )
        self.tau = torch.full_like(self.tau, tau)
        self.last_reward_mean = torch.full_like(self.last_reward_mean, mean)

    def compute(self) -> Float64[Tensor, ""]:
        """tau, float64: the threshold of the next step."""
        return self.tau
