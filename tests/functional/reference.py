"""Golden vectors, and plain loops over numbers that share no line with the package."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text(encoding="utf-8"))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def assert_close(actual: Any, expected: Any, dtype: torch.dtype = torch.float64, message: str = "") -> None:
    actual = torch.as_tensor(actual, dtype=torch.float64).detach()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach()
    assert actual.shape == expected.shape, f"{message}: {actual.shape} != {expected.shape}"
    error = (actual - expected).abs().max().item() if actual.numel() else 0.0
    assert error <= TOLERANCE[dtype], f"{message}: off by {error}"


def mean_std(values: Sequence[float], ddof: int) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def loop_group_advantages(rewards: Sequence[Sequence[float]], ddof: int, eps: float) -> list[list[float]]:
    result = []
    for group in rewards:
        valid = [reward for reward in group if not math.isnan(reward)]
        if len(valid) < 2:
            result.append([0.0] * len(group))
            continue
        mean, std = mean_std(valid, ddof)
        result.append([0.0 if math.isnan(reward) else (reward - mean) / (std + eps) for reward in group])
    return result


def loop_avspo(
    rewards: Sequence[Sequence[float]],
    *,
    threshold: float,
    alpha: float = 0.5,
    r_anchor: float = 0.1,
    augment: str = "both",
    eps: float = 1e-4,
    ddof_group: int = 1,
    ddof_augmented: int = 0,
) -> list[list[float]]:
    """Section by section: collapse, trigger, K, values, advantages (stratified)."""
    scored = [[reward for reward in group if not math.isnan(reward)] for group in rewards]
    collapsed = [len(group) >= 2 and mean_std(group, 0)[1] < 1e-6 for group in scored]
    acr = sum(collapsed) / max(1, sum(len(group) >= 2 for group in scored))
    result = loop_group_advantages(rewards, ddof_group, eps)
    if acr <= threshold:
        return result
    size = len(rewards[0])
    num_virtual = max(1, min(size, math.ceil(round(size * acr**alpha, 12))))
    for index, valid in enumerate(scored):
        if not collapsed[index] or augment == ("wrong" if max(valid) > 0 else "right"):
            continue
        count = min(num_virtual, len(valid))
        if max(valid) > 0:
            virtual = [max(valid) * (1 - k / (count + 1)) for k in range(1, count + 1)]
        else:
            virtual = [r_anchor * (count - k + 1) / count for k in range(1, count + 1)]
        mean, std = mean_std(valid + virtual, ddof_augmented)
        result[index] = [0.0 if math.isnan(r) else (r - mean) / (std + eps) for r in rewards[index]]
    return result


def loop_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    aggregation: str,
    ratio_level: str = "token",
    max_tokens: int = 1,
    num_tokens: int = 1,
    num_sequences: int | None = None,
) -> float:
    """The loss of section 2, token by token."""
    rows = []
    for row in range(mask.shape[0]):
        tokens = [t for t in range(mask.shape[1]) if mask[row, t]]
        logs = [float(logprobs[row, t]) - float(old_logprobs[row, t]) for t in tokens]
        if ratio_level == "sequence" and tokens:
            logs = [math.fsum(logs) / len(logs)] * len(logs)
        values = []
        for t, log_ratio in zip(tokens, logs, strict=True):
            advantage = float(advantages[row] if advantages.ndim == 1 else advantages[row, t])
            ratio = math.exp(log_ratio)
            clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
            values.append(-min(ratio * advantage, clipped * advantage))
        rows.append(values)
    trained = [values for values in rows if values]
    count = len(trained) if num_sequences is None else num_sequences
    total = math.fsum(math.fsum(values) for values in rows)
    means = math.fsum(math.fsum(values) / len(values) for values in trained)
    return {
        "seq_mean": means / max(count, 1),
        "sum_of_seq_means": means,
        "seq_sum": total / max(count, 1),
        "constant": total / (max(count, 1) * max_tokens),
        "token_mean_global": total / num_tokens,
        "token_mean_local": total / max(sum(len(values) for values in rows), 1),
    }[aggregation]
