"""Proof that an engine has the trainer's weights: both score one fixed sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor

from avspo_lightning.modules import completion_statistics
from avspo_lightning.rollouts import RolloutEngine
from avspo_lightning.types import RolloutBatch

_LENGTH = 32
_STRIDE = 7919  # a prime, so that the sequence wanders over the whole vocabulary


class WeightMismatchError(RuntimeError):
    """The engine's log-probs are not those of the policy whose weights it was given."""


def prove_weights(
    engine: RolloutEngine,
    trainer: pl.Trainer,
    pl_module: Any,
    all_gather: Callable[[Tensor], Tensor],
) -> None:
    """Compares the log-probs of a fixed sequence; nothing where the engine cannot score one.

    Every rank calls it, and all of them stop where one engine is wrong.

    Args:
        engine: Just given weights.
        trainer: Its precision and its wrapped model are used.
        pl_module: Holds the policy.
        all_gather: A tensor of this rank to those of all, stacked.

    Raises:
        WeightMismatchError: If the mean difference is above ``engine.logprob_tolerance``.
    """
    ids = _probe_ids(pl_module.model.get_input_embeddings().num_embeddings, engine.max_length)
    found = engine.sequence_logprobs(ids)
    if found is None:
        return
    expected = _policy_logprobs(trainer, pl_module, ids)
    theirs = torch.tensor(found, dtype=torch.float64)
    difference = (theirs - expected).abs().mean().nan_to_num(nan=torch.inf)
    means = all_gather(torch.stack([difference, theirs.mean(), expected.mean()]))
    rank = int(means[:, 0].argmax())
    worst, engine_mean, policy_mean = means[rank].tolist()
    if worst > engine.logprob_tolerance:
        raise WeightMismatchError(
            f"After the weights of step {trainer.global_step} were loaded, {type(engine).__name__} of rank {rank} gives"
            f" a fixed sequence of {len(ids)} tokens a mean log-prob of {engine_mean:.5f} and the trainer"
            f" {policy_mean:.5f}; they differ by {worst:.2g} per token, over `logprob_tolerance` ="
            f" {engine.logprob_tolerance:g}. The engine holds other weights (a synchronisation that failed, another"
            " model) or computes in a lower precision: set its `dtype` to the policy's, or raise `logprob_tolerance` if"
            " the difference is one of precision."
        )


def _probe_ids(vocab_size: int, max_length: int | None) -> list[int]:
    length = min(_LENGTH, (max_length or _LENGTH + 1) - 1)
    return [(_STRIDE * (i + 1)) % vocab_size for i in range(length)]


@torch.no_grad()
def _policy_logprobs(trainer: pl.Trainer, pl_module: Any, ids: list[int]) -> Tensor:
    """float64, of every token but the first."""
    row = torch.tensor([ids], device=pl_module.device)
    mask = torch.ones_like(row, dtype=torch.bool)
    batch = RolloutBatch(
        prompt_ids=row[:, :1],
        prompt_mask=mask[:, :1],
        completion_ids=row[:, 1:],
        completion_mask=mask[:, 1:],
        loss_mask=mask[:, 1:],
        advantages=torch.zeros(1, device=row.device),
        rewards=torch.zeros(1, dtype=torch.float64, device=row.device),
        rollout_logprobs=torch.zeros(1, len(ids) - 1, device=row.device),
    )
    with trainer.precision_plugin.forward_context():
        if isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            assert trainer.strategy.model is not None, "the strategy has set up"
            statistics = trainer.strategy.model(batch)  # a sharded model is whole inside its wrapper alone
        else:
            statistics = completion_statistics(pl_module.model, batch)
    return statistics.logprobs[0].double().cpu()
