"""The buffer: every row once a pass, counts of the whole step, and a position that survives."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor

from avspo_lightning.rollouts import RolloutBuffer, to_batch
from avspo_lightning.types import Prompt, RolloutBatch, SamplingParams
from tests.tiny import completion

LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8]


def rows() -> RolloutBatch:
    """Eight rows of lengths 1 to 8, the last of them without a loss token; the length tells the row."""
    groups = [[completion([length] * length) for length in LENGTHS]]
    rewards = torch.zeros(1, 8)
    rewards[0, 7] = float("nan")
    return to_batch(
        [Prompt(id="p", text="", answer="", token_ids=(3,))],
        groups,
        rewards=rewards,
        advantages=torch.zeros(1, 8),
        sampling=SamplingParams(max_tokens=8),
    )


def same(local: Tensor) -> Tensor:
    return local


@pytest.mark.parametrize(("size", "passes", "length"), [(None, 1, 1), (8, 1, 1), (3, 1, 3), (3, 2, 6), (99, 2, 2)])
def test_a_pass_visits_every_row_once(size: int | None, passes: int, length: int) -> None:
    buffer = RolloutBuffer(num_rows=8, minibatch_size=size, num_passes=passes)
    assert len(buffer) == length
    buffer.fill(rows(), iteration=0, all_reduce=same)
    seen = [batch.completion_ids[:, 0].tolist() for batch in buffer]
    assert len(seen) == length
    per_pass = length // passes
    for i in range(passes):
        assert sorted(chain(*seen[i * per_pass : (i + 1) * per_pass])) == LENGTHS


def test_batches_carry_the_counts_of_their_step_over_all_ranks() -> None:
    buffer = RolloutBuffer(num_rows=8, minibatch_size=2)
    buffer.fill(rows(), iteration=0, accumulate=3, all_reduce=lambda local: local * 2)
    batches = list(buffer)
    first, last = batches[:3], batches[3:]
    for step in (first, last):
        tokens = sum(int(batch.loss_mask.sum()) for batch in step)
        sequences = sum(int(batch.loss_mask.any(-1).sum()) for batch in step)
        assert {batch.num_tokens for batch in step} == {2 * tokens}
        assert {batch.num_sequences for batch in step} == {2 * sequences}
    assert sum(batch.num_sequences for batch in (first[0], last[0])) == 14
    assert buffer.num_steps(3) == 2


def test_order_depends_on_seed_iteration_and_pass() -> None:
    def order(seed: int, iteration: int) -> list[int]:
        buffer = RolloutBuffer(num_rows=8, minibatch_size=1, num_passes=2, seed=seed)
        buffer.fill(rows(), iteration=iteration, all_reduce=same)
        return [int(batch.completion_ids[0, 0]) for batch in buffer]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0)[:8] != order(0, 0)[8:]


def test_a_restored_buffer_goes_on_where_it_was() -> None:
    buffer = RolloutBuffer(num_rows=8, minibatch_size=2, num_passes=2)
    buffer.fill(rows(), iteration=3, accumulate=2, all_reduce=same)
    iterator = iter(buffer)
    for _ in range(5):
        next(iterator)
    restored = RolloutBuffer(num_rows=8, minibatch_size=2, num_passes=2)
    restored.restore(buffer.snapshot())
    rest, expected = list(restored), list(iterator)
    assert len(rest) == 3
    for a, b in zip(rest, expected, strict=True):
        assert torch.equal(a.completion_ids, b.completion_ids)
        assert (a.num_tokens, a.num_sequences) == (b.num_tokens, b.num_sequences)
    assert buffer.snapshot() == {}, "nothing is left to learn from, so nothing is saved"
