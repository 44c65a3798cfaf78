"""Prompts to scored answers, on this rank alone: the one place that drives an engine and a reward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from avspo_lightning.rewards import Reward, RewardScores
from avspo_lightning.rollouts.engine import RolloutEngine
from avspo_lightning.types import Completion, Prompt, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Answers:
    """G scored completions of each of B prompts."""

    completions: tuple[tuple[Completion, ...], ...]
    """G for each prompt, with their texts."""
    total: Tensor
    """float64 [B, G], the reward; NaN where nothing could judge."""
    accuracy: Tensor
    """float64 [B, G], its part that says right or wrong."""
    policy_version: int
    """Of the weights that they were drawn with."""
    generate_seconds: float = 0.0
    """Until the last answer was there."""
    score_seconds: float = 0.0
    """From then until the last score was."""


def answer(
    engine: RolloutEngine,
    reward: Reward,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    params: SamplingParams,
) -> Answers:
    """Generates in this thread and scores in another, so that finished groups are judged while others are drawn.

    Args:
        engine: With the weights to draw with.
        reward: Called with some finished groups at a time, never twice at once.
        tokenizer: Decodes completions, for the reward and for logs only.
        prompts: B of them.
        seeds: One for each.
        params: How to sample.
    """
    started = time.perf_counter()
    version = engine.version or 0
    groups: dict[int, tuple[Completion, ...]] = {}
    waiting: list[int] = []
    scored: list[tuple[list[int], Future[RewardScores]]] = []
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward") as pool:

        def score_waiting() -> None:
            pairs = [(prompts[i], completion) for i in waiting for completion in groups[i]]
            if pairs:
                scored.append((waiting[:], pool.submit(reward.score, *map(list, zip(*pairs, strict=True)))))
                waiting.clear()

        for i, completions in engine.generate(prompts, seeds, params):
            groups[i] = _decoded(completions, tokenizer)
            waiting.append(i)
            if not scored or scored[-1][1].done():  # while scores are being made, the next ones gather
                score_waiting()
        score_waiting()
        generated = time.perf_counter()
        assert sorted(groups) == list(range(len(prompts))), "an engine answers every prompt"
        assert {len(group) for group in groups.values()} <= {params.num_samples}, "an engine answers every request"
        total, accuracy = _in_order(scored, len(prompts), params.num_samples)
    return Answers(
        completions=tuple(groups[i] for i in range(len(prompts))),
        total=total,
        accuracy=accuracy,
        policy_version=version,
        generate_seconds=generated - started,
        score_seconds=time.perf_counter() - generated,
    )


def _decoded(completions: Sequence[Completion], tokenizer: PreTrainedTokenizerBase) -> tuple[Completion, ...]:
    texts = tokenizer.batch_decode([list(c.token_ids) for c in completions], skip_special_tokens=True)
    return tuple(replace(c, text=text) for c, text in zip(completions, texts, strict=True))


def _in_order(
    scored: Sequence[tuple[list[int], Future[RewardScores]]], num_prompts: int, num_samples: int
) -> tuple[Tensor, Tensor]:
    """Total and accuracy, float64 [B, G] each, in the order of the prompts."""
    total, accuracy = torch.empty(2, num_prompts, num_samples, dtype=torch.float64)
    for rows, future in scored:
        scores = future.result()
        total[rows] = scores.total.reshape(-1, num_samples)
        accuracy[rows] = scores.accuracy.reshape(-1, num_samples)
    return total, accuracy
