"""Advantage collapse in the logs of any LightningModule."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torchmetrics import MetricCollection

from avspo_lightning.callbacks.observer import RolloutObserver
from avspo_lightning.metrics import AdvantageCollapseRate
from avspo_lightning.metrics.collapse import Outcome
from avspo_lightning.types import CollapseSummary, Rollout

_LAYOUT = {
    "Advantage collapse": {
        "ACR against tau": ["Multiline", ["train/collapse/acr$", "train/collapse/acr_effective", "train/collapse/tau"]],
        "Kinds of collapse": ["Multiline", ["train/collapse/acr_all_right", "train/collapse/acr_all_wrong"]],
        "Virtual samples": ["Multiline", ["train/collapse/num_virtual", "train/collapse/triggered"]],
    }
}


class CollapseMonitor(RolloutObserver):
    """Logs ``train/collapse/*``: the advantage collapse rate in all its kinds, and tau where there is one.

    With RolloutCallback it needs nothing more. Any other LightningModule hands it rewards [N, G], equally many on each
    rank, in the dict that ``training_step`` returns: ``return {"loss": loss, "rewards": rewards}``.

    Args:
        rewards_key: Name under which a foreign ``training_step`` returns its rewards.
        atol: A group is collapsed where the population std of its rewards is below this.
    """

    def __init__(self, rewards_key: str = "rewards", atol: float = 1e-6) -> None:
        super().__init__()
        self.rewards_key = rewards_key
        # given the rewards of all ranks, so they need no sync, and the counts in a checkpoint are those of all ranks
        kinds: dict[str, Outcome] = {"acr": "any", "acr_all_right": "right", "acr_all_wrong": "wrong"}
        self._rates = MetricCollection(
            {
                name: AdvantageCollapseRate(outcome=kind, atol=atol, sync_on_compute=False)
                for name, kind in kinds.items()
            },
            compute_groups=False,
        )
        self._rates.persistent(True)
        self._iteration: dict[str, float] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gives TensorBoard its page of curves."""
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.experiment.add_custom_scalars(_LAYOUT)

    def on_rollout(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """Takes the summary that the collector made over all ranks."""
        assert rollout.collapse is not None, "training rollouts have a summary"
        self._iteration = _scalars(rollout.collapse)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measures the rewards that a foreign module returned."""
        rewards = outputs.get(self.rewards_key) if isinstance(outputs, dict) else None
        if not isinstance(rewards, Tensor):
            return
        everybody = trainer.strategy.all_gather(rewards).reshape(-1, rewards.shape[-1]).cpu()
        rates = {**self._rates(everybody), "acr_cumulative": self._rates["acr"].compute()}
        pl_module.log_dict(
            {f"train/collapse/{name}": rate for name, rate in rates.items()}, on_step=True, on_epoch=False
        )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs the iteration."""
        pl_module.log_dict({f"train/collapse/{name}": value for name, value in self._iteration.items()})

    def state_dict(self) -> dict[str, Any]:
        """Counts, and the iteration under way."""
        return {"rates": self._rates.state_dict(), "iteration": self._iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self._rates.load_state_dict(state_dict["rates"])
        self._iteration = state_dict["iteration"]


def _scalars(collapse: CollapseSummary) -> dict[str, float]:
    return {
        "acr": collapse.acr,
        "acr_effective": collapse.acr_effective,
        "acr_all_right": collapse.acr_all_right,
        "acr_all_wrong": collapse.acr_all_wrong,
        "acr_cumulative": collapse.acr_cumulative,
        "tau": collapse.tau,
        "triggered": float(collapse.triggered),
        "num_virtual": float(collapse.num_virtual),
        "num_unscorable": float(collapse.num_unscorable),
        **{f"acr_level/{level}": rate for level, rate in collapse.acr_by_level.items()},
    }
