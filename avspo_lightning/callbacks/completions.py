"""What the model writes, where a person can read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger

from avspo_lightning.callbacks.observer import RolloutObserver
from avspo_lightning.types import Rollout


class CompletionLogger(RolloutObserver):
    """Writes samples with their reward and advantage to ``completions.jsonl`` and to TensorBoard's text page.

    ``avspo predict`` writes every answer to ``predictions.jsonl``, one file per rank. All lie in the log folder.

    Args:
        every_n_iterations: Iterations between two entries.
        num_prompts: Prompts per entry, each with all its completions.
    """

    def __init__(self, every_n_iterations: int = 50, num_prompts: int = 2) -> None:
        super().__init__()
        if every_n_iterations < 1:
            raise ValueError(f"`every_n_iterations` must be at least 1, got {every_n_iterations}.")
        if num_prompts < 1:
            raise ValueError(f"`num_prompts` must be at least 1, got {num_prompts}.")
        self.every_n_iterations = every_n_iterations
        self.num_prompts = num_prompts

    def on_rollout(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        """Writes an entry where one is due."""
        if rollout.iteration % self.every_n_iterations or not trainer.is_global_zero:
            return
        rows = list(_rows(rollout, self.num_prompts))
        _append(Path(trainer.log_dir or trainer.default_root_dir) / "completions.jsonl", rows)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("train/completions", _table(rows), trainer.global_step)

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Rollout,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Writes the answers."""
        name = "predictions.jsonl" if trainer.world_size == 1 else f"predictions.{trainer.global_rank}.jsonl"
        _append(Path(trainer.log_dir or trainer.default_root_dir) / name, list(_rows(batch, len(batch.prompts))))


def _rows(rollout: Rollout, num_prompts: int) -> Iterator[dict[str, Any]]:
    advantages = None if rollout.advantages is None else rollout.advantages.tolist()
    for i, (prompt, group) in enumerate(zip(rollout.prompts[:num_prompts], rollout.completions, strict=False)):
        for j, completion in enumerate(group):
            reward = rollout.rewards[i, j].item()
            yield {
                "set": rollout.name,
                "iteration": rollout.iteration,
                "id": prompt.id,
                "prompt": prompt.text,
                "answer": prompt.answer,
                "completion": completion.text,
                "finish_reason": completion.finish_reason,
                "num_tokens": len(completion.token_ids),
                "reward": None if reward != reward else reward,
                "advantage": None if advantages is None else advantages[i][j],
            }


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _table(rows: list[dict[str, Any]]) -> str:
    """Markdown; a cell holds no newline and no bar."""

    def cell(value: object) -> str:
        return str(value).replace("|", "\\|").replace("\n", "⏎")

    columns = ("prompt", "answer", "completion", "reward", "advantage", "finish_reason")
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(cell(row[column]) for column in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
