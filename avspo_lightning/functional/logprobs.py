"""Log-probabilities of sampled tokens, and how sure the policy was: from logits, or in chunks from hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class TokenStatistics:
    """What :func:`logprobs_from_hidden` found about M tokens."""

    logprobs: Float[Tensor, " M"]
    """log p(token), with gradient."""
    entropy: Float[Tensor, " M"] | None = None
    """Entropy of the policy at each token, in nats, without gradient; None unless asked for."""
    self_certainty: Float[Tensor, " M"] | None = None
    """KL(U || p) at each token, in nats, without gradient; None unless asked for."""


def token_logprobs(
    logits: Float[Tensor, "*tokens V"], token_ids: Int[Tensor, "*tokens"], *, temperature: float = 1.0
) -> Float[Tensor, "*tokens"]:
    """Log-probability of each token under the policy that sampled it.

    log softmax(logits / temperature)[token].

    Args:
        logits: [R, T, V] (any leading shape), already shifted: position t predicts token t. Never changed in place.
        token_ids: [R, T].
        temperature: Sampling temperature, > 0.

    Returns:
        [R, T], float32 or wider.

    Raises:
        ValueError: If ``temperature`` is not positive.

    Example:
        >>> token_logprobs(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor([-0.6931])
    """
    return _pick(_log_softmax(logits, temperature), token_ids)


def token_entropy(logits: Float[Tensor, "*tokens V"], *, temperature: float = 1.0) -> Float[Tensor, "*tokens"]:
    """Entropy of the policy at each position, H = -sum_v p_v log p_v (RENT, arXiv 2505.22660).

    Args:
        logits: [R, T, V] (any leading shape); -inf forbids a token.
        temperature: Sampling temperature, > 0.

    Returns:
        [R, T] in nats, float32 or wider.

    Raises:
        ValueError: If ``temperature`` is not positive.

    Example:
        >>> token_entropy(torch.tensor([[0.0, 0.0]]))
        tensor([0.6931])
    """
    return _entropy(_log_softmax(logits, temperature))


def self_certainty(logits: Float[Tensor, "*tokens V"], *, temperature: float = 1.0) -> Float[Tensor, "*tokens"]:
    """How far the policy is from a uniform guess, KL(U || p) (INTUITOR, arXiv 2505.19590).

    -log V - (1/V) sum_v log p_v; infinite where a token is forbidden.

    Args:
        logits: [R, T, V] (any leading shape).
        temperature: Sampling temperature, > 0.

    Returns:
        [R, T] in nats, float32 or wider.

    Raises:
        ValueError: If ``temperature`` is not positive.

    Example:
        >>> self_certainty(torch.tensor([[0.0, 0.0]]))
        tensor([0.])
    """
    return _self_certainty(_log_softmax(logits, temperature))


def logprobs_from_hidden(
    hidden: Float[Tensor, "M H"],
    head: Callable[[Tensor], Tensor],
    token_ids: Int[Tensor, " M"],
    *,
    temperature: float = 1.0,
    chunk_bytes: int = 2**22,
    with_entropy: bool = False,
    with_self_certainty: bool = False,
) -> TokenStatistics:
    """:func:`token_logprobs` of ``head(hidden)`` without ever holding the logits of more than one chunk of tokens.

    Chunks are computed again in backward. While a chunk is worked on it takes up to four times ``chunk_bytes``, and
    each one reads the whole head: raise ``chunk_bytes`` for speed, lower it for memory.

    Args:
        hidden: [M, H], the last hidden state at the position that predicts each token.
        head: From [m, H] to logits [m, V]; the model's output embedding, with whatever it scales or caps.
        token_ids: [M].
        temperature: Sampling temperature, > 0.
        chunk_bytes: Size of one chunk of float32 logits; a chunk has at least one token.
        with_entropy: Also the entropy of each position, without gradient.
        with_self_certainty: Also the self-certainty of each position, without gradient.

    Returns:
        The statistics of the M tokens, float32 or wider.

    Raises:
        ValueError: If ``temperature`` or ``chunk_bytes`` is not positive.

    Example:
        >>> head = torch.nn.Linear(2, 3)
        >>> hidden, token_ids = torch.ones(4, 2), torch.tensor([0, 1, 2, 0])
        >>> chunked = logprobs_from_hidden(hidden, head, token_ids, chunk_bytes=24)
        >>> torch.allclose(chunked.logprobs, token_logprobs(head(hidden), token_ids))
        True
    """
    if chunk_bytes < 1:
        raise ValueError(f"`chunk_bytes` must be positive, got {chunk_bytes}.")

    def statistics(hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        log_p = _log_softmax(head(hidden), temperature)
        picked = _pick(log_p, token_ids)
        # Last, so that the recomputation in backward stops before it.
        with torch.no_grad():
            return (
                picked,
                _entropy(log_p) if with_entropy else None,
                _self_certainty(log_p) if with_self_certainty else None,
            )

    with torch.no_grad():
        vocab_size = head(hidden[:1]).shape[-1]
    size = max(1, chunk_bytes // (4 * vocab_size))
    chunks = [
        checkpoint(statistics, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden.split(size), token_ids.split(size), strict=True)
    ]
    logprobs, entropy, certainty = zip(*chunks, strict=True)
    return TokenStatistics(
        logprobs=torch.cat(logprobs),
        entropy=torch.cat(entropy) if with_entropy else None,
        self_certainty=torch.cat(certainty) if with_self_certainty else None,
    )


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if not temperature > 0:
        raise ValueError(
            f"`temperature` must be positive, got {temperature}; greedy decoding has no distribution, so score its"
            " tokens at temperature 1."
        )
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if temperature != 1:
        logits = logits.to(dtype) / temperature
    return torch.log_softmax(logits, dim=-1, dtype=dtype)


def _pick(log_p: Tensor, token_ids: Tensor) -> Tensor:
    return log_p.gather(-1, token_ids[..., None].long()).squeeze(-1)


def _entropy(log_p: Tensor) -> Tensor:
    # A forbidden token has log p = -inf and p = 0; their product is 0 only once log p is finite.
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)


def _self_certainty(log_p: Tensor) -> Tensor:
    return -math.log(log_p.shape[-1]) - log_p.mean(-1)
