"""From prompts to rows with advantages: generate, score, measure collapse, estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from avspo_lightning.advantages import AdvantageEstimator
from avspo_lightning.functional import advantage_collapse_rate, collapsed_groups, scorable_groups
from avspo_lightning.metrics import AdaptiveThreshold, AdvantageCollapseRate
from avspo_lightning.rewards import Reward
from avspo_lightning.rollouts.answers import Answers, answer
from avspo_lightning.rollouts.batch import to_batch
from avspo_lightning.rollouts.engine import RolloutEngine
from avspo_lightning.rollouts.sampler import GroupSampler
from avspo_lightning.seeds import derive_seed
from avspo_lightning.types import (
    AdvantageContext,
    CollapseSummary,
    EvaluationSet,
    Prompt,
    Rollout,
    SamplingParams,
)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where this rank stands, and how a tensor is gathered from all of them."""

    rank: int = 0
    world_size: int = 1
    all_gather: Callable[[Tensor], Tensor] = lambda local: local[None]
    """[B, ...] of this rank to [world_size, B, ...]."""

    def share(self, items: Sequence[Prompt]) -> Sequence[Prompt]:
        """The items of this rank: every ``world_size``-th."""
        return items[self.rank :: self.world_size]

    def gather(self, local: Tensor) -> Tensor:
        """The shares of all ranks, [N, ...], in the order of the items before they were shared."""
        return self.all_gather(local).transpose(0, 1).flatten(0, 1)


