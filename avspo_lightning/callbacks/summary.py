"""What a run came to: a table at its end, and its curves as a picture."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.imports import RequirementCache

from avspo_lightning.callbacks.observer import RolloutObserver
from avspo_lightning.types import Rollout

_MATPLOTLIB = RequirementCache("matplotlib")


@dataclass(frozen=True, kw_only=True)
class IterationRecord:
    """The numbers of one iteration that the summary is made of."""

    iteration: int
    reward: float
    acr: float
    acr_effective: float
    tau: float
    triggered: bool


class RunSummary(RolloutObserver):
    """Prints a table when training ends, and draws ACR, tau, reward and accuracy over the iterations.

    Accuracy before training is that of Lightning's sanity check, so ``num_sanity_val_steps: -1`` makes it the whole
    validation set; it is written to the loggers at step 0.

    Args:
        metric: Validation metric that says how good the policy is.
        picture: File name of the curves, in the log folder; needs the extra ``plots``. Empty: none.
    """

    def __init__(self, metric: str = "val/arithmetic/accuracy", picture: str = "curves.png") -> None:
        super().__init__()
        self.metric = metric
        self.picture = picture
        self._records: list[IterationRecord] = []
        self._accuracy: list[tuple[int, float]] = []
        self._seconds = 0.0
        self._started = time.perf_counter()

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock."""
        self._started = time.perf_counter()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock of a run without a sanity check."""
        if not self._accuracy:
            self._started = time.perf_counter()

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keeps and logs what the policy could before training."""
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        if self.metric in values:
            self._accuracy.append((0, values[self.metric]))
        for logger in trainer.loggers:
            logger.log_metrics(values, step=0)

    def on_rollout(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """Keeps the numbers of the iteration."""
        collapse = rollout.collapse
        assert collapse is not None, "training rollouts have a summary"
        self._records.append(
            IterationRecord(
                iteration=rollout.iteration,
                reward=rollout.metrics["reward/mean"],
                acr=collapse.acr,
                acr_effective=collapse.acr_effective,
                tau=collapse.tau,
                triggered=collapse.triggered,
            )
        )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keeps the accuracy of a validation during training."""
        value = trainer.callback_metrics.get(self.metric)
        if not trainer.sanity_checking and value is not None:
            self._accuracy.append((trainer.current_epoch + 1, float(value)))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the table and draws the picture, once the last checkpoint is written."""
        self._seconds += time.perf_counter() - self._started
        if not trainer.is_global_zero or not self._records:
            return
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        drawn = self._draw(folder / self.picture) if self.picture else None
        checkpoint = getattr(trainer.checkpoint_callback, "last_model_path", "") or getattr(
            trainer.checkpoint_callback, "best_model_path", ""
        )
        rows = [*self._rows(), ("TensorBoard", f"tensorboard --logdir {folder}"), ("checkpoint", checkpoint or "none")]
        if drawn is not None:
            rows.append(("curves", str(drawn)))
        width = max(len(name) for name, _ in rows)
        print("\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows), flush=True)

    def state_dict(self) -> dict[str, Any]:
        """Records so far."""
        return {
            "records": [asdict(record) for record in self._records],
            "accuracy": [list(point) for point in self._accuracy],
            "seconds": self._seconds + time.perf_counter() - self._started,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self._records = [IterationRecord(**record) for record in state_dict["records"]]
        self._accuracy = [(int(iteration), value) for iteration, value in state_dict["accuracy"]]
        self._seconds = state_dict["seconds"]
        self._started = time.perf_counter()

    def _rows(self) -> list[tuple[str, str]]:
        records = self._records
        accuracy = [f"{value:.3f}" for _, value in self._accuracy]
        return [
            (f"{self.metric} before", accuracy[0] if accuracy else "not measured"),
            (f"{self.metric} after", accuracy[-1] if len(accuracy) > 1 else "not measured"),
            ("iterations", str(len(records))),
            ("mean ACR, raw", f"{_mean(r.acr for r in records):.3f}"),
            ("mean ACR, effective", f"{_mean(r.acr_effective for r in records):.3f}"),
            ("steps with augmentation", f"{_mean(r.triggered for r in records):.1%}"),
            ("tau at the end", f"{records[-1].tau:.3f}"),
            ("wall time", f"{self._seconds:.0f} s"),
        ]

    def _draw(self, path: Path) -> Path | None:
        if not _MATPLOTLIB:
            rank_zero_warn(
                f"No picture of the curves: {_MATPLOTLIB}. `pip install 'avspo-lightning[plots]'` brings it."
            )
            return None
        from avspo_lightning.callbacks.curves import draw_curves

        path.parent.mkdir(parents=True, exist_ok=True)
        return draw_curves(self._records, self._accuracy, metric=self.metric, path=path)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
