"""A progress bar that counts iterations and shows what matters in them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from avspo_lightning.callbacks.observer import RolloutObserver
from avspo_lightning.types import Rollout


class IterationProgressBar(TQDMProgressBar, RolloutObserver):
    """One bar for the run, a tick per iteration, with reward, ACR before and after augmentation, and tau."""

    def on_rollout(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """Shows the iteration that was just collected."""
        collapse = rollout.collapse
        assert collapse is not None, "training rollouts have a summary"
        self.train_progress_bar.set_postfix_str(
            f"reward {rollout.metrics['reward/mean']:.2f}, ACR {collapse.acr:.2f} -> {collapse.acr_effective:.2f},"
            f" tau {collapse.tau:.3f}",
            refresh=False,
        )

    def init_train_tqdm(self) -> Tqdm:
        """A bar over iterations instead of the batches of one."""
        bar = super().init_train_tqdm()
        bar.set_description_str("Iteration")
        return bar

    def on_train_start(self, *_: Any) -> None:
        """Sets the bar to the iterations of the run."""
        super().on_train_start(*_)
        self.train_progress_bar.reset(total=_finite(self.trainer.max_epochs))
        self.train_progress_bar.initial = self.trainer.current_epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Nothing: the bar is not one of batches."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Nothing: the bar is not one of batches."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ticks."""
        self.train_progress_bar.n = trainer.current_epoch + 1
        if self.train_progress_bar.n % self.refresh_rate == 0:
            self.train_progress_bar.refresh()


def _finite(max_epochs: int | None) -> int | None:
    return max_epochs if max_epochs and max_epochs > 0 else None