class Collector:
    """Produces the rollouts of an iteration, the same ones on any number of ranks.

    Args:
        engine: Samples the completions.
        reward: Scores them.
        estimator: Turns the rewards of all ranks into advantages.
        threshold: Holds tau, which is updated after the advantages are made.
        sampler: Says which groups are trained on.
        collapse_rate: Counts collapsed groups over the run; it is given the rewards of all ranks, so it needs no sync.
        tokenizer: Decodes completions, for rewards and logs only.
        group_size: Completions per prompt (G).
        sampling: How training completions are sampled.
        collapse_on: The part of the reward that ACR is measured on.
        truncated: What becomes of completions cut at the limit: ``keep``; ``mask``, no loss tokens but still in the
            group's statistics; ``exclude``, out of both.
        topology: Ranks.
        seed: Seed of the run.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        reward: Reward,
        estimator: AdvantageEstimator,
        threshold: AdaptiveThreshold,
        sampler: GroupSampler,
        collapse_rate: AdvantageCollapseRate,
        tokenizer: PreTrainedTokenizerBase,
        group_size: int,
        sampling: SamplingParams,
        collapse_on: Literal["accuracy", "total"] = "accuracy",
        truncated: Literal["keep", "mask", "exclude"] = "keep",
        topology: Topology = Topology(),
        seed: int = 0,
    ) -> None:
        self.engine = engine
        self.reward = reward
        self.estimator = estimator
        self.threshold = threshold
        self.sampler = sampler
        self.collapse_rate = collapse_rate
        self.tokenizer = tokenizer
        self.group_size = group_size
        self.sampling = sampling
        self.collapse_on = collapse_on
        self.truncated = truncated
        self.topology = topology
        self.seed = seed

    def answer(self, prompts: Sequence[Prompt], *, iteration: int) -> Answers:
        """Scored answers to this rank's share of the prompts; talks to no other rank.

        Args:
            prompts: Those of all ranks, the same list on each.
            iteration: Iterations done before the one that they are for.

        Raises:
            ValueError: If the engine cannot complete one of the prompts, on every rank alike.
        """
        sampling = replace(self.sampling, num_samples=self.group_size)
        self.engine.check(prompts, sampling)
        return self._answer(self.topology.share(prompts), sampling, iteration)

    def collect(self, prompts: Sequence[Prompt], *, iteration: int, answers: Answers | None = None) -> Rollout:
        """The rollouts of one iteration.

        Args:
            prompts: Those of all ranks, the same list on each.
            iteration: Iterations done before this one.
            answers: What ``answer`` returned for them; None: it is asked now.
        """
        answers = answers or self.answer(prompts, iteration=iteration)
        own, completions = self.topology.share(prompts), answers.completions
        table = self._gathered(answers)

        rewards, accuracy = table[..., 0], table[..., 1]
        measured = accuracy if self.collapse_on == "accuracy" else rewards
        context = AdvantageContext(
            iteration=iteration,
            acr=self.collapse_rate(measured).item(),
            tau=self.threshold.compute().item(),
            prompt_ids=tuple(prompt.id for prompt in prompts),
            seed=self.seed,
        )
        advantages = self.estimator(rewards, context)
        still_collapsed = self.estimator.still_collapsed(rewards, context)
        trained = scorable_groups(rewards) & self.sampler.keep(still_collapsed)
        collapse = self._collapse_summary(measured, still_collapsed, [prompt.level for prompt in prompts], context)
        if scorable_groups(rewards).any():
            self.threshold.update(context.acr, rewards.nanmean().item())

        rank, world_size = self.topology.rank, self.topology.world_size
        own_rewards, own_advantages = rewards[rank::world_size], advantages[rank::world_size]
        batch = to_batch(
            own,
            completions,
            rewards=own_rewards,
            advantages=own_advantages,
            sampling=self.sampling,
            trained=trained[rank::world_size],
            mask_truncated=self.truncated == "mask",
        )
        return Rollout(
            name="train",
            iteration=iteration,
            policy_version=answers.policy_version,
            prompts=tuple(own),
            completions=completions,
            rewards=own_rewards,
            advantages=own_advantages,
            batch=batch,
            collapse=collapse,
            metrics={
                **_means(table),
                "time/generate_seconds": answers.generate_seconds,
                "time/score_seconds": answers.score_seconds,
            },
        )

    def evaluate(self, evaluation: EvaluationSet, prompts: Sequence[Prompt], *, first_index: int) -> Rollout:
        """Answers to some prompts of an evaluation set, under its protocol.

        Args:
            evaluation: The set.
            prompts: Some of its prompts, those of this rank.
            first_index: Tells these prompts from others of the set in the seeds.
        """
        sampling = replace(self.sampling, temperature=evaluation.temperature, num_samples=evaluation.num_samples)
        self.engine.check(evaluation.prompts, sampling)
        answers = self._answer(prompts, sampling, evaluation.name, first_index)
        return Rollout(
            name=evaluation.name,
            iteration=0,
            policy_version=answers.policy_version,
            prompts=tuple(prompts),
            completions=answers.completions,
            rewards=answers.accuracy,
        )

    def _answer(self, prompts: Sequence[Prompt], sampling: SamplingParams, draw: int | str, first: int = 0) -> Answers:
        rank, world_size = self.topology.rank, self.topology.world_size
        indices = (first + i * world_size + rank for i in range(len(prompts)))
        # half of a seed's range, since the samples of a prompt add their index to it
        seeds = [derive_seed(self.seed, draw, index) // 2 for index in indices]
        return answer(self.engine, self.reward, self.tokenizer, prompts, seeds, sampling)

    def _gathered(self, answers: Answers) -> Tensor:
        """float64 [N, G, 4] of all ranks: total, accuracy, length, truncated. One collective for all of it."""
        total, accuracy = answers.total, answers.accuracy
        completions = answers.completions
        lengths = torch.tensor([[len(c.token_ids) for c in group] for group in completions], dtype=torch.float64)
        truncated = torch.tensor([[c.truncated for c in group] for group in completions])
        if self.truncated == "exclude":
            total, accuracy = (values.masked_fill(truncated, float("nan")) for values in (total, accuracy))
        return self.topology.gather(torch.stack([total, accuracy, lengths, truncated.double()], dim=-1))

    def _collapse_summary(
        self, measured: Tensor, still_collapsed: Tensor, levels: Sequence[str], context: AdvantageContext
    ) -> CollapseSummary:
        scorable, collapsed = scorable_groups(measured), collapsed_groups(measured)
        right = collapsed & (measured.nan_to_num(nan=-torch.inf).amax(-1) > 0)
        num_groups = int(scorable.sum())

        def rate(groups: Tensor) -> float:
            return groups.sum().item() / num_groups if num_groups else 0.0

        by_level = {
            level: advantage_collapse_rate(measured[[i for i, other in enumerate(levels) if other == level]]).item()
            for level in sorted(set(levels) - {""})
        }
        return CollapseSummary(
            acr=context.acr,
            acr_effective=rate(collapsed & still_collapsed),
            acr_all_right=rate(right),
            acr_all_wrong=rate(collapsed & ~right),
            acr_cumulative=self.collapse_rate.compute().item(),
            tau=context.tau,
            num_virtual=self.estimator.num_virtual(self.group_size, context),
            num_groups=num_groups,
            num_unscorable=len(measured) - num_groups,
            acr_by_level=by_level,
        )


def _means(table: Tensor) -> dict[str, float]:
    """Means over all ranks of the gathered table; NaN rewards are left out and counted."""
    rewards, accuracy, lengths, truncated = table.unbind(-1)
    unscorable = rewards.isnan()
    valid = rewards[~unscorable]
    return {
        "reward/mean": valid.mean().item() if len(valid) else 0.0,
        "reward/std": valid.std(correction=0).item() if len(valid) else 0.0,
        "reward/accuracy": accuracy[~accuracy.isnan()].mean().item() if not accuracy.isnan().all() else 0.0,
        "reward/unscorable": unscorable.double().mean().item(),
        "completion/length": lengths.mean().item(),
        "completion/num_tokens": lengths.sum().item(),
        "completion/truncated": truncated.mean().item(),
    }
