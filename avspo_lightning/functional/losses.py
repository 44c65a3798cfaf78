"""The clipped policy-gradient loss: ratios, clips, KL estimators and the ways to average over tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Aggregation = Literal["seq_mean", "token_mean_global", "token_mean_local", "constant", "seq_sum", "sum_of_seq_means"]
RatioLevel = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of one micro-batch with its diagnostics, all scalars; only the loss carries a gradient."""

    loss: Float[Tensor, ""]
    """To be minimised."""
    ratio_mean: Float[Tensor, ""]
    """Mean of new / old probability, over tokens (over sequences at the sequence level)."""
    ratio_max_deviation: Float[Tensor, ""]
    """Largest distance of that ratio from 1."""
    clip_low_fraction: Float[Tensor, ""]
    """Share of tokens (sequences) with ratio < 1 - clip_low and a negative advantage: they carry no gradient."""
    clip_high_fraction: Float[Tensor, ""]
    """Share with ratio > 1 + clip_high and a positive advantage."""
    kl: Float[Tensor, ""]
    """Mean KL to the reference over tokens, in nats; 0 without a reference."""
    num_tokens: Int[Tensor, ""]
    """Tokens that were trained on; the weight of the means over tokens."""
    num_sequences: Int[Tensor, ""]
    """Rows with such a token; the weight of the means over sequences."""


