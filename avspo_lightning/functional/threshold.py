"""The adaptive trigger threshold tau_adapt."""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch import Tensor

ThresholdRule = Literal["sign", "raw"]


def next_threshold(
    threshold: float | Tensor,
    acr: float | Tensor,
    reward_mean: float | Tensor,
    previous_reward_mean: float | Tensor | None,
    *,
    eta: float = 0.01,
    bounds: tuple[float, float] = (0.1, 0.9),
    rule: ThresholdRule = "sign",
) -> float:
    """The threshold of the next step.

    tau(n+1) = clip(tau(n) + eta * s * (ACR(n) - tau(n)), lowest, highest), where dJ = J(n) - J(n-1) and s is sign(dJ)
    or, under ``raw``, dJ itself (AVSPO paper eq. 10, arXiv 2605.21125).

    Args:
        threshold: tau_adapt of this step, in [0, 1].
        acr: Share of collapsed groups of this step, before augmentation.
        reward_mean: J, the mean of all real rewards of this step; virtual ones never enter.
        previous_reward_mean: J of the step before; None at the first step, which moves nothing.
        eta: Step size.
        bounds: Lowest and highest threshold; the lowest may be 0 (augment whenever a group has collapsed).
        rule: ``sign`` or ``raw``.

    Returns:
        tau_adapt of the next step; unchanged where a rate or a mean is NaN (nothing was scored).

    Raises:
        ValueError: If the bounds, the rule or eta are out of their range.

    Example:
        >>> next_threshold(0.5, 0.8, 0.4, 0.3)
        0.503
    """
    check_threshold_options(eta=eta, bounds=bounds, rule=rule)
    tau, rate = float(threshold), float(acr)
    change = math.nan if previous_reward_mean is None else float(reward_mean) - float(previous_reward_mean)
    if math.isnan(change) or math.isnan(rate):
        return tau
    if rule == "sign":
        change = (change > 0) - (change < 0)
    return min(max(tau + eta * change * (rate - tau), bounds[0]), bounds[1])


def check_threshold_options(*, eta: float, bounds: tuple[float, float], rule: str) -> None:
    """Refuses options that :func:`next_threshold` cannot work with.

    Raises:
        ValueError: If ``eta`` is negative, ``bounds`` is not 0 <= lowest < highest <= 1, or ``rule`` is unknown.

    Example:
        >>> check_threshold_options(eta=0.0, bounds=(0.0, 0.9), rule="sign")
    """
    if not eta >= 0:
        raise ValueError(f"`eta` must be >= 0 (0 keeps the threshold fixed), got {eta}.")
    if not 0 <= bounds[0] < bounds[1] <= 1:
        raise ValueError(f"`bounds` must satisfy 0 <= lowest < highest <= 1, got {tuple(bounds)}.")
    if rule not in get_args(ThresholdRule):
        raise ValueError(f"`rule` must be one of {', '.join(get_args(ThresholdRule))}, got {rule!r}.")
