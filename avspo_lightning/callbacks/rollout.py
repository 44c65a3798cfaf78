"""When rollouts happen: before each training epoch, and as evaluation asks for answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from avspo_lightning.advantages import AVSPO, AdvantageEstimator
from avspo_lightning.callbacks.observer import notify
from avspo_lightning.callbacks.probe import prove_weights
from avspo_lightning.datamodules import PromptCursor, PromptDataModule, tokenized
from avspo_lightning.metrics import AdaptiveThreshold, AdvantageCollapseRate
from avspo_lightning.rewards import FunctionReward, Reward, RewardFunction
from avspo_lightning.rollouts import (
    Collector,
    GroupSampler,
    HFEngine,
    KeepAll,
    RolloutBuffer,
    RolloutEngine,
    Topology,
    named_weights,
)
from avspo_lightning.rollouts.engine import tokens_containing
from avspo_lightning.types import EvaluationSet, Prompt, Rollout, RolloutBatch, SamplingParams

_FEW_PROMPTS = 4  # below this ACR takes so few values that threshold and alpha have little to act on


class RolloutCallback(pl.Callback):
    """Makes one Lightning epoch one iteration of reinforcement learning.

    When a training epoch starts it brings the weights to the engine, collects the rollouts of the next prompts and
    fills the buffer that the Trainer then iterates over. It works with any LightningModule that has a ``model`` (a
    transformers causal LM) and a ``tokenizer``; more than one optimizer step per iteration also needs a
    ``forward(batch)`` that returns the record of ``completion_statistics``.

    Args:
        reward: Scores completions; a Reward, or a function (prompts, completions) -> one value each.
        engine: Samples completions; default: the transformers engine.
        advantage: Estimator; default: AVSPO.
        threshold: tau with its rule; default: starts at 0.5, eta 0.01, bounds 0.1 and 0.9.
        sampler: Which groups are trained on; default: all, ``FilterDrop`` leaves the collapsed ones out.
        group_size: Completions per prompt (G), at least 2.
        prompts_per_step: Prompts per iteration over all ranks (N); ACR is a share of these.
        max_completion_tokens: Longest completion, stop token included.
        temperature: Sampling temperature of training rollouts.
        stop: Strings; a token that contains one of them ends a completion, beside the model's own stop tokens.
        num_passes: Sweeps over the rollouts of an iteration.
        minibatch_size: Rows per forward on each rank; default: all at once. ``Trainer(accumulate_grad_batches=...)``
            says how many of these make one optimizer step.
        truncated: Completions that were cut: ``keep``, ``mask`` (no loss tokens) or ``exclude`` (nor statistics).
        collapse_on: The part of the reward that ACR is measured on, ``accuracy`` or ``total``.
        evaluation_batch_size: Prompts that are answered at once in evaluation, over all ranks.
        prompts: Training prompts, where no PromptDataModule brings them.
        seed: Of every draw.
    """

    def __init__(
        self,
        reward: Reward | RewardFunction,
        engine: RolloutEngine | None = None,
        advantage: AdvantageEstimator | None = None,
        threshold: AdaptiveThreshold | None = None,
        sampler: GroupSampler | None = None,
        group_size: int = 8,
        prompts_per_step: int = 8,
        max_completion_tokens: int = 1024,
        temperature: float = 1.0,
        stop: list[str] | None = None,
        num_passes: int = 1,
        minibatch_size: int | None = None,
        truncated: Literal["keep", "mask", "exclude"] = "keep",
        collapse_on: Literal["accuracy", "total"] = "accuracy",
        evaluation_batch_size: int = 256,
        prompts: Iterable[Prompt] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _require(group_size >= 2, "group_size", group_size, "at least 2: a group of one has nothing to compare with")
        for name, value in {
            "prompts_per_step": prompts_per_step,
            "num_passes": num_passes,
            "evaluation_batch_size": evaluation_batch_size,
            "minibatch_size": 1 if minibatch_size is None else minibatch_size,
        }.items():
            _require(value >= 1, name, value, "at least 1")
        _require(temperature > 0, "temperature", temperature, "above 0: greedy completions of a prompt are all equal")
        _require(truncated in ("keep", "mask", "exclude"), "truncated", truncated, "'keep', 'mask' or 'exclude'")
        _require(collapse_on in ("accuracy", "total"), "collapse_on", collapse_on, "'accuracy' or 'total'")
        self.reward = reward if isinstance(reward, Reward) else FunctionReward(reward)
        self.engine = engine or HFEngine()
        self.advantage = advantage or AVSPO()
        self.threshold = threshold or AdaptiveThreshold()
        self.sampler = sampler or KeepAll()
        self.collapse_rate = AdvantageCollapseRate(sync_on_compute=False)
        self.collapse_rate.persistent(True)
        self.group_size = group_size
        self.prompts_per_step = prompts_per_step
        self.sampling = SamplingParams(max_tokens=max_completion_tokens, temperature=temperature)
        self.stop = stop or []
        self.minibatch_size = minibatch_size
        self.truncated: Literal["keep", "mask", "exclude"] = truncated
        self.collapse_on: Literal["accuracy", "total"] = collapse_on
        self.evaluation_batch_size = evaluation_batch_size
        self.seed = seed
        self.cursor = None if prompts is None else PromptCursor(tuple(prompts), seed=seed)
        self._topology = Topology()
        self._buffer = RolloutBuffer(
            num_rows=self._num_rows, minibatch_size=minibatch_size, num_passes=num_passes, seed=seed
        )
        self._collector: Collector | None = None
        self._trainer: pl.Trainer | None = None
        self._metrics: dict[str, float] = {}
        self._sync_seconds = 0.0
        self._started = time.perf_counter()

    # -- wiring

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Checks what only the Trainer knows, before any model is loaded, and hands the data module its loaders."""
        world_size = trainer.world_size
        if self.prompts_per_step % world_size:
            raise MisconfigurationException(
                f"`prompts_per_step` = {self.prompts_per_step} must be a multiple of the number of processes,"
                f" {world_size}; the next one is {math.ceil(self.prompts_per_step / world_size) * world_size}."
            )
        if stage == "fit" and self.prompts_per_step < _FEW_PROMPTS:
            rank_zero_warn(
                f"`prompts_per_step` = {self.prompts_per_step}: ACR then takes {self.prompts_per_step + 1} values only,"
                f" too coarse for a threshold. Use at least {_FEW_PROMPTS}."
            )
        if trainer.precision in ("bf16-true", "16-true"):
            raise MisconfigurationException(
                f"`precision` = {trainer.precision!r} would cast rewards and advantages too; leave it at '32-true' and"
                " set `dtype` of AVSPOModule, or use 'bf16-mixed'."
            )
        if self.engine.shares_policy and isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            raise MisconfigurationException(
                f"`engine` = {type(self.engine).__name__} generates with the trained module itself, which"
                f" {type(trainer.strategy).__name__} shards; use `strategy` 'ddp' or 'auto'."
            )
        self._trainer = trainer
        self._topology = Topology(
            rank=trainer.global_rank, world_size=world_size, all_gather=_all_gather(trainer, pl_module)
        )
        self._buffer.num_rows = self._num_rows
        datamodule = getattr(trainer, "datamodule", None)
        if isinstance(datamodule, PromptDataModule):
            datamodule.connect(train_loader=self._buffer, evaluate=self.evaluation_loader)
        elif stage == "fit" and self.cursor is None:
            raise MisconfigurationException(
                "RolloutCallback has no prompts: give the Trainer a `PromptDataModule`, or the callback `prompts`."
            )

    def train_dataloader(self) -> RolloutBuffer:
        """The loader of training rollouts, for ``Trainer.fit(train_dataloaders=...)`` without a data module."""
        return self._buffer

    def evaluation_loader(self, evaluation: EvaluationSet) -> EvaluationLoader:
        """A loader that answers the prompts of a set, for ``val_dataloaders`` without a data module."""
        return EvaluationLoader(self, evaluation)

    # -- moments

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock of an iteration that is resumed in its middle."""
        self._started = time.perf_counter()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collects the rollouts of an iteration and fills the buffer with them."""
        self._started = time.perf_counter()
        collector = self.collector(pl_module)
        rollout = collector.collect(self._next_prompts(trainer, pl_module), iteration=trainer.current_epoch)
        self.engine.sleep()
        collected = time.perf_counter()
        assert rollout.batch is not None, "training rollouts have rows"
        batch = rollout.batch
        refresh = getattr(pl_module, "refresh_old_policy", None)
        if refresh is not None:
            refresh()
        if self._buffer.num_steps(trainer.accumulate_grad_batches) > 1:
            batch = replace(batch, old_logprobs=self._old_logprobs(trainer, batch.to(pl_module.device)))
        self._buffer.fill(
            batch,
            iteration=rollout.iteration,
            accumulate=trainer.accumulate_grad_batches,
            all_reduce=_all_reduce(trainer, pl_module),
        )
        self._metrics = {
            **rollout.metrics,
            "time/sync_seconds": self._sync_seconds,
            "time/logprob_seconds": time.perf_counter() - collected,
        }
        self._sync_seconds = 0.0
        notify(trainer, pl_module, replace(rollout, batch=batch))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the rollouts of the iteration.

        At its end, since a run that is resumed in the middle of an iteration must log it too.
        """
        seconds = time.perf_counter() - self._started
        self._metrics["time/tokens_per_second"] = self._metrics["completion/num_tokens"] / seconds
        pl_module.log_dict({f"train/{name}": value for name, value in self._metrics.items()})

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Releases the engine."""
        self._release()
        self._trainer = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Releases the engine: where a run fails, Lightning does not come to ``teardown``."""
        self._release()

    def collector(self, pl_module: Any) -> Collector:
        """The collector, with the engine awake and on the policy's current weights."""
        if self._collector is None:
            self._collector = self._new_collector(pl_module)
        else:
            self.engine.wake()
        assert self._trainer is not None
        version = self._trainer.global_step
        if self.engine.shares_policy:
            self.engine.version = version
        elif self.engine.version != version:
            self._sync_weights(self._trainer, pl_module, version)
        return self._collector

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Threshold, estimator, prompts, and the rollouts that are still to be learned from, of every rank."""
        return {
            "threshold": self.threshold.state_dict(),
            "collapse_rate": self.collapse_rate.state_dict(),
            "advantage": self.advantage.state_dict(),
            "cursor": None if self.cursor is None else self.cursor.state_dict(),
            "metrics": self._metrics,
            "buffers": _gather_objects(self._buffer.snapshot(), self._topology.world_size),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self.threshold.load_state_dict(state_dict["threshold"])
        self.collapse_rate.load_state_dict(state_dict["collapse_rate"])
        self.advantage.load_state_dict(state_dict["advantage"])
        if self.cursor is not None and state_dict["cursor"] is not None:
            self.cursor.load_state_dict(state_dict["cursor"])
        self._metrics = state_dict["metrics"]
        buffers = state_dict["buffers"]
        if len(buffers) != self._topology.world_size and any(buffers):
            raise MisconfigurationException(
                f"The checkpoint was saved in the middle of an iteration of {len(buffers)} processes and cannot go on"
                f" with {self._topology.world_size}: use as many, or a checkpoint saved at the end of an iteration."
            )
        if any(buffers):
            self._buffer.restore(buffers[self._topology.rank])

    # -- parts

    def _sync_weights(self, trainer: pl.Trainer, pl_module: Any, version: int) -> None:
        started = time.perf_counter()
        self.engine.load_weights(named_weights(pl_module.model), version)
        self.engine.version = version
        prove_weights(self.engine, trainer, pl_module, self._topology.all_gather)
        self._sync_seconds += time.perf_counter() - started

    def _release(self) -> None:
        if self._collector is not None:
            self.engine.teardown()
        self._collector = None

    @property
    def _num_rows(self) -> int:
        return self.prompts_per_step // self._topology.world_size * self.group_size

    def _next_prompts(self, trainer: pl.Trainer, pl_module: Any) -> list[Prompt]:
        if self.cursor is not None:
            return tokenized(self.cursor.take(self.prompts_per_step), pl_module.tokenizer)
        datamodule: PromptDataModule = trainer.datamodule  # type: ignore[attr-defined]
        return datamodule.next_prompts(self.prompts_per_step)

    def _new_collector(self, pl_module: Any) -> Collector:
        for name in ("model", "tokenizer"):
            if getattr(pl_module, name, None) is None:
                raise MisconfigurationException(
                    f"RolloutCallback needs `{type(pl_module).__name__}.{name}`: the causal LM as `model` and its"
                    " tokenizer as `tokenizer`, both there before training starts."
                )
        self.engine.setup(pl_module.model, pl_module.tokenizer)
        return Collector(
            engine=self.engine,
            reward=self.reward,
            estimator=self.advantage,
            threshold=self.threshold,
            sampler=self.sampler,
            collapse_rate=self.collapse_rate,
            tokenizer=pl_module.tokenizer,
            group_size=self.group_size,
            sampling=replace(self.sampling, stop_token_ids=tokens_containing(self.stop, pl_module.tokenizer)),
            collapse_on=self.collapse_on,
            truncated=self.truncated,
            topology=self._topology,
            seed=self.seed,
        )

    @torch.no_grad()
    def _old_logprobs(self, trainer: pl.Trainer, batch: RolloutBatch) -> Tensor:
        """Log-probs of the policy that collected, chunk by chunk; through the wrapped module, as training is."""
        rows = torch.arange(len(batch)).split(self.minibatch_size or len(batch))
        width = batch.completion_ids.shape[1]
        assert trainer.strategy.model is not None, "training has started"
        with trainer.precision_plugin.forward_context():  # that of the update, or the ratio would not start at 1
            chunks = [trainer.strategy.model(batch.rows(index)).logprobs for index in rows]
        return torch.cat([torch.nn.functional.pad(c, (0, width - c.shape[1])) for c in chunks]).cpu()


class EvaluationLoader:
    """Answers the prompts of an evaluation set as it is iterated over; all ranks take equally many steps."""

    def __init__(self, callback: RolloutCallback, evaluation: EvaluationSet) -> None:
        self._callback = callback
        self._evaluation = evaluation

    def __len__(self) -> int:
        return math.ceil(len(self._evaluation.prompts) / self._callback.evaluation_batch_size)

    def __iter__(self) -> Iterator[Rollout]:
        """Rollouts of this rank's share of each batch of prompts."""
        trainer, topology = self._callback._trainer, self._callback._topology
        assert trainer is not None, "the loader is iterated over by a Trainer"
        collector = self._callback.collector(trainer.lightning_module)
        size, prompts = self._callback.evaluation_batch_size, self._evaluation.prompts
        try:
            for start in range(0, len(prompts), size):
                share: Sequence[Prompt] = topology.share(prompts[start : start + size])
                yield collector.evaluate(self._evaluation, share, first_index=start)
        finally:  # also where `limit_val_batches` ends it early
            self._callback.engine.sleep()


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"`{name}` must be {expected}, got {value!r}.")


def _all_gather(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Callable[[Tensor], Tensor]:
    def gather(local: Tensor) -> Tensor:
        if trainer.world_size == 1:
            return local[None]
        return trainer.strategy.all_gather(local.to(pl_module.device)).to(local.device)

    return gather


def _all_reduce(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Callable[[Tensor], Tensor]:
    def reduce(local: Tensor) -> Tensor:
        if trainer.world_size == 1:
            return local
        return trainer.strategy.reduce(local.to(pl_module.device), reduce_op="sum")

    return reduce


def _gather_objects(local: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    if world_size == 1:
        return [local]
    gathered: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(gathered, local)
    return gathered
