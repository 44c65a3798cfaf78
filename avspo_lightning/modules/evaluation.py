"""Scores of held-out answers."""

from __future__ import annotations

import torch
from torch import Tensor

from avspo_lightning.functional import pass_at_k
from avspo_lightning.metrics import WeightedMeans
from avspo_lightning.types import Rollout


class Evaluation:
    """Means over the answers to each evaluation set, exact over batches and ranks."""

    def __init__(self) -> None:
        self._sets: dict[str, WeightedMeans] = {}

    def update(self, rollout: Rollout) -> None:
        """Adds the answers to some prompts; a rank without a prompt of the set adds nothing, but must call too."""
        metrics = evaluation_metrics(rollout)
        self._sets.setdefault(rollout.name, WeightedMeans(list(metrics))).update(metrics)

    def compute(self, stage: str, device: torch.device) -> dict[str, Tensor]:
        """``stage/set/metric`` of everything added since the last call, reduced over ranks on ``device``."""
        found = {
            f"{stage}/{name}/{metric}": value.float()
            for name, means in self._sets.items()
            for metric, value in means.to(device).compute().items()
        }
        self._sets = {}
        return found


def evaluation_metrics(rollout: Rollout) -> dict[str, tuple[Tensor, int]]:
    """Means over a rollout of held-out prompts, each with the number of items it is a mean of.

    ``accuracy`` is the mean over samples (avg@n for n samples a prompt), ``pass@n`` the share of prompts with a right
    answer among n. Answers that nothing could judge are left out.
    """
    rewards = rollout.rewards.cpu()
    judged = ~rewards.isnan()
    completions = [completion for group in rollout.completions for completion in group]
    metrics = {
        "accuracy": _mean(rewards[judged]),
        "length": _mean(torch.tensor([len(c.token_ids) for c in completions])),
        "truncated": _mean(torch.tensor([c.truncated for c in completions])),
    }
    num_samples = rewards.shape[1]
    if num_samples > 1:
        complete = rewards[judged.all(-1)]
        solved = pass_at_k(num_samples, (complete > 0.5).sum(-1), num_samples)
        metrics[f"pass@{num_samples}"] = _mean(torch.as_tensor(solved))
    return metrics


def _mean(values: Tensor) -> tuple[Tensor, int]:
    return (values.double().mean() if len(values) else torch.tensor(0.0, dtype=torch.float64)), len(values)
