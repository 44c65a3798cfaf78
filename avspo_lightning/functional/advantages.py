"""Advantages of groups of rewards: GRPO's, Dr.GRPO's (``scale="none"``) and AVSPO's."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from avspo_lightning.functional.collapse import (
    Rewards,
    advantage_collapse_rate,
    as_rewards,
    collapsed_groups,
    group_mean_std,
    observed_rewards,
    scorable_groups,
    unpack_groups,
)
from avspo_lightning.functional.virtual_samples import (
    Exponent,
    Strategy,
    check_choice,
    num_virtual_triggered,
    virtual_reward_rows,
)

Augment = Literal["both", "wrong", "right"]
RMaxSource = Literal["achievable", "observed"]
Scale = Literal["group", "batch", "none"]


def group_advantages(
    rewards: Rewards,
    *,
    scale: Scale = "group",
    ddof: int = 1,
    eps: float = 1e-4,
    reward_range: tuple[float, float] = (0.0, 1.0),
    group_ids: Int[Tensor, " R"] | None = None,
) -> Tensor:
    """Rewards relative to their group.

    A = (r - mean) / (std + eps) (DeepSeekMath, arXiv 2402.03300; AVSPO paper eq. 2). ``scale="none"`` is Dr.GRPO's
    A = r - mean (arXiv 2503.20783). A collapsed group gets 0.

    Args:
        rewards: [N, G], or flat [R] with ``group_ids``.
        scale: What the centred rewards are divided by: the std of their ``group``, of the whole ``batch``, or nothing.
        ddof: 0 for the population's std, 1 for the sample's (as TRL).
        eps: Added to the std, in units of the reward.
        reward_range: Other than (0, 1), rewards are mapped from it to [0, 1] first.
        group_ids: [R], the group of each reward, for groups of unequal size.

    Returns:
        float64 in the shape of ``rewards``, without gradient; 0 where the reward is NaN or its group is unscorable.

    Raises:
        ValueError: If the shape is not [N, G] with G >= 2, or an option is out of its range.

    Example:
        >>> group_advantages([[1, 0], [1, 1]], eps=0.0)
        tensor([[ 0.7071, -0.7071],
                [ 0.0000,  0.0000]], dtype=torch.float64)
    """
    check_choice("scale", scale, get_args(Scale))
    _check_spread("ddof", ddof, eps)
    values = as_rewards(rewards, group_ids=group_ids, reward_range=reward_range)
    mean, std = group_mean_std(values, ddof=ddof)
    if scale == "batch":
        std = group_mean_std(values.reshape(1, -1), ddof=ddof)[1].expand_as(mean)
    centred = torch.where(scorable_groups(values)[:, None], values - mean[:, None], torch.nan)
    advantages = centred.nan_to_num(nan=0.0) if scale == "none" else _scaled(centred, std, eps)
    return advantages if group_ids is None else unpack_groups(advantages, group_ids)


def augmented_rewards(
    rewards: Rewards,
    *,
    threshold: float | Tensor,
    acr: float | Tensor | None = None,
    alpha: float = 0.5,
    exponent: Exponent = "alpha",
    num_virtual: int | None = None,
    strategy: Strategy = "stratified",
    r_anchor: float = 0.1,
    r_max_source: RMaxSource = "achievable",
    augment: Augment = "both",
    reward_range: tuple[float, float] = (0.0, 1.0),
    success_threshold: float | None = None,
    atol: float = 1e-6,
    generator: torch.Generator | None = None,
) -> Float64[Tensor, "N GK"]:
    """The real rewards of every group with its virtual ones behind them: R' = R u V (AVSPO paper eq. 12).

    ``collapsed_groups`` of the result are the groups still collapsed after augmentation, and its
    ``advantage_collapse_rate`` is the effective ACR.

    Args:
        rewards: [N, G].
        threshold: The paper's tau_adapt.
        acr: Share of collapsed groups over all ranks; None: that of ``rewards``.
        alpha: See :func:`num_virtual_samples`.
        exponent: See :func:`num_virtual_samples`.
        num_virtual: Ablation: this K whatever the ACR.
        strategy: See :func:`virtual_rewards`.
        r_anchor: See :func:`virtual_rewards`, after mapping to [0, 1].
        r_max_source: r_max is the largest ``achievable`` reward, or the ``observed`` one of the group (then an
            all-wrong group stays collapsed under uniform, fixed and exp).
        augment: Collapsed groups to augment: ``both`` kinds, or those all ``wrong`` or all ``right`` only.
        reward_range: Smallest and largest reward that the task can give; other than (0, 1), rewards are mapped from it
            to [0, 1] first.
        success_threshold: A group is right if its largest reward is above it, in units of ``rewards``; None: if it is
            above the lower end of ``reward_range`` (the paper's rule).
        atol: See :func:`collapsed_groups`.
        generator: See :func:`virtual_rewards`; one row of draws for each augmented group.

    Returns:
        float64 [N, G + K], real rewards first, NaN where a group has no virtual sample; a group with fewer than K
        scored rewards gets as many virtual ones. K = 0 where augmentation does not fire.

    Raises:
        ValueError: If an argument is out of its range, or an augmented group has a negative reward.

    Example:
        >>> augmented_rewards([[1, 1], [0, 1]], threshold=0.4)
        tensor([[1.0000, 1.0000, 0.6667, 0.3333],
                [0.0000, 1.0000,    nan,    nan]], dtype=torch.float64)
    """
    check_choice("augment", augment, get_args(Augment))
    check_choice("r_max_source", r_max_source, get_args(RMaxSource))
    values = as_rewards(rewards, reward_range=reward_range)
    if success_threshold is not None:
        success_threshold = (success_threshold - reward_range[0]) / (reward_range[1] - reward_range[0])
    rate = advantage_collapse_rate(values, atol=atol) if acr is None else acr
    width = num_virtual_triggered(
        rate, values.shape[1], threshold=threshold, alpha=alpha, exponent=exponent,
        num_virtual=num_virtual, strategy=strategy,
    )  # fmt: skip
    observed = observed_rewards(values)
    right = observed > (success_threshold or 0.0)
    chosen = collapsed_groups(values, atol=atol)
    if augment != "both":
        chosen = chosen & (right if augment == "right" else ~right)
    virtual = values.new_full((len(values), width), torch.nan)
    virtual[chosen] = virtual_reward_rows(
        observed[chosen],
        (~values[chosen].isnan()).sum(-1).clamp(max=width),
        width=width,
        strategy=strategy,
        r_anchor=r_anchor,
        r_max=observed[chosen] if r_max_source == "observed" else torch.ones_like(observed[chosen]),
        success_threshold=success_threshold,
        generator=generator,
    )
    return torch.cat([values, virtual], dim=1)


def avspo_advantages(
    rewards: Rewards,
    *,
    threshold: float | Tensor,
    acr: float | Tensor | None = None,
    alpha: float = 0.5,
    exponent: Exponent = "alpha",
    num_virtual: int | None = None,
    strategy: Strategy = "stratified",
    r_anchor: float = 0.1,
    r_max_source: RMaxSource = "achievable",
    augment: Augment = "both",
    eps: float = 1e-4,
    ddof_group: int = 1,
    ddof_augmented: int = 0,
    reward_range: tuple[float, float] = (0.0, 1.0),
    success_threshold: float | None = None,
    atol: float = 1e-6,
    generator: torch.Generator | None = None,
    group_ids: Int[Tensor, " R"] | None = None,
) -> Tensor:
    """GRPO's advantages, save in collapsed groups once the collapse rate exceeds the threshold.

    There A = (r - mean(R')) / (std(R') + eps) with R' = R u V, the real rewards and the virtual ones (AVSPO paper
    eq. 12, arXiv 2605.21125). Mixed groups, and every group where ACR <= threshold, equal :func:`group_advantages` to
    the last bit.

    Args:
        rewards: [N, G], or flat [R] with ``group_ids``.
        threshold: The paper's tau_adapt.
        acr: Share of collapsed groups over all ranks; None: that of ``rewards``.
        alpha: Sensitivity of K to the ACR, see :func:`num_virtual_samples`.
        exponent: ``alpha`` or ``one_minus_alpha``, see :func:`num_virtual_samples`.
        num_virtual: Ablation: this K whatever the ACR.
        strategy: Which virtual rewards, see :func:`virtual_rewards`.
        r_anchor: Largest virtual reward of an all-wrong group above its own.
        r_max_source: ``achievable`` or ``observed``, see :func:`augmented_rewards`.
        augment: Collapsed groups to augment: ``both`` kinds, or those all ``wrong`` or all ``right`` only.
        eps: Added to both stds.
        ddof_group: 1 for the sample std in plain groups (as TRL), 0 for the population's.
        ddof_augmented: The same for R'; the paper's constants need 0.
        reward_range: Other than (0, 1), rewards are mapped from it to [0, 1] first.
        success_threshold: A collapsed group is right if its reward is above it, in units of ``rewards``; None: above
            the lower end of ``reward_range`` (the paper's rule). Set it for composite rewards.
        atol: A group has collapsed if its population std is below it.
        generator: Source of the uniform strategy's draws.
        group_ids: [R], the group of each reward, for groups of unequal size; G of eq. 8 is then the largest.

    Returns:
        float64 in the shape of ``rewards``, without gradient; 0 where the reward is NaN or its group is unscorable.

    Raises:
        ValueError: If the shape is not [N, G] with G >= 2, an option is out of its range, or an augmented group has a
            negative reward.

    Example:
        >>> avspo_advantages([[1, 1], [0, 0], [1, 0]], threshold=0.5)
        tensor([[ 0.9042,  0.9042],
                [-0.9024, -0.9024],
                [ 0.7070, -0.7070]], dtype=torch.float64)
    """
    _check_spread("ddof_augmented", ddof_augmented, eps)
    values = as_rewards(rewards, group_ids=group_ids)
    plain = group_advantages(values, ddof=ddof_group, eps=eps, reward_range=reward_range)
    augmented = augmented_rewards(
        values, threshold=threshold, acr=acr, alpha=alpha, exponent=exponent, num_virtual=num_virtual,
        strategy=strategy, r_anchor=r_anchor, r_max_source=r_max_source, augment=augment, reward_range=reward_range,
        success_threshold=success_threshold, atol=atol, generator=generator,
    )  # fmt: skip
    mean, std = group_mean_std(augmented, ddof=ddof_augmented)
    size = values.shape[1]
    relative = _scaled(augmented[:, :size] - mean[:, None], std, eps)
    has_virtual = ~augmented[:, size:].isnan().all(-1)
    advantages = torch.where(has_virtual[:, None], relative, plain)
    return advantages if group_ids is None else unpack_groups(advantages, group_ids)


def _scaled(centred: Float64[Tensor, "N G"], std: Float64[Tensor, " N"], eps: float) -> Float64[Tensor, "N G"]:
    """Centred / (std + eps), where NaN and 0 / 0 are 0."""
    return (centred / (std[:, None] + eps)).nan_to_num(nan=0.0)


def _check_spread(name: str, ddof: int, eps: float) -> None:
    if ddof not in (0, 1):
        raise ValueError(f"`{name}` must be 0 (population) or 1 (sample), got {ddof}.")
    if not eps >= 0:
        raise ValueError(f"`eps` must be >= 0, got {eps}.")
