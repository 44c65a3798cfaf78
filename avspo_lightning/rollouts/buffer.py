"""The rollouts of one iteration, served to the Trainer as micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from avspo_lightning.seeds import derive_seed
from avspo_lightning.types import RolloutBatch


class RolloutBuffer:
    """An iterable with a fixed length for the Trainer; filled once an iteration, it never generates by itself.

    A pass visits every row once. The batches of all passes follow each other, and each run of ``accumulate`` of them
    is one optimizer step. Every batch carries the counts of its whole step, over all ranks: the losses of the
    micro-batches then simply add up to the loss of the step, however it is split.

    Args:
        num_rows: Rows per iteration on this rank; may be set later, once the number of ranks is known.
        minibatch_size: Rows per forward on this rank; None: all of them.
        num_passes: Sweeps over the rows per iteration (PPO's epochs, mu in the GRPO paper).
        seed: Orders the rows where a pass has more than one batch.
    """

    def __init__(self, *, num_rows: int, minibatch_size: int | None = None, num_passes: int = 1, seed: int = 0) -> None:
        self.num_rows = num_rows
        self.minibatch_size = minibatch_size
        self.num_passes = num_passes
        self.seed = seed
        self._batch: RolloutBatch | None = None
        self._order: list[Tensor] = []
        self._counts: list[list[int]] = []
        self._position = 0

    def __len__(self) -> int:
        return math.ceil(self.num_rows / (self.minibatch_size or self.num_rows)) * self.num_passes

    def num_steps(self, accumulate: int) -> int:
        """Optimizer steps per iteration."""
        return math.ceil(len(self) / accumulate)

    def fill(
        self, batch: RolloutBatch, *, iteration: int, accumulate: int = 1, all_reduce: Callable[[Tensor], Tensor]
    ) -> None:
        """Takes the rows of an iteration.

        Args:
            batch: The rows of this rank.
            iteration: Enters the order of the rows.
            accumulate: Batches per optimizer step.
            all_reduce: Sums an int64 tensor over all ranks.
        """
        self._batch = batch
        self._order = self._row_order(iteration, len(batch))
        has_loss, tokens = batch.loss_mask.any(-1), batch.loss_mask.sum(-1)
        counts = torch.zeros(self.num_steps(accumulate), 2, dtype=torch.int64, device=tokens.device)
        for i, rows in enumerate(self._order):
            counts[i // accumulate] += torch.stack([has_loss[rows].sum(), tokens[rows].sum()])
        step_counts = all_reduce(counts).tolist()
        self._counts = [step_counts[i // accumulate] for i in range(len(self._order))]
        self._position = 0

    def __iter__(self) -> Iterator[RolloutBatch]:
        """Continues where it stands, so that a run restored in the middle of an iteration repeats nothing."""
        assert self._batch is not None, "the buffer is empty: RolloutCallback fills it when a training epoch starts"
        while self._position < len(self._order):
            index = self._position
            self._position += 1
            num_sequences, num_tokens = self._counts[index]
            rows = self._batch.rows(self._order[index])
            yield replace(rows, num_sequences=num_sequences, num_tokens=num_tokens)

    def snapshot(self) -> dict[str, Any]:
        """What a checkpoint needs to go on from here; no rows once all have been served."""
        if self._batch is None or self._position >= len(self._order):
            return {}
        return {
            "batch": self._batch.state_dict(),
            "order": self._order,
            "counts": self._counts,
            "position": self._position,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Takes up what ``snapshot`` returned."""
        if not snapshot:
            return
        self._batch = RolloutBatch(**snapshot["batch"])
        self._order, self._counts = snapshot["order"], snapshot["counts"]
        self._position = snapshot["position"]

    def state_dict(self) -> dict[str, int]:
        """Tells Lightning that the loader resumes by itself; the rows are in the state of RolloutCallback."""
        return {"position": self._position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Nothing to do: RolloutCallback has restored the buffer of this very rank."""

    def _row_order(self, iteration: int, num_rows: int) -> list[Tensor]:
        order: list[Tensor] = []
        for sweep in range(self.num_passes):
            rows = torch.arange(num_rows)
            size = self.minibatch_size or num_rows
            if size < num_rows:
                generator = torch.Generator().manual_seed(derive_seed(self.seed, iteration, "pass", sweep))
                rows = torch.randperm(num_rows, generator=generator)
            order += list(rows.split(size))
        return order
