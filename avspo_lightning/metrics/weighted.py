"""Many weighted means in one state, so that a training step costs one reduction over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from avspo_lightning.metrics.exact import ExactMetric

Scalar = float | int | Tensor


class WeightedMeans(ExactMetric):
    """Means weighted by tokens or rows, and maxima, exact over batches of any size and over ranks.

    mean = sum_b w_b x_b / sum_b w_b. All sums lie in one float64 tensor, reduced and saved in checkpoints as one.

    Args:
        names: Quantities to average.
        maxima: Quantities whose largest value is kept.
        kwargs: Of :class:`torchmetrics.Metric`.

    Raises:
        ValueError: If there is no name or one occurs twice.

    Example:
        >>> means = WeightedMeans(["entropy"])
        >>> means.update({"entropy": (1.0, 10)})
        >>> means.update({"entropy": (2.0, 90)})
        >>> means.compute()
        {'entropy': tensor(1.9000, dtype=torch.float64)}
    """

    is_differentiable = False
    full_state_update = False
    sums: Tensor
    largest: Tensor

    def __init__(
        self,
        names: Sequence[str],
        maxima: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not names or len({*names, *maxima}) != len(names) + len(maxima):
            raise ValueError(
                f"`names` must hold at least one name, and none twice here or in `maxima`, got {[*names, *maxima]}."
            )
        self.names = tuple(names)
        self.maxima = tuple(maxima)
        self.add_state("sums", torch.zeros(len(names), 2, dtype=torch.float64), dist_reduce_fx="sum", persistent=True)
        if maxima:
            lowest = torch.full((len(maxima),), -torch.inf, dtype=torch.float64)
            self.add_state("largest", lowest, dist_reduce_fx="max", persistent=True)

    def update(self, values: Mapping[str, tuple[Scalar, Scalar]]) -> None:
        """Adds one batch.

        Args:
            values: Name -> (value, weight): a mean over the batch and the number of tokens or rows behind it. Names may
                be left out. A weight of 0 says that nothing was measured: the value, even NaN, is passed over.

        Raises:
            ValueError: If a name is unknown.
        """
        unknown = set(values) - {*self.names, *self.maxima}
        if unknown:
            raise ValueError(
                f"`values` holds unknown names {sorted(unknown)}; known are {[*self.names, *self.maxima]}."
            )
        value, weight = self._columns(values, self.names)
        measured = torch.where(weight > 0, value * weight, 0.0)
        self.sums = self.sums + torch.stack([measured, weight], dim=-1)
        if self.maxima:
            value, weight = self._columns(values, self.maxima)
            self.largest = torch.maximum(self.largest, torch.where(weight > 0, value, -torch.inf))

    def compute(self) -> dict[str, Tensor]:
        """Every quantity by name, float64; 0 where nothing was measured."""
        total, weight = self.sums.unbind(-1)
        means = torch.where(weight > 0, total / weight, 0.0)
        result = dict(zip(self.names, means, strict=True))
        if self.maxima:
            largest = torch.where(self.largest.isneginf(), 0.0, self.largest)
            result |= zip(self.maxima, largest, strict=True)
        return result

    def _columns(self, values: Mapping[str, tuple[Scalar, Scalar]], names: Sequence[str]) -> tuple[Tensor, ...]:
        pairs = [values.get(name, (0.0, 0.0)) for name in names]
        numbers = [
            torch.as_tensor(number, dtype=torch.float64, device=self.device) for pair in pairs for number in pair
        ]
        return torch.stack(numbers).detach().reshape(-1, 2).unbind(-1)
