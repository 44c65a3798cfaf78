"""The transformers engine: the policy samples from itself, batched, with a KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from avspo_lightning.rollouts.batch import padded
from avspo_lightning.rollouts.engine import RolloutEngine, end_of_sequence_ids, max_positions
from avspo_lightning.types import Completion, Prompt, SamplingParams


class HFEngine(RolloutEngine):
    """Generates with the trained module itself: no second copy of the weights, so no synchronisation.

    Each completion is drawn with its own seed by inverting the cumulative distribution, so what it is depends neither
    on its batch mates nor on the rank. Only temperature, length limit and stop tokens shape the distribution; nothing
    else of the model's generation config is read.

    Args:
        max_rows: Most completions that are generated at once; bounds the KV cache.
    """

    shares_policy = True

    def __init__(self, max_rows: int = 512) -> None:
        if max_rows < 1:
            raise ValueError(f"`max_rows` must be at least 1, got {max_rows}.")
        self.max_rows = max_rows
        self._policy: PreTrainedModel | None = None

    def setup(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Remembers the module to generate with and the ids that end its sequences."""
        self._policy = policy
        self._eos = end_of_sequence_ids(policy, tokenizer)
        self.max_length = max_positions(policy)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Nothing to take over: the weights are the policy's own."""

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], params: SamplingParams
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Samples the completions, as many prompts at a time as ``max_rows`` allows."""
        assert self._policy is not None, "setup() comes first"
        self.check(prompts, params)
        num_samples = params.num_samples
        chunk = max(1, self.max_rows // num_samples)
        for start in range(0, len(prompts), chunk):
            ids = [prompt.token_ids for prompt in prompts[start : start + chunk]]
            with _generating(self._policy):
                rows = _sample(self._policy, ids, seeds[start : start + chunk], params, self._eos)
            for i in range(len(ids)):
                yield start + i, rows[i * num_samples : (i + 1) * num_samples]


@contextmanager
def _generating(policy: PreTrainedModel) -> Iterator[None]:
    """No gradient; no dropout, since rollouts are drawn from the policy that the loss describes."""
    was_training = policy.training
    policy.eval()
    try:
        # a compiled policy would be compiled anew as the cache grows
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        policy.train(was_training)


def _sample(
    policy: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    params: SamplingParams,
    eos: frozenset[int],
) -> list[Completion]:
    """Completions of all prompts, prompt-major. The prompt is run once and its cache shared by its samples."""
    device, num_samples = policy.device, params.num_samples
    stop = torch.tensor(sorted(eos | set(params.stop_token_ids)), device=device)
    uniforms = _uniforms([seed + j for seed in seeds for j in range(num_samples)], params.max_tokens).to(device)
    ids, mask = (tensor.to(device) for tensor in padded(prompts, left=True))
    cache = DynamicCache(config=policy.config)
    logits = _next_logits(policy, ids, mask, cache).repeat_interleave(num_samples, dim=0)
    cache.batch_repeat_interleave(num_samples)
    mask = mask.repeat_interleave(num_samples, dim=0)

    num_rows = logits.shape[0]
    drawn = torch.zeros(num_rows, params.max_tokens, dtype=torch.int64, device=device)
    logprobs = torch.zeros(num_rows, params.max_tokens, device=device)
    lengths = torch.full((num_rows,), params.max_tokens, device=device)
    stopped = torch.zeros(num_rows, dtype=torch.bool, device=device)
    rows = torch.arange(num_rows, device=device)  # those still being generated, in the order of the cache
    for t in range(params.max_tokens):
        tokens, chosen = _draw(logits, uniforms[rows, t], params.temperature)
        drawn[rows, t], logprobs[rows, t] = tokens, chosen
        ended = torch.isin(tokens, stop)
        lengths[rows[ended]], stopped[rows[ended]] = t + 1, True
        if t + 1 == params.max_tokens or ended.all():
            break
        if ended.any():
            keep = (~ended).nonzero().squeeze(-1)
            cache.batch_select_indices(keep)
            rows, tokens, mask = rows[keep], tokens[keep], mask[keep]
        mask = torch.nn.functional.pad(mask, (0, 1), value=True)
        logits = _next_logits(policy, tokens[:, None], mask, cache)
    return _completions(drawn, logprobs, lengths, stopped)


def _next_logits(policy: PreTrainedModel, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Logits [n, V] after the last of the new ``ids``; ``mask`` covers the cached tokens too."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    out = policy(
        input_ids=ids,
        attention_mask=mask.long(),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return out.logits[:, -1].float()


def _uniforms(seeds: Sequence[int], num_tokens: int) -> Tensor:
    """float64 [n, num_tokens] in [0, 1): row i from ``seeds[i]`` alone, and none of them from the global generator."""
    generators = (torch.Generator().manual_seed(seed) for seed in seeds)
    return torch.stack([torch.rand(num_tokens, generator=g, dtype=torch.float64) for g in generators])


def _draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Token [n] and its log-prob [n]; greedy at temperature 0, with the log-prob at temperature 1."""
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        # float64: over a vocabulary of 100,000 the tail of a float32 sum would be lost
        cumulative = logprobs.double().exp().cumsum(-1)
        threshold = uniforms * cumulative[:, -1]
        tokens = torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _completions(drawn: Tensor, logprobs: Tensor, lengths: Tensor, stopped: Tensor) -> list[Completion]:
    columns = (drawn.tolist(), logprobs.tolist(), lengths.tolist(), stopped.tolist())
    return [
        Completion(
            token_ids=tuple(ids[:length]),
            logprobs=tuple(values[:length]),
            finish_reason="stop" if ended else "length",
        )
        for ids, values, length, ended in zip(*columns, strict=True)
    ]
