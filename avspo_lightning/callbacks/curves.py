"""The curves of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from avspo_lightning.callbacks.summary import IterationRecord

_BLUE, _ORANGE, _GREEN, _BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"  # Okabe and Ito: safe for the colour-blind


def draw_curves(
    records: Sequence[IterationRecord], accuracy: Sequence[tuple[int, float]], *, metric: str, path: Path
) -> Path:
    """Writes two panels, collapse and success over iterations, without touching pyplot's state.

    Args:
        records: One per iteration.
        accuracy: (iterations done, value) of each validation.
        metric: Name of that value.
        path: PNG to write.
    """
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    collapse, success = figure.subplots(2, 1, sharex=True)
    iterations = np.array([record.iteration for record in records])
    _smooth(collapse, iterations, [r.acr for r in records], label="ACR, raw", color=_BLUE)
    _smooth(collapse, iterations, [r.acr_effective for r in records], label="ACR, effective", color=_ORANGE)
    collapse.plot(iterations, [r.tau for r in records], color=_BLACK, linestyle="--", label="tau")
    collapse.set_ylabel("share of groups")
    _smooth(success, iterations, [r.reward for r in records], label="reward, training", color=_GREEN)
    if accuracy:
        success.plot(*zip(*accuracy, strict=True), color=_BLACK, marker="o", label=metric)
    success.set_ylabel("share of answers")
    success.set_xlabel("iteration")
    for axes in (collapse, success):
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    figure.savefig(path, dpi=120)
    return path


def _smooth(axes: Axes, x: np.ndarray, y: Sequence[float], *, label: str, color: str) -> None:
    """The values, faint, under their running mean."""
    width = max(1, len(y) // 20)
    padded = np.pad(np.asarray(y, dtype=float), (width // 2, width - 1 - width // 2), mode="edge")
    axes.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(x, np.convolve(padded, np.ones(width) / width, mode="valid"), color=color, label=label)
