"""Checkpoints by iteration."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint


class IterationCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint, which also keeps the end of a run where it does not fall on a moment to save."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves ``last`` unless it is that of this very step."""
        if self.save_last and self._last_global_step_saved != trainer.global_step:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
