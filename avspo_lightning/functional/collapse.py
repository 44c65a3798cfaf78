"""Which groups of rewards have collapsed, and their rate. All statistics are float64 and skip NaN rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

Rewards = Tensor | Sequence[Any]
"""[N, G] of any dtype, as a tensor or nested sequences; None and NaN mark a completion that nothing could score."""


def as_rewards(
    rewards: Rewards, *, group_ids: Int[Tensor, " R"] | None = None, reward_range: tuple[float, float] = (0.0, 1.0)
) -> Float64[Tensor, "N G"]:
    """Rewards as float64 [N, G], unscored completions as NaN.

    Args:
        rewards: [N, G]; flat [R] where ``group_ids`` is given.
        group_ids: [R], the group of each reward, for groups of unequal size.
        reward_range: Smallest and largest reward that the task can give. Other than (0, 1), it is mapped to [0, 1];
            at (0, 1) the rewards stay as they are, to the last bit.

    Returns:
        float64 [N, G] on the device of ``rewards``, without gradient.

    Raises:
        ValueError: If the shape is not [N, G] with G >= 2, a reward is infinite, or the range is empty.

    Example:
        >>> as_rewards([[1, None], [0, 1]])
        tensor([[1., nan],
                [0., 1.]], dtype=torch.float64)
    """
    low, high = reward_range
    if not low < high:
        raise ValueError(f"`reward_range` must be (lowest, highest) with lowest < highest, got {reward_range}.")
    values = (rewards if isinstance(rewards, Tensor) else _as_tensor(rewards)).detach().to(torch.float64)
    if group_ids is not None:
        values = pack_groups(values, group_ids)
    if values.ndim != 2:
        raise ValueError(
            f"`rewards` must have shape [N, G], got {tuple(values.shape)}. Reshape them prompt by prompt, or give"
            " `group_ids` with flat rewards."
        )
    if values.shape[1] < 2:
        raise ValueError(
            f"`rewards` must hold at least 2 completions per group, got G = {values.shape[1]}: a single completion"
            " has no group to be compared with. Sample more completions per prompt."
        )
    if values.isinf().any():
        raise ValueError("`rewards` must be finite, got an infinite value; use NaN where nothing could be scored.")
    return values if (low, high) == (0, 1) else (values - low) / (high - low)


def pack_groups(values: Float64[Tensor, " R"], group_ids: Int[Tensor, " R"]) -> Float64[Tensor, "N G"]:
    """Flat values as one row per group, in ascending order of the ids; G is the largest group, NaN fills the others.

    Args:
        values: [R], in any order.
        group_ids: [R], the group of each value.

    Returns:
        [N, G]; each group keeps the order of its values.

    Raises:
        ValueError: If ``values`` is not flat, the lengths differ, or a group has a single value.

    Example:
        >>> pack_groups(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).double(), torch.tensor([7, 3, 7, 3, 7]))
        tensor([[2., 4., nan],
                [1., 3., 5.]], dtype=torch.float64)
    """
    if values.ndim != 1 or values.shape != group_ids.shape:
        raise ValueError(
            f"`group_ids` goes with flat rewards of the same length, got rewards {tuple(values.shape)} and ids"
            f" {tuple(group_ids.shape)}. Flatten the rewards, or leave `group_ids` out for [N, G]."
        )
    group, column, sizes = _positions(group_ids)
    if (sizes < 2).any():
        raise ValueError(
            f"`group_ids` must give every group at least 2 completions, but {int((sizes < 2).sum())} of {len(sizes)}"
            " groups have one. Sample more completions per prompt, or leave these rows out."
        )
    packed = values.new_full((len(sizes), int(sizes.max()) if len(sizes) else 2), torch.nan)
    packed[group, column] = values
    return packed


def unpack_groups(packed: Tensor, group_ids: Int[Tensor, " R"]) -> Tensor:
    """Flat values of the rows that :func:`pack_groups` made, in the order of ``group_ids``.

    Example:
        >>> ids = torch.tensor([7, 3, 7, 3, 7])
        >>> unpack_groups(pack_groups(torch.arange(5).double(), ids), ids)
        tensor([0., 1., 2., 3., 4.], dtype=torch.float64)
    """
    group, column, _ = _positions(group_ids)
    return packed[group, column]


def group_mean_std(
    rewards: Float64[Tensor, "N M"], *, ddof: int
) -> tuple[Float64[Tensor, " N"], Float64[Tensor, " N"]]:
    """Mean and standard deviation of the scored rewards of each group.

    Both are taken relative to the largest reward, so that equal rewards of any size have a spread of exactly 0.

    Args:
        rewards: [N, M], NaN where unscored.
        ddof: 0 for the population's standard deviation, 1 for the sample's.

    Returns:
        Two tensors [N]; a row without a scored reward has mean -inf and spread 0.

    Example:
        >>> group_mean_std(torch.tensor([[1.0, 0.0, torch.nan]]).double(), ddof=0)
        (tensor([0.5000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
    """
    valid = ~rewards.isnan()
    count = valid.sum(-1)
    reference = observed_rewards(rewards)
    offsets = torch.where(valid, rewards - reference[:, None], 0.0)
    mean = offsets.sum(-1) / count.clamp(min=1)
    squares = torch.where(valid, offsets - mean[:, None], 0.0).square().sum(-1)
    return reference + mean, (squares / (count - ddof).clamp(min=1)).sqrt()


def observed_rewards(rewards: Float64[Tensor, "N M"]) -> Float64[Tensor, " N"]:
    """The largest scored reward of each group (the paper's r_obs), -inf where nothing was scored.

    Example:
        >>> observed_rewards(torch.tensor([[0.0, 1.0], [0.0, torch.nan]]).double())
        tensor([1., 0.], dtype=torch.float64)
    """
    return rewards.nan_to_num(nan=-torch.inf).amax(-1)


def scorable_groups(rewards: Rewards) -> Bool[Tensor, " N"]:
    """Groups with at least two scored rewards; the others are neither collapsed nor informative.

    Example:
        >>> scorable_groups([[1, None, 0], [None, 1, None]])
        tensor([ True, False])
    """
    return (~as_rewards(rewards).isnan()).sum(-1) >= 2


def collapsed_groups(
    rewards: Rewards, *, atol: float = 1e-6, group_ids: Int[Tensor, " R"] | None = None
) -> Bool[Tensor, " N"]:
    """Scorable groups whose rewards are all alike, so that they teach GRPO nothing.

    sigma_j < tau with the population's standard deviation (AVSPO paper eq. 6, arXiv 2605.21125).

    Args:
        rewards: [N, G], or flat [R] with ``group_ids``.
        atol: The paper's tau, in units of the reward; the comparison is strict.
        group_ids: [R], see :func:`as_rewards`.

    Returns:
        bool [N]; with ``group_ids`` in ascending order of the ids.

    Raises:
        ValueError: If the shape is not [N, G] with G >= 2, or ``atol`` is not positive.

    Example:
        >>> collapsed_groups([[1, 1, 1], [0, 1, 0], [0, 0, None], [None, None, 1]])
        tensor([ True, False,  True, False])
    """
    if not atol > 0:
        raise ValueError(f"`atol` must be positive, got {atol}; 1e-6 suits rewards of order 1.")
    values = as_rewards(rewards, group_ids=group_ids)
    return scorable_groups(values) & (group_mean_std(values, ddof=0)[1] < atol)


def all_right_groups(rewards: Rewards, *, atol: float = 1e-6, success_threshold: float = 0.0) -> Bool[Tensor, " N"]:
    """Collapsed groups whose largest reward is above ``success_threshold``, in units of the reward.

    Example:
        >>> all_right_groups([[1, 1], [0, 0], [1, 0]])
        tensor([ True, False, False])
    """
    values = as_rewards(rewards)
    return collapsed_groups(values, atol=atol) & (observed_rewards(values) > success_threshold)


def all_wrong_groups(rewards: Rewards, *, atol: float = 1e-6, success_threshold: float = 0.0) -> Bool[Tensor, " N"]:
    """Collapsed groups whose largest reward is not above ``success_threshold``, in units of the reward.

    Example:
        >>> all_wrong_groups([[1, 1], [0, 0], [1, 0]])
        tensor([False,  True, False])
    """
    values = as_rewards(rewards)
    return collapsed_groups(values, atol=atol) & (observed_rewards(values) <= success_threshold)


def advantage_collapse_rate(
    rewards: Rewards, *, atol: float = 1e-6, group_ids: Int[Tensor, " R"] | None = None
) -> Float64[Tensor, ""]:
    """Share of collapsed groups among the scorable ones, to be taken over all groups of an update.

    ACR = (1/N) sum_j [sigma_j < tau] (AVSPO paper eq. 6, arXiv 2605.21125).

    Args:
        rewards: [N, G], or flat [R] with ``group_ids``.
        atol: The paper's tau, see :func:`collapsed_groups`.
        group_ids: [R], see :func:`as_rewards`.

    Returns:
        float64 scalar in [0, 1]; 0 where no group is scorable.

    Raises:
        ValueError: As :func:`collapsed_groups`.

    Example:
        >>> advantage_collapse_rate([[1, 1], [0, 1], [0, 0], [None, None]])
        tensor(0.6667, dtype=torch.float64)
    """
    values = as_rewards(rewards, group_ids=group_ids)
    num_groups = scorable_groups(values).sum()
    return collapsed_groups(values, atol=atol).sum().double() / num_groups.clamp(min=1)


def _as_tensor(rewards: Sequence[Any]) -> Tensor:
    try:
        return torch.tensor(_none_as_nan(rewards), dtype=torch.float64)
    except ValueError as error:
        raise ValueError(
            f"`rewards` must be a rectangle [N, G] of numbers, got unequal rows ({error}). Flatten groups of unequal"
            " size and give `group_ids`."
        ) from error


def _none_as_nan(values: object) -> object:
    if isinstance(values, list | tuple):
        return [_none_as_nan(value) for value in values]
    return torch.nan if values is None else values


def _positions(group_ids: Int[Tensor, " R"]) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column of each value after packing, and the size of each group."""
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    order = torch.argsort(group, stable=True)
    starts = sizes.cumsum(0) - sizes
    column = torch.empty_like(group)
    column[order] = torch.arange(len(group), device=group.device) - starts[group[order]]
    return group, column, sizes
