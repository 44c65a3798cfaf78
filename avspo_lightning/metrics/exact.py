"""Metrics that keep their precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torchmetrics import Metric


class ExactMetric(Metric):
    """A metric whose states and buffers follow a parent module to other devices, but never to other dtypes."""

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        # `module.to(torch.bfloat16)`, which "bf16-true" training calls, would leave a float64 sum three digits.
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), exclude_state)
