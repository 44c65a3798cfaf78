"""Virtual samples: how many are added to a collapsed group, and which rewards they carry."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float64, Int
from torch import Tensor

Strategy = Literal["none", "uniform", "fixed", "exp", "stratified"]
Exponent = Literal["alpha", "one_minus_alpha"]


def num_virtual_samples(
    acr: float | Tensor, group_size: int, *, alpha: float = 0.5, exponent: Exponent = "alpha"
) -> int:
    """Virtual samples per augmented group.

    K = max(1, min(G, ceil(G * ACR^alpha))) (AVSPO paper eq. 8, arXiv 2605.21125). The paper's prose (a small alpha
    augments little, alpha = 1 always adds G) fits the exponent 1 - alpha instead; both agree at alpha = 0.5.

    Args:
        acr: Share of collapsed groups, in [0, 1].
        group_size: Completions per group, G.
        alpha: Sensitivity, >= 0.
        exponent: ``alpha``, or ``one_minus_alpha`` (then alpha <= 1).

    Returns:
        K in [1, G].

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> [num_virtual_samples(n / 8, 8) for n in range(1, 9)]
        [3, 4, 5, 6, 7, 7, 8, 8]
    """
    rate = float(acr)
    if not 0 <= rate <= 1:
        raise ValueError(f"`acr` must be a rate in [0, 1], got {rate}.")
    if group_size < 1:
        raise ValueError(f"`group_size` must be at least 1, got {group_size}.")
    check_choice("exponent", exponent, get_args(Exponent))
    power = alpha if exponent == "alpha" else 1 - alpha
    if not power >= 0:
        limit = ">= 0" if exponent == "alpha" else "<= 1 with `exponent` = 'one_minus_alpha'"
        raise ValueError(f"`alpha` must be {limit}, got {alpha}.")
    # Rounding keeps 4.000000000000001 from becoming 5.
    return max(1, min(group_size, math.ceil(round(group_size * rate**power, 12))))


def num_virtual_triggered(
    acr: float | Tensor,
    group_size: int,
    *,
    threshold: float | Tensor,
    alpha: float = 0.5,
    exponent: Exponent = "alpha",
    num_virtual: int | None = None,
    strategy: Strategy = "stratified",
) -> int:
    """Virtual samples per augmented group in this step, 0 where augmentation does not fire.

    It fires if ACR > tau_adapt, strictly (AVSPO paper eqs. 10-11, arXiv 2605.21125).

    Args:
        acr: Share of collapsed groups over all ranks, in [0, 1].
        group_size: Completions per group, G.
        threshold: The paper's tau_adapt.
        alpha: See :func:`num_virtual_samples`.
        exponent: See :func:`num_virtual_samples`.
        num_virtual: Ablation: this K (at most G) whatever the ACR.
        strategy: ``none`` never fires.

    Returns:
        K in [0, G].

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> num_virtual_triggered(0.5, 8, threshold=0.5), num_virtual_triggered(0.625, 8, threshold=0.5)
        (0, 7)
    """
    if num_virtual is not None and num_virtual < 1:
        raise ValueError(f"`num_virtual` must be at least 1, got {num_virtual}; None takes it from the ACR.")
    adaptive = num_virtual_samples(acr, group_size, alpha=alpha, exponent=exponent)
    if strategy == "none" or not float(acr) > float(threshold):
        return 0
    return adaptive if num_virtual is None else min(num_virtual, group_size)


def virtual_rewards(
    r_obs: float | Tensor,
    num_virtual: int,
    *,
    strategy: Strategy = "stratified",
    r_anchor: float = 0.1,
    r_max: float = 1.0,
    success_threshold: float | None = None,
    generator: torch.Generator | None = None,
) -> Float64[Tensor, " K"]:
    """Rewards of the virtual samples of one collapsed group.

    With k = 1..K (AVSPO paper eq. 9 and Table 2, arXiv 2605.21125)::

        stratified, success   r_obs (1 - k/(K+1))               all below the observed reward
        stratified, failure   r_obs + r_anchor (K-k+1)/K        all above it; r_obs = 0 in the paper
        fixed                 0.5 r_max
        exp                   r_max e^(-0.5 k)
        uniform               r_max U[0, 1)

    Args:
        r_obs: The group's largest observed reward, >= 0.
        num_virtual: K.
        strategy: One of the above, or ``none`` (no values).
        r_anchor: Largest virtual reward of a failed group above its own; only its sign matters, save through eps.
        r_max: Largest reward that the task can give (or that was observed), in units of the reward.
        success_threshold: A group is a success if r_obs is above it; None: above 0.
        generator: Source of the uniform draws; None: torch's global one.

    Returns:
        float64 [K]; empty for ``none`` or K = 0.

    Raises:
        ValueError: If ``r_obs`` is negative or another argument is out of its range.

    Example:
        >>> virtual_rewards(1.0, 3)
        tensor([0.7500, 0.5000, 0.2500], dtype=torch.float64)
        >>> virtual_rewards(0.0, 2)
        tensor([0.1000, 0.0500], dtype=torch.float64)
    """
    if num_virtual < 0:
        raise ValueError(f"`num_virtual` must be >= 0, got {num_virtual}.")
    observed = torch.as_tensor(r_obs, dtype=torch.float64).detach().reshape(1)
    return virtual_reward_rows(
        observed,
        torch.full_like(observed, num_virtual, dtype=torch.int64),
        width=num_virtual,
        strategy=strategy,
        r_anchor=r_anchor,
        r_max=torch.full_like(observed, r_max),
        success_threshold=success_threshold,
        generator=generator,
    )[0]


def virtual_reward_rows(
    r_obs: Float64[Tensor, " N"],
    num_virtual: Int[Tensor, " N"],
    *,
    width: int,
    strategy: Strategy,
    r_anchor: float,
    r_max: Float64[Tensor, " N"],
    success_threshold: float | None,
    generator: torch.Generator | None,
) -> Float64[Tensor, "N K"]:
    """:func:`virtual_rewards` of N groups at once: K_j values for group j, NaN behind them up to ``width``.

    Example:
        >>> virtual_reward_rows(
        ...     torch.tensor([1.0, 0.0]).double(), torch.tensor([1, 2]), width=2, strategy="stratified", r_anchor=0.1,
        ...     r_max=torch.ones(2).double(), success_threshold=None, generator=None,
        ... )
        tensor([[0.5000,    nan],
                [0.1000, 0.0500]], dtype=torch.float64)
    """
    check_choice("strategy", strategy, get_args(Strategy))
    if not r_anchor > 0:
        raise ValueError(f"`r_anchor` must be positive, got {r_anchor}.")
    if strategy == "none" or width == 0:
        return r_obs.new_empty((len(r_obs), 0))
    if (r_obs < 0).any():
        raise ValueError(
            f"`r_obs` must be >= 0, got {float(r_obs.min())}: virtual rewards lie between 0 and the largest reward."
            " Give the task's `reward_range`, for example (-1, 1), and rewards are mapped to [0, 1] first."
        )
    observed, count, r_max = r_obs[:, None], num_virtual[:, None], r_max[:, None]
    k = torch.arange(1, width + 1, dtype=torch.float64, device=r_obs.device)
    if strategy == "stratified":
        success = observed * (1 - k / (count + 1))
        failure = observed + r_anchor * (count - k + 1) / count
        values = torch.where(observed > (success_threshold or 0.0), success, failure)
    elif strategy == "fixed":
        values = (0.5 * r_max).expand(-1, width)
    elif strategy == "exp":
        values = r_max * torch.exp(-0.5 * k)
    else:
        device = r_obs.device if generator is None else generator.device
        draws = torch.rand((len(r_obs), width), generator=generator, dtype=torch.float64, device=device)
        values = r_max * draws.to(r_obs.device)
    return torch.where(k <= count, values, torch.nan)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses an option that is none of its choices.

    Raises:
        ValueError: Naming the option, the choices and what came.

    Example:
        >>> check_choice("exponent", "alpha", ("alpha", "one_minus_alpha"))
    """
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}.")
