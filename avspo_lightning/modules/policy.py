"""The policy: a causal language model, and the log-probabilities it gives to sampled tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from avspo_lightning.functional import logprobs_from_hidden
from avspo_lightning.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class CompletionStatistics:
    """What the policy says about the completion tokens of a batch; 0 where ``completion_mask`` is False."""

    logprobs: Tensor
    """float32 [R, T], with gradient."""
    entropy: Tensor
    """float32 [R, T], without; in nats."""


def load_policy(
    source: str | PretrainedConfig, *, dtype: torch.dtype, attention: str | None, trust_remote_code: bool
) -> PreTrainedModel:
    """Causal LM from a folder or hub id, or with fresh weights from a config; every dropout off.

    Dropout would draw another mask for each forward, and the ratio to the old policy would not start at 1.
    """
    options = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": trust_remote_code}
    if isinstance(source, PretrainedConfig):
        policy = AutoModelForCausalLM.from_config(source, **options)
    else:
        policy = AutoModelForCausalLM.from_pretrained(source, **options)
    for module in policy.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name in ("attention_dropout", "attn_pdrop"):
        _zero_attribute(policy, name)
    return policy.train()


def freeze(policy: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Excludes from training the parameters whose name matches one of the regular expressions.

    Raises:
        ValueError: If a pattern matches nothing, or nothing is left to train.
    """
    names = [name for name, _ in policy.named_parameters()]
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(f"`freeze` pattern {pattern!r} matches no parameter; names look like {names[0]!r}.")
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(not any(re.search(pattern, name) for pattern in patterns))
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ValueError(f"`freeze` = {list(patterns)} leaves no parameter to train.")


def completion_statistics(policy: PreTrainedModel, batch: RolloutBatch) -> CompletionStatistics:
    """Log-prob and entropy of every completion token, under softmax(logits / temperature).

    The backbone runs once over prompt and completion; the output head sees completion tokens alone, in chunks, so that
    no [R, T, V] tensor is held. What a token gets depends on its own row only, not on padding or batch mates.
    """
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    hidden = policy.get_decoder()(
        input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False
    ).last_hidden_state
    first = batch.prompt_ids.shape[1] - 1  # the token at column t of the completion is predicted one place before it
    hidden = hidden[:, first : first + batch.completion_ids.shape[1]]
    kept = batch.completion_mask
    values = logprobs_from_hidden(
        hidden[kept], output_head(policy), batch.completion_ids[kept], temperature=batch.temperature, with_entropy=True
    )
    assert values.entropy is not None, "asked for"
    zeros = torch.zeros(kept.shape, dtype=torch.float32, device=kept.device)
    return CompletionStatistics(
        logprobs=zeros.masked_scatter(kept, values.logprobs.float()),
        entropy=zeros.masked_scatter(kept, values.entropy.float()),
    )


def output_head(policy: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Hidden states to logits, with the scaling and soft-capping that some families apply after the linear layer."""
    linear = policy.get_output_embeddings()
    config = policy.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    factor = getattr(config, "logit_scale", None)  # Cohere
    divisor = getattr(config, "logits_scaling", None)  # Granite

    def head(hidden: Tensor) -> Tensor:
        logits = linear(hidden)
        if factor is not None:
            logits = logits * factor
        if divisor is not None:
            logits = logits / divisor
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return head


def _zero_attribute(policy: PreTrainedModel, name: str) -> None:
    for owner in (policy.config, *policy.modules()):
        if isinstance(getattr(owner, name, None), float):
            setattr(owner, name, 0.0)
