"""pass@k over a whole evaluation set."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from avspo_lightning.functional import pass_at_k
from avspo_lightning.metrics.exact import ExactMetric


class PassAtK(ExactMetric):
    """Mean over problems of the unbiased pass@k (Chen et al. 2021, arXiv 2107.03374); k = 1 is avg@n.

    Args:
        k: Answers allowed; each problem must have at least as many.
        kwargs: Of :class:`torchmetrics.Metric`.

    Raises:
        ValueError: If ``k`` is not positive.

    Example:
        >>> metric = PassAtK(2)
        >>> metric.update(torch.tensor([[True, False, False], [False, False, False]]))
        >>> metric.compute()
        tensor(0.3333, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if k < 1:
            raise ValueError(f"`k` must be at least 1, got {k}.")
        self.k = k
        # Named by k: a MetricCollection would merge pass@1 and pass@8 for good if the first batch gave both one value.
        self._sums = f"sum_and_count_at_{k}"
        self.add_state(self._sums, torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum", persistent=True)

    def update(self, correct: Bool[Tensor, "N n"]) -> None:
        """Adds N problems with n >= k answers each.

        Args:
            correct: [N, n], whether each answer is right; unanswered is wrong.

        Raises:
            ValueError: If ``correct`` is not boolean, or n < k.
        """
        if correct.dtype != torch.bool or correct.ndim != 2:
            raise ValueError(f"`correct` must be bool [N, n], got {correct.dtype} {tuple(correct.shape)}.")
        values = pass_at_k(correct.shape[1], correct.sum(-1), self.k)
        added = torch.stack([values.sum(), values.new_tensor(len(values))])
        setattr(self, self._sums, getattr(self, self._sums) + added.to(self.device))

    def compute(self) -> Float64[Tensor, ""]:
        """Mean pass@k over the problems, float64; 0 without one."""
        total, count = getattr(self, self._sums)
        return total / count.clamp(min=1)
