"""Completions as rows of tensors; the one place where tokens are aligned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from avspo_lightning.types import Completion, Prompt, RolloutBatch, SamplingParams


def to_batch(
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
    *,
    rewards: Tensor,
    advantages: Tensor,
    sampling: SamplingParams,
    trained: Tensor | None = None,
    mask_truncated: bool = False,
) -> RolloutBatch:
    """Rows [R, ...], prompt-major, from B groups of G completions.

    Masks come from lengths, never from token values: a stop token is trained on, padding is not, and a padding id
    inside a prompt stays visible.

    Args:
        prompts: B prompts.
        completions: G for each of them.
        rewards: float64 [B, G]; a completion with NaN gets no loss tokens.
        advantages: [B, G].
        sampling: Under which they were drawn.
        trained: bool [B], the groups that are trained on; None: all.
        mask_truncated: Whether completions that were cut get no loss tokens.
    """
    rows = [(prompt, completion) for prompt, group in zip(prompts, completions, strict=True) for completion in group]
    prompt_ids, prompt_mask = padded([p.token_ids for p, _ in rows], left=True)
    completion_ids, completion_mask = padded([c.token_ids for _, c in rows])
    logprobs, _ = padded([c.logprobs for _, c in rows], dtype=torch.float32)
    keep = ~rewards.isnan()
    if trained is not None:
        keep &= trained[:, None]
    if mask_truncated:
        keep &= ~torch.tensor([[c.truncated for c in group] for group in completions])
    return RolloutBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        loss_mask=completion_mask & keep.reshape(-1, 1),
        advantages=advantages.reshape(-1).float(),
        rewards=rewards.reshape(-1),
        rollout_logprobs=logprobs,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
    )


def padded(
    sequences: Sequence[Sequence[int] | Sequence[float]], *, left: bool = False, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor]:
    """Values [R, longest], padded with 0, and their bool mask."""
    side = "left" if left else "right"
    pad = torch.nn.utils.rnn.pad_sequence
    values = [torch.tensor(sequence, dtype=dtype) for sequence in sequences]
    mask = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
    return (
        pad(values, batch_first=True, padding_side=side),
        pad(mask, batch_first=True, padding_value=False, padding_side=side),
    )
