"""Run by test_ddp.py, in one process or two: ``python two_ranks.py WORLD_SIZE POLICY FOLDER``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from avspo_lightning import AVSPOModule, RolloutObserver
from avspo_lightning.types import Rollout, RolloutBatch
from tests.modules.test_avspo import AGGREGATIONS, Recorder, batch
from tests.running import GradientRecorder, fit, trainer, weights
from tests.tiny import tiny_prompts


class Witness(RolloutObserver):
    """Keeps what this rank drew."""

    def __init__(self) -> None:
        self.drawn: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def on_rollout(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        groups = zip(rollout.prompts, rollout.completions, strict=True)
        self.drawn += [(prompt.id, tuple(c.token_ids for c in group)) for prompt, group in groups]


def run_fit(world_size: int, policy: str, folder: Path) -> dict[str, Any]:
    """Three iterations with two steps each; two of the prompts are the same text."""
    prompts = tiny_prompts(8)
    prompts[1] = replace(prompts[0], id="twin")
    gradients, log, witness = GradientRecorder(), Recorder(), Witness()
    module, _ = fit(
        folder,
        policy,
        rollout={"prompts": prompts, "prompts_per_step": 8, "num_passes": 2},
        callbacks=[gradients, log, witness],
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
    )
    return {"weights": weights(module), "gradients": gradients.steps, "log": log.rows, "drawn": witness.drawn}


class Share:
    """Hand-made rows of this rank, with the counts of all."""

    def __init__(self, rows: RolloutBatch, num_sequences: int, num_tokens: int) -> None:
        self.rows = replace(rows, num_sequences=num_sequences, num_tokens=num_tokens)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter([self.rows])


def run_loss(world_size: int, policy: str, folder: Path, *, masked: bool) -> dict[str, Any]:
    """Three short rows on rank 0 and a long one on rank 1, which has no loss token where ``masked``."""
    whole = batch([2, 1, 3, 9], [1.0, -0.5, 0.3, -1.2], truncated=[False, False, False, masked], mask_truncated=True)
    found = {}
    for aggregation in AGGREGATIONS:
        pl.seed_everything(0, verbose=False)
        gradients = GradientRecorder()
        run = trainer(
            folder,
            gradients,
            devices=world_size,
            strategy="ddp" if world_size > 1 else "auto",
            max_epochs=1,
            logger=False,
            gradient_clip_val=None,
        )
        index = [[0, 1, 2, 3]] if world_size == 1 else [[0, 1, 2], [3]]
        rows = Share(whole.rows(index[run.global_rank]), int(whole.loss_mask.any(-1).sum()), int(whole.loss_mask.sum()))
        run.fit(AVSPOModule(policy, aggregation=aggregation), train_dataloaders=rows)
        found[aggregation] = gradients.steps[0]
    return found


def main() -> None:
    world_size, policy, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    result = {
        "fit": run_fit(world_size, policy, folder),
        "unequal": run_loss(world_size, policy, folder, masked=False),
        "masked": run_loss(world_size, policy, folder, masked=True),
    }
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.save(result, folder / f"{world_size}.{rank}.pt")


if __name__ == "__main__":
    main()
