"""One more moment beside Lightning's: rollouts were collected."""

from __future__ import annotations

import lightning.pytorch as pl

from avspo_lightning.types import Rollout


class RolloutObserver(pl.Callback):
    """A callback that is shown the rollouts of each training iteration, on every rank."""

    def on_rollout(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """Called when a training epoch starts, after the rollouts were collected and before the first update."""


def notify(trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
    """Shows the rollout to every observer among the Trainer's callbacks."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RolloutObserver):
            callback.on_rollout(trainer, pl_module, rollout)
