"""Rows of tensors: masks from lengths, ids untouched."""

from __future__ import annotations

import torch

from avspo_lightning.rollouts import to_batch
from avspo_lightning.types import Prompt, SamplingParams
from tests.tiny import EOS, completion


def prompt(*ids: int) -> Prompt:
    return Prompt(id=str(ids), text="", answer="", token_ids=ids)


SAMPLING = SamplingParams(max_tokens=4, temperature=0.7)


def test_masks_come_from_lengths_even_where_pad_is_eos() -> None:
    groups = [[completion([5, 6, EOS]), completion([5, 6, 7, 8], truncated=True)]]
    batch = to_batch(
        [prompt(3, EOS, 4)], groups, rewards=torch.zeros(1, 2), advantages=torch.ones(1, 2), sampling=SAMPLING
    )
    assert batch.loss_mask.sum(-1).tolist() == [3, 4], "the stop token is trained on, padding is not"
    assert batch.prompt_mask.all(), "a pad-valued token inside the prompt is seen"
    assert batch.completion_ids.tolist() == [[5, 6, EOS, 0], [5, 6, 7, 8]]
    assert batch.temperature == 0.7
    assert batch.max_tokens == 4


def test_prompts_are_padded_left_and_ids_kept() -> None:
    groups = [[completion([9])] * 2, [completion([8, 7])] * 2]
    batch = to_batch(
        [prompt(3), prompt(4, 5, 6)], groups, rewards=torch.zeros(2, 2), advantages=torch.zeros(2, 2), sampling=SAMPLING
    )
    assert batch.prompt_ids.tolist() == [[0, 0, 3]] * 2 + [[4, 5, 6]] * 2
    assert batch.prompt_mask.tolist() == [[False, False, True]] * 2 + [[True] * 3] * 2
    assert batch.rollout_logprobs.tolist() == [[-1.0, 0.0]] * 2 + [[-1.0, -1.0]] * 2


def test_what_is_not_scored_or_was_cut_has_no_loss_tokens() -> None:
    groups = [[completion([5, EOS]), completion([6, 7], truncated=True)], [completion([8]), completion([9])]]
    rewards = torch.tensor([[1.0, 0.0], [float("nan"), 1.0]])
    batch = to_batch(
        [prompt(3), prompt(4)],
        groups,
        rewards=rewards,
        advantages=torch.zeros(2, 2),
        sampling=SAMPLING,
        mask_truncated=True,
    )
    assert batch.loss_mask.any(-1).tolist() == [True, False, False, True]
    assert batch.completion_mask.any(-1).all(), "they are still part of the forward pass"
    untrained = to_batch(
        [prompt(3), prompt(4)],
        groups,
        rewards=rewards,
        advantages=torch.zeros(2, 2),
        sampling=SAMPLING,
        trained=torch.tensor([True, False]),
    )
    assert untrained.loss_mask.any(-1).tolist() == [True, True, False, False]


def test_rows_are_cut_to_their_longest() -> None:
    groups = [[completion([9])] * 2, [completion([8, 7, 6])] * 2]
    batch = to_batch(
        [prompt(3), prompt(4, 5)], groups, rewards=torch.zeros(2, 2), advantages=torch.zeros(2, 2), sampling=SAMPLING
    )
    short = batch.rows([0, 1])
    assert short.prompt_ids.tolist() == [[3], [3]]
    assert short.completion_ids.tolist() == [[9], [9]]
    assert batch.rows([3]).completion_ids.tolist() == [[8, 7, 6]]
