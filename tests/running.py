"""Runs of the whole machine on the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from avspo_lightning import AVSPOModule, CollapseMonitor, RolloutCallback
from tests.tiny import parity_reward, tiny_prompts


def trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": CSVLogger(folder, name="", version="log"),
        "default_root_dir": folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "gradient_clip_val": 1.0,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def rollouts(**options: Any) -> RolloutCallback:
    defaults: dict[str, Any] = {
        "reward": parity_reward,
        "group_size": 4,
        "prompts_per_step": 4,
        "max_completion_tokens": 6,
        "prompts": tiny_prompts(),
    }
    return RolloutCallback(**{**defaults, **options})


def fit(
    folder: Path,
    policy: str,
    *,
    module: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    callbacks: list[pl.Callback] | None = None,
    ckpt_path: str | None = None,
    seed: int = 7,
    **options: Any,
) -> tuple[AVSPOModule, pl.Trainer]:
    pl.seed_everything(seed, verbose=False)
    learner = AVSPOModule(policy, **{"learning_rate": 3e-3, **(module or {})})
    collect = rollouts(**{"seed": seed, **(rollout or {})})
    run = trainer(folder, collect, CollapseMonitor(), *(callbacks or []), **{"max_epochs": 3, **options})
    run.fit(learner, train_dataloaders=collect.train_dataloader(), ckpt_path=ckpt_path)
    return learner, run


def weights(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.model.named_parameters()}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def largest_gradient_difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Relative to the largest gradient."""
    scale = max(gradient.abs().max().item() for gradient in a)
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True)) / scale


class GradientRecorder(pl.Callback):
    """Keeps the gradients of every optimizer step, before clipping."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        grads = (p.grad for p in pl_module.model.parameters())
        self.steps.append([torch.zeros(()) if grad is None else grad.detach().clone() for grad in grads])
