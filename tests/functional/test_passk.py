from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from avspo_lightning.functional import avg_at_k, majority_at_k, pass_at_k
from tests.functional.reference import assert_close


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer() -> None:
    for n in range(1, 8):
        for k in range(1, n + 1):
            expected = []
            for c in range(n + 1):
                answers = [True] * c + [False] * (n - c)
                draws = list(itertools.combinations(answers, k))
                expected.append(sum(any(draw) for draw in draws) / len(draws))
            assert_close(pass_at_k(n, torch.arange(n + 1), k), expected)


def test_pass_at_k_of_many_samples_and_of_unequal_numbers() -> None:
    counts = torch.arange(0, 257, 16)
    expected = [1 - math.comb(256 - c, 100) / math.comb(256, 100) for c in counts.tolist()]
    assert_close(pass_at_k(256, counts, 100), expected)
    assert_close(pass_at_k(torch.tensor([2, 8]), torch.tensor([1, 1]), 2), [1.0, 0.25])


def test_pass_at_one_is_the_mean() -> None:
    correct = torch.rand(9, 5, generator=torch.Generator().manual_seed(0)) < 0.4
    assert_close(pass_at_k(5, correct.sum(-1), 1), avg_at_k(correct))
    assert_close(avg_at_k(correct), [sum(row) / 5 for row in correct.tolist()])


def test_majority_vote_matches_a_count() -> None:
    generator = torch.Generator().manual_seed(0)
    answers = torch.randint(-1, 3, (60, 6), generator=generator)
    truth = torch.randint(0, 3, (60, 1), generator=generator)
    expected = []
    for row, right in zip(answers.tolist(), truth[:, 0].tolist(), strict=True):
        votes = Counter(answer for answer in row if answer >= 0)
        elected = [answer for answer, count in votes.items() if count == max(votes.values())]
        expected.append(sum(answer == right for answer in elected) / max(1, len(elected)))
    assert_close(majority_at_k(answers, answers == truth), expected)
    assert majority_at_k(torch.tensor([[-1, -1]]), torch.tensor([[False, False]])).item() == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_at_k(4, torch.tensor([1]), 5), "`k`"),
        (lambda: pass_at_k(4, torch.tensor([1]), 0), "`k`"),
        (lambda: pass_at_k(4, torch.tensor([5]), 2), "`num_correct`"),
        (lambda: avg_at_k(torch.zeros(2, 0, dtype=torch.bool)), "at least one answer"),
        (lambda: majority_at_k(torch.zeros(2, 3).long(), torch.zeros(2, 2).bool()), "shape of `answers`"),
    ],
)
@pytest.mark.usefixtures("annotations_off")
def test_wrong_counts_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
