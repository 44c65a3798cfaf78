"""The records that travel through the package: frozen, keyword-only, torch alone.

Shape legend, used everywhere: N groups (prompts) of an update over all ranks, B of them on this rank, G completions per
group, R = B*G rows, P prompt tokens (left-padded), T completion tokens (right-padded), V vocabulary, K virtual samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem, tokenised once; every engine is given ``token_ids``, never text."""

    id: str
    """Stable over runs; the same for the same problem."""
    text: str
    """What the model reads, template included."""
    answer: str
    """Gold answer, for the verifier."""
    token_ids: tuple[int, ...] = ()
    """``text`` as ids; holds exactly one BOS where the model has one."""
    level: str = ""
    """Difficulty, empty where the data set has none."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled answer, ids as the engine drew them."""

    token_ids: tuple[int, ...]
    """Sampled tokens, the stop token included where one was drawn."""
    logprobs: tuple[float, ...]
    """Log-probability of each token under the engine's policy, after temperature."""
    finish_reason: Literal["stop", "length"]
    """``length``: cut at the limit, so truncated."""
    text: str = ""
    """Decoded without special tokens; for rewards and logs only."""

    @property
    def truncated(self) -> bool:
        """Whether the engine stopped at the token limit."""
        return self.finish_reason == "length"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How an engine samples. Nothing of the model's own generation config is added to it but its stop tokens."""

    max_tokens: int
    """Most completion tokens, stop token included."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion, beside the model's own end-of-sequence ids."""
    num_samples: int = 1
    """Completions per prompt."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"`num_samples` must be at least 1, got {self.num_samples}.")
        if self.max_tokens < 1:
            raise ValueError(f"`max_tokens` must be at least 1, got {self.max_tokens}.")
        if self.temperature < 0:
            raise ValueError(f"`temperature` must be >= 0 (0 is greedy), got {self.temperature}.")


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """Held-out prompts with the protocol they are answered under."""

    name: str
    """Stands in the metric keys: ``val/<name>/<metric>``."""
    prompts: tuple[Prompt, ...]
    """All of them; each rank answers its share."""
    num_samples: int = 1
    """Completions per prompt; more than one needs a temperature above 0."""
    temperature: float = 0.0
    """0 is greedy."""

    def __post_init__(self) -> None:
        if self.num_samples < 1 or (self.num_samples > 1 and self.temperature == 0):
            raise ValueError(
                f"Evaluation set `{self.name}`: `num_samples` = {self.num_samples} at `temperature` = "
                f"{self.temperature}; greedy answers are all the same, so ask for one, or set a temperature above 0."
            )


@dataclass(frozen=True, kw_only=True)
class AdvantageContext:
    """What an advantage estimator may know beside the rewards; the same on every rank."""

    iteration: int
    """Iterations of reinforcement learning done before this one."""
    acr: float
    """Share of collapsed groups over all ranks, in [0, 1]."""
    tau: float
    """Threshold in force in this iteration."""
    prompt_ids: tuple[str, ...] = ()
    """Ids of the N prompts, in the order of the rewards."""
    seed: int = 0
    """Seed of the run, for estimators that draw."""


@dataclass(frozen=True, kw_only=True)
class CollapseSummary:
    """Advantage collapse of one iteration over all ranks."""

    acr: float
    """Collapsed / scorable groups before augmentation (paper eq. 6)."""
    acr_effective: float
    """The same after augmentation."""
    acr_all_right: float
    """Collapsed groups with a positive reward / scorable groups."""
    acr_all_wrong: float
    """The other collapsed groups / scorable groups."""
    acr_cumulative: float
    """Collapsed / scorable groups of all iterations so far; after 100 of them, the paper's early indicator."""
    tau: float
    """The threshold that decided."""
    num_virtual: int
    """Virtual samples per augmented group; 0 where augmentation did not fire."""
    num_groups: int
    """Scorable groups."""
    num_unscorable: int = 0
    """Groups with fewer than two valid rewards."""
    acr_by_level: dict[str, float] = field(default_factory=dict)
    """Raw rate for each difficulty level that occurred."""

    @property
    def triggered(self) -> bool:
        """Whether virtual samples were added in this iteration."""
        return self.num_virtual > 0


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Rows to learn from. The token shift is done: column t of every [R, T] tensor is about the same token."""

    prompt_ids: Tensor
    """int64 [R, P], left-padded."""
    prompt_mask: Tensor
    """bool [R, P], True at real tokens."""
    completion_ids: Tensor
    """int64 [R, T], right-padded."""
    completion_mask: Tensor
    """bool [R, T], True at real tokens."""
    loss_mask: Tensor
    """bool [R, T], True at the tokens that are trained on."""
    advantages: Tensor
    """float32 [R]."""
    rewards: Tensor
    """float64 [R], raw; NaN where nothing could judge."""
    rollout_logprobs: Tensor
    """float32 [R, T], the engine's."""
    old_logprobs: Tensor | None = None
    """float32 [R, T] of the policy that collected; None: no update lies between, so the ratio is 1."""
    num_sequences: int = 0
    """Rows with a loss token in the whole optimizer step: all micro-batches, all ranks."""
    num_tokens: int = 0
    """Loss tokens in the whole optimizer step: all micro-batches, all ranks."""
    temperature: float = 1.0
    """Sampling temperature; every log-probability of the batch is of softmax(logits / temperature)."""
    max_tokens: int = 0
    """Most completion tokens that were allowed."""

    def __len__(self) -> int:
        return self.completion_ids.shape[0]

    def to(self, device: torch.device | str, **kwargs: Any) -> RolloutBatch:
        """Copy with every tensor on ``device`` (Lightning's batch transfer calls it)."""
        moved: dict[str, Any] = {name: value.to(device, **kwargs) for name, value in self._tensors().items()}
        return replace(self, **moved)

    def rows(self, index: Tensor | Sequence[int]) -> RolloutBatch:
        """The rows at ``index``, cut to their own longest prompt and completion."""
        index = torch.as_tensor(index, dtype=torch.int64, device=self.completion_ids.device)
        picked: dict[str, Any] = {name: value[index] for name, value in self._tensors().items()}
        prompt = int(picked["prompt_mask"].sum(-1).max()) if len(index) else 0
        tokens = int(picked["completion_mask"].sum(-1).max()) if len(index) else 0
        for name, value in picked.items():
            if name.startswith("prompt"):
                picked[name] = value[:, value.shape[1] - prompt :]
            elif value.ndim == 2:
                picked[name] = value[:, :tokens]
        return replace(self, **picked)

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers, so that checkpoints load weights-only."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def _tensors(self) -> dict[str, Tensor]:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What one collection produced on this rank, with what it learned about all ranks."""

    name: str
    """``train``, or the evaluation set."""
    iteration: int
    """Iterations done before this one."""
    policy_version: int = 0
    """Of the weights that drew the completions: optimizer steps taken."""
    prompts: tuple[Prompt, ...]
    """The B prompts of this rank."""
    completions: tuple[tuple[Completion, ...], ...]
    """G completions for each of them."""
    rewards: Tensor
    """float64 [B, G]; NaN where nothing could judge."""
    advantages: Tensor | None = None
    """float64 [B, G]; None in evaluation."""
    batch: RolloutBatch | None = None
    """The same as rows; None in evaluation."""
    collapse: CollapseSummary | None = None
    """Over all ranks; None in evaluation."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over all ranks: reward, length, truncation, time; keys without the stage. Empty in evaluation."""

    def to(self, device: torch.device | str, **kwargs: Any) -> Rollout:
        """Copy with its tensors on ``device`` (Lightning's batch transfer calls it)."""
        batch = None if self.batch is None else self.batch.to(device, **kwargs)
        return replace(self, rewards=self.rewards.to(device, **kwargs), batch=batch)
