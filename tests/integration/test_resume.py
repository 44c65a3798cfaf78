"""A run of 2N iterations equals N, a save, a new process, and N more: bit for bit."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.running import fit, weights

# Three passes of two minibatches with two batches per optimizer step: three steps an iteration, so that a checkpoint
# every four steps falls in the middle of the second iteration, in the middle of its rollouts.
OPTIONS: dict[str, Any] = {
    "rollout": {"num_passes": 3, "minibatch_size": 8},
    "module": {"lr_schedule": "linear", "warmup_steps": 2},
    "accumulate_grad_batches": 2,
}


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "log" / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if "time/" not in k} for row in csv.DictReader(file)]
    return [row for row in rows if row["epoch"]]


def _checkpointing(folder: Path, **options: Any) -> dict[str, Any]:
    return {"callbacks": [ModelCheckpoint(folder, save_top_k=-1, **options)], "enable_checkpointing": True}


def test_same_seed_same_run(tmp_path: Path, tiny_folder: str) -> None:
    first, _ = fit(tmp_path / "a", tiny_folder, **OPTIONS)
    second, _ = fit(tmp_path / "b", tiny_folder, **OPTIONS)
    other, _ = fit(tmp_path / "c", tiny_folder, seed=8, **OPTIONS)
    a, b, c = weights(first), weights(second), weights(other)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)
    assert _rows(tmp_path / "a") == _rows(tmp_path / "b")


@pytest.mark.parametrize(
    ("saving", "checkpoint"),
    [
        ({"every_n_train_steps": 4}, "epoch=1-step=4.ckpt"),
        ({"every_n_epochs": 1}, "epoch=1-step=6.ckpt"),
    ],
    ids=["in the middle of an iteration", "at its end"],
)
def test_resumed_equals_uninterrupted(
    tmp_path: Path, tiny_folder: str, saving: dict[str, int], checkpoint: str
) -> None:
    options = {**OPTIONS, "max_epochs": 4}
    whole, _ = fit(tmp_path / "whole", tiny_folder, **options, **_checkpointing(tmp_path / "whole", **saving))
    code = f"""
import sys, torch
from pathlib import Path
from tests.integration.test_resume import OPTIONS
from tests.running import fit, weights
module, trainer = fit(Path({str(tmp_path / "rest")!r}), {tiny_folder!r}, max_epochs=4, seed=7,
    ckpt_path={str(tmp_path / "whole" / checkpoint)!r}, **OPTIONS)
torch.save(weights(module), {str(tmp_path / "rest.pt")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    a, b = weights(whole), torch.load(tmp_path / "rest.pt")
    assert all(torch.equal(a[name], b[name]) for name in a)
    stop = int(checkpoint.split("step=")[1].split(".")[0])
    done = [row for row in _rows(tmp_path / "whole") if int(row["step"]) >= stop]
    assert done
    assert done == _rows(tmp_path / "rest")[-len(done) :]


def test_checkpoints_load_weights_only(tmp_path: Path, tiny_folder: str) -> None:
    fit(tmp_path, tiny_folder, **OPTIONS, **_checkpointing(tmp_path, every_n_train_steps=4))
    state = torch.load(tmp_path / "epoch=1-step=4.ckpt", weights_only=True)
    rollout = state["callbacks"]["RolloutCallback"]
    assert rollout["buffers"][0]["position"] == 2
    assert 0.1 <= rollout["threshold"]["tau"].item() <= 0.9