def policy_loss(
    logprobs: Float[Tensor, "R T"],
    old_logprobs: Float[Tensor, "R T"] | None,
    advantages: Float[Tensor, " R"] | Float[Tensor, "R T"],
    mask: Bool[Tensor, "R T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: Aggregation = "seq_mean",
    ratio_level: RatioLevel = "token",
    max_tokens: int | None = None,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    ref_logprobs: Float[Tensor, "R T"] | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
) -> PolicyLoss:
    """Clipped surrogate loss of GRPO and its relatives.

    l_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A) + kl_coef KL_t, with rho_t = pi(t) / pi_old(t), or
    at the ``sequence`` level exp(mean_t log rho_t) for every token (GSPO, arXiv 2507.18071). T_i counts the unmasked
    tokens of row i, S the rows that have any (AVSPO paper eqs. 3 and 13, arXiv 2605.21125)::

        seq_mean           1/S sum_i 1/T_i sum_t l      GRPO
        token_mean_global  sum l / num_tokens           DAPO, arXiv 2503.14476
        token_mean_local   sum l / sum_i T_i            over this call alone
        constant           sum l / (S max_tokens)       Dr.GRPO, arXiv 2503.20783
        seq_sum            1/S sum_i sum_t l
        sum_of_seq_means   sum_i 1/T_i sum_t l          DCPO, arXiv 2509.02333

    Given the counts of the whole optimizer step, the losses of its micro-batches add up to its loss under every
    aggregation but ``token_mean_local``, however it is split.

    Args:
        logprobs: [R, T], the policy's, with gradient. Masked positions may hold anything, NaN included.
        old_logprobs: [R, T], those of the policy that sampled; None: the policy itself, so the ratio is 1.
        advantages: [R] or [R, T]; no gradient reaches them.
        mask: [R, T], True at tokens to train on; numerators and denominators see no other.
        clip_low: Distance of the lower clip from 1.
        clip_high: Distance of the upper clip from 1.
        aggregation: One of the above.
        ratio_level: ``token`` or ``sequence``.
        max_tokens: Longest completion that was allowed, for ``constant``.
        num_tokens: Unmasked tokens of the whole optimizer step, for ``token_mean_global``.
        num_sequences: Rows of the whole optimizer step with an unmasked token; None: those of this call.
        ref_logprobs: [R, T] of the reference policy.
        kl_coef: Weight of the KL to the reference; 0 only reports it.
        kl_estimator: See :func:`kl_divergence`.

    Returns:
        The loss with its diagnostics; without an unmasked token the loss is 0 and so is its gradient.

    Raises:
        ValueError: If the shapes differ, an option is unknown or out of its range, or one that the aggregation or the
            KL needs is missing.

    Example:
        >>> logprobs = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> policy_loss(logprobs, logprobs - 1, torch.tensor([1.0, -1.0]), mask).loss
        tensor(0.7591)
    """
    _check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
    _check_coefficients(clip_low, clip_high, kl_coef)
    if kl_coef and ref_logprobs is None:
        raise ValueError(f"`kl_coef` = {kl_coef} needs `ref_logprobs`; give them, or set it to 0.")
    logprobs = torch.where(mask, logprobs, 0.0)
    old_logprobs = logprobs.detach() if old_logprobs is None else torch.where(mask, old_logprobs.detach(), 0.0)
    ref_logprobs = logprobs.detach() if ref_logprobs is None else torch.where(mask, ref_logprobs.detach(), 0.0)
    advantages = _token_advantages(advantages, mask).to(logprobs.dtype)

    ratio = _ratio(logprobs - old_logprobs, mask, ratio_level)
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    kl = kl_divergence(logprobs, ref_logprobs, estimator=kl_estimator)
    if kl_coef:
        losses = losses + kl_coef * kl
    loss = aggregate(
        losses.expand_as(mask), mask, aggregation=aggregation,
        max_tokens=max_tokens, num_tokens=num_tokens, num_sequences=num_sequences,
    )  # fmt: skip
    with torch.no_grad():
        return PolicyLoss(loss=loss, **_diagnostics(ratio, advantages, kl, mask, clip_low, clip_high))


def kl_divergence(
    logprobs: Float[Tensor, "*tokens"], ref_logprobs: Float[Tensor, "*tokens"], *, estimator: KLEstimator = "k3"
) -> Float[Tensor, "*tokens"]:
    """Per-token estimate of KL(policy || reference) from tokens that the policy sampled.

    With x = log(ref / policy), k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1 (Schulman, "Approximating KL divergence"):
    k1 has no bias but may be negative, k2 has little variance but a bias, k3 has neither fault.

    Args:
        logprobs: Log-probabilities under the policy.
        ref_logprobs: Of the same tokens under the reference.
        estimator: ``k1``, ``k2`` or ``k3``.

    Returns:
        In nats, in the same shape.

    Raises:
        ValueError: If ``estimator`` is unknown.

    Example:
        >>> kl_divergence(torch.tensor([-1.0]), torch.tensor([-1.5]))
        tensor([0.1065])
    """
    x = ref_logprobs - logprobs
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    if estimator == "k3":
        return x.exp() - x - 1
    raise ValueError(f"`estimator` must be one of {', '.join(get_args(KLEstimator))}, got {estimator!r}.")


def aggregate(
    values: Float[Tensor, "R T"],
    mask: Bool[Tensor, "R T"],
    *,
    aggregation: Aggregation = "seq_mean",
    max_tokens: int | None = None,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
) -> Float[Tensor, ""]:
    """One number from a value per token; the formulas stand in :func:`policy_loss`.

    Args:
        values: [R, T]; masked positions may hold anything.
        mask: [R, T], True at tokens that count.
        aggregation: See :func:`policy_loss`.
        max_tokens: Longest completion that was allowed, for ``constant``.
        num_tokens: Unmasked tokens of the whole optimizer step, for ``token_mean_global``.
        num_sequences: Rows of the whole optimizer step with an unmasked token; None: those of this call.

    Returns:
        Scalar; 0 without an unmasked token.

    Raises:
        ValueError: If ``aggregation`` is unknown or the count that it needs is missing or out of its range.

    Example:
        >>> aggregate(torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[True, True], [True, False]]))
        tensor(3.5000)
    """
    _check_counts(aggregation, max_tokens, num_tokens, num_sequences)
    sums = torch.where(mask, values, 0.0).sum(-1)
    lengths = mask.sum(-1)
    if aggregation == "token_mean_global":
        return sums.sum() / max(num_tokens or 0, 1)
    if aggregation == "token_mean_local":
        return sums.sum() / lengths.sum().clamp(min=1)
    if aggregation in ("seq_mean", "sum_of_seq_means"):
        sums = sums / lengths.clamp(min=1)
    if aggregation == "sum_of_seq_means":
        return sums.sum()
    rows = (lengths > 0).sum().clamp(min=1) if num_sequences is None else max(num_sequences, 1)
    return sums.sum() / (rows * max_tokens if aggregation == "constant" and max_tokens else rows)


def _ratio(log_ratio: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """[R, T] at the token level, [R, 1] at the sequence level."""
    if level == "token":
        return log_ratio.exp()
    if level == "sequence":
        return (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()
    raise ValueError(f"`ratio_level` must be one of {', '.join(get_args(RatioLevel))}, got {level!r}.")


def _token_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """[R, 1] or [R, T], 0 where nothing is trained on."""
    if advantages.shape == mask.shape:
        return torch.where(mask, advantages.detach(), 0.0)
    if advantages.shape == mask.shape[:1]:
        return torch.where(mask.any(-1), advantages.detach(), 0.0)[:, None]
    raise ValueError(
        f"`advantages` must have shape [R] or [R, T] for a mask {tuple(mask.shape)}, got {tuple(advantages.shape)}."
    )


def _diagnostics(
    ratio: Tensor, advantages: Tensor, kl: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    rows = mask.any(-1, keepdim=True)

    def mean(values: Tensor) -> Tensor:
        units = mask if values.shape == mask.shape else rows
        return torch.where(units, values, 0.0).sum() / units.sum().clamp(min=1)

    units = mask if ratio.shape == mask.shape else rows
    deviation = torch.where(units, (ratio - 1).abs(), 0.0)
    return {
        "ratio_mean": mean(ratio),
        "ratio_max_deviation": deviation.max() if deviation.numel() else deviation.sum(),
        "clip_low_fraction": mean(((ratio < 1 - clip_low) & (advantages < 0)).to(ratio.dtype)),
        "clip_high_fraction": mean(((ratio > 1 + clip_high) & (advantages > 0)).to(ratio.dtype)),
        "kl": mean(kl),
        "num_tokens": mask.sum(),
        "num_sequences": rows.sum(),
    }


def _check_shapes(mask: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != mask.shape:
            raise ValueError(f"`{name}` must have the shape of `mask`, {tuple(mask.shape)}, got {tuple(tensor.shape)}.")


def _check_coefficients(clip_low: float, clip_high: float, kl_coef: float) -> None:
    if not 0 <= clip_low <= 1:
        raise ValueError(f"`clip_low` must be in [0, 1] (a distance from ratio 1), got {clip_low}.")
    if not clip_high >= 0:
        raise ValueError(f"`clip_high` must be >= 0 (a distance from ratio 1), got {clip_high}.")
    if not kl_coef >= 0:
        raise ValueError(f"`kl_coef` must be >= 0, got {kl_coef}.")


def _check_counts(aggregation: str, max_tokens: int | None, num_tokens: int | None, num_sequences: int | None) -> None:
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"`aggregation` must be one of {', '.join(get_args(Aggregation))}, got {aggregation!r}.")
    if aggregation == "token_mean_global" and num_tokens is None:
        raise ValueError(
            "`aggregation` = 'token_mean_global' needs `num_tokens`, the tokens of the whole optimizer step over all"
            " micro-batches and ranks; without it, choose 'token_mean_local'."
        )
    if aggregation == "constant" and (max_tokens is None or max_tokens < 1):
        raise ValueError(f"`aggregation` = 'constant' needs `max_tokens` >= 1, the completion limit, got {max_tokens}.")
    for name, count in (("num_tokens", num_tokens), ("num_sequences", num_sequences)):
        if count is not None and count < 0:
            raise ValueError(f"`{name}` must be >= 0, got {count}.")
