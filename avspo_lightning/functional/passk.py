"""Accuracy over several answers per problem: avg@k, pass@k and majority vote."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor


def avg_at_k(correct: Bool[Tensor, "N k"]) -> Float64[Tensor, " N"]:
    """Mean correctness of each problem over its k answers.

    Args:
        correct: [N, k]; an unanswered sample is wrong.

    Returns:
        float64 [N] in [0, 1].

    Raises:
        ValueError: If there is no sample.

    Example:
        >>> avg_at_k(torch.tensor([[True, False], [True, True]]))
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    if correct.shape[-1] < 1:
        raise ValueError("`correct` must hold at least one answer per problem, got none.")
    return correct.double().mean(-1)


def pass_at_k(num_samples: int | Int[Tensor, " N"], num_correct: Int[Tensor, " N"], k: int) -> Float64[Tensor, " N"]:
    """Unbiased chance that at least one of k answers is right, from n >= k answers of which c are.

    1 - C(n-c, k) / C(n, k) = 1 - prod_{i<k} (n-c-i) / (n-i) (Chen et al. 2021, arXiv 2107.03374).

    Args:
        num_samples: n, one number or [N].
        num_correct: c, [N].
        k: Answers allowed, 1 <= k <= n.

    Returns:
        float64 [N] in [0, 1].

    Raises:
        ValueError: If ``k`` or ``num_correct`` is out of its range.

    Example:
        >>> pass_at_k(4, torch.tensor([0, 1, 2, 3]), 2)
        tensor([0.0000, 0.5000, 0.8333, 1.0000], dtype=torch.float64)
    """
    total = torch.as_tensor(num_samples, device=num_correct.device).expand_as(num_correct)
    if k < 1 or (total < k).any():
        raise ValueError(f"`k` must be in [1, num_samples], got {k} with `num_samples` = {num_samples}.")
    if (num_correct < 0).any() or (num_correct > total).any():
        raise ValueError("`num_correct` must be in [0, num_samples] for every problem.")
    drawn = torch.arange(k, device=num_correct.device)
    all_wrong = ((total - num_correct)[:, None] - drawn).double() / (total[:, None] - drawn)
    return 1 - all_wrong.prod(-1)


def majority_at_k(answers: Int[Tensor, "N k"], correct: Bool[Tensor, "N k"]) -> Float64[Tensor, " N"]:
    """Whether the answer given most often is right, for each problem.

    Among answers given equally often one is drawn at random: the value is the chance that it is right.

    Args:
        answers: [N, k], equal numbers for equal answers of a problem; negative where none was given.
        correct: [N, k].

    Returns:
        float64 [N] in [0, 1]; 0 where no answer was given.

    Raises:
        ValueError: If the shapes differ.

    Example:
        >>> answers = torch.tensor([[7, 7, 5], [1, 2, -1]])
        >>> majority_at_k(answers, torch.tensor([[False, False, True], [True, False, False]]))
        tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    if answers.shape != correct.shape:
        raise ValueError(
            f"`correct` must have the shape of `answers`, {tuple(answers.shape)}, got {tuple(correct.shape)}."
        )
    votes = (answers[:, :, None] == answers[:, None, :]).sum(-1) * (answers >= 0)
    elected = (votes == votes.amax(-1, keepdim=True)) & (answers >= 0)
    # Tied answers have equally many votes, so the mean over their samples is the mean over the answers.
    return (correct & elected).sum(-1).double() / elected.sum(-1).clamp(min=1)
