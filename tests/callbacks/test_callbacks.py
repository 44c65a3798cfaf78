"""Callbacks in real runs of the Trainer."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from avspo_lightning import (
    AVSPOModule,
    CollapseMonitor,
    CompletionLogger,
    IterationCheckpoint,
    IterationProgressBar,
    RolloutCallback,
    RolloutObserver,
    RunSummary,
)
from avspo_lightning.types import EvaluationSet, Rollout
from tests.running import fit, rollouts, trainer, weights
from tests.tiny import ScriptedEngine, completion, parity_reward, tiny_prompts

FIXED_KEYS = {
    *(f"train/collapse/{name}" for name in ("acr", "acr_effective", "acr_all_right", "acr_all_wrong")),
    *(f"train/collapse/{name}" for name in ("acr_cumulative", "tau", "triggered", "num_virtual")),
    *(f"train/time/{part}_seconds" for part in ("generate", "score", "logprob", "update")),
    "train/time/tokens_per_second",
    *(f"train/policy/{name}" for name in ("loss", "grad_norm", "ratio_mean", "ratio_max_deviation", "entropy")),
    *(f"train/policy/{name}" for name in ("clip_low_fraction", "clip_high_fraction", "kl", "skipped")),
    *(f"train/{name}" for name in ("completion/length", "completion/truncated", "reward/mean", "reward/unscorable")),
}


class Rollouts(RolloutObserver):
    def __init__(self) -> None:
        self.seen: list[Rollout] = []

    def on_rollout(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollout: Rollout) -> None:
        self.seen.append(rollout)


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "log" / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_what_is_logged_is_what_happened(tmp_path: Path, tiny_folder: str) -> None:
    observer = Rollouts()
    fit(tmp_path, tiny_folder, callbacks=[observer], max_epochs=4)
    logged = rows(tmp_path)
    assert len(logged) == len(observer.seen) == 4
    collapsed = groups = 0
    for row, rollout in zip(logged, observer.seen, strict=True):
        assert set(row) >= FIXED_KEYS
        spread = rollout.rewards.std(-1, correction=0)
        collapsed, groups = collapsed + int((spread < 1e-6).sum()), groups + len(spread)
        assert row["train/collapse/acr"] == pytest.approx((spread < 1e-6).double().mean().item())
        assert row["train/collapse/acr_cumulative"] == pytest.approx(collapsed / groups)
        assert row["train/collapse/tau"] == pytest.approx(rollout.collapse.tau)
        assert row["train/reward/mean"] == pytest.approx(rollout.rewards.mean().item())
        lengths = rollout.batch.completion_mask.sum(-1).double()
        assert row["train/completion/length"] == pytest.approx(lengths.mean().item())


def test_rewards_rise(tmp_path: Path, tiny_folder: str) -> None:
    """The task is learnable: the first sampled token must have the parity that the prompt asks for."""
    observer = Rollouts()
    fit(tmp_path, tiny_folder, callbacks=[observer], rollout={"prompts_per_step": 8, "group_size": 8}, max_epochs=40)
    means = torch.stack([rollout.rewards.mean() for rollout in observer.seen])
    assert means[:5].mean() < 0.7
    assert means[-5:].mean() > means[:5].mean() + 0.25


def test_an_engine_of_its_own_weights_is_given_them_once_per_update(tmp_path: Path, tiny_folder: str) -> None:
    engine = ScriptedEngine(lambda prompt, j: completion([3 + j, 2]))
    module, _ = fit(tmp_path, tiny_folder, rollout={"engine": engine})
    assert engine.versions == [0, 1, 2]
    assert engine.names == list(weights(module))


def test_ids_reach_the_loss_untouched(tmp_path: Path, tiny_folder: str) -> None:
    """w5 and w6 decode to one text here; the ids that were drawn are those that are trained on."""
    engine = ScriptedEngine(lambda prompt, j: completion([5, 5, 5, 5, 6 + j], truncated=True))
    seen: list[torch.Tensor] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, _: int) -> None:
            seen.append(batch.completion_ids)

    fit(tmp_path, tiny_folder, rollout={"engine": engine}, callbacks=[Watch()], max_epochs=1)
    assert seen[0].tolist() == [[5, 5, 5, 5, 6 + j] for j in range(4)] * 4


def test_evaluation_is_sampled_and_logged_by_name(tmp_path: Path, tiny_folder: str) -> None:
    collect = rollouts(evaluation_batch_size=3)
    prompts = tuple(tiny_prompts(8, seed=5))
    sets = [
        EvaluationSet(name="greedy", prompts=prompts),
        EvaluationSet(name="sampled", prompts=prompts, num_samples=4, temperature=1.0),
    ]
    from avspo_lightning.datamodules import tokenized

    module = AVSPOModule(tiny_folder)
    module.setup("validate")
    loaders = [
        collect.evaluation_loader(
            EvaluationSet(
                name=s.name,
                prompts=tuple(tokenized(s.prompts, module.tokenizer)),
                num_samples=s.num_samples,
                temperature=s.temperature,
            )
        )
        for s in sets
    ]
    assert [len(loader) for loader in loaders] == [3, 3]
    run = trainer(tmp_path, collect)
    found = {k: v for part in run.validate(module, dataloaders=loaders, verbose=False) for k, v in part.items()}
    assert set(found) == {
        *(f"val/greedy/{name}" for name in ("accuracy", "length", "truncated")),
        *(f"val/sampled/{name}" for name in ("accuracy", "length", "truncated", "pass@4")),
    }
    assert found["val/sampled/pass@4"] >= found["val/sampled/accuracy"]
    assert (found["val/greedy/accuracy"] * 8) % 1 == pytest.approx(0)
    again = trainer(tmp_path, collect).validate(module, dataloaders=loaders, verbose=False)
    assert again[0]["val/greedy/accuracy"] == found["val/greedy/accuracy"]
    predicted = trainer(tmp_path, collect, CompletionLogger(), logger=False).predict(module, dataloaders=loaders[:1])
    assert sum(len(rollout.prompts) for rollout in predicted) == 8
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [p.id for p in prompts]


def test_tensorboard_gets_curves_a_layout_and_readable_samples(tmp_path: Path, tiny_folder: str) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="tb")
    fit(tmp_path, tiny_folder, callbacks=[CompletionLogger(every_n_iterations=2, num_prompts=1)], logger=logger)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= FIXED_KEYS
    assert len(events.Scalars("train/collapse/tau")) == 3
    tensors = events.Tags()["tensors"]
    assert "custom_scalars__config__" in tensors
    assert "train/completions/text_summary" in tensors
    lines = [json.loads(line) for line in (tmp_path / "tb" / "completions.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0] * 4 + [2] * 4
    assert set(lines[0]) >= {"prompt", "answer", "completion", "reward", "advantage", "finish_reason"}
    assert sum(line["advantage"] for line in lines[:4]) == pytest.approx(0, abs=1e-6)


def test_summary(tmp_path: Path, tiny_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    observer = Rollouts()
    fit(tmp_path, tiny_folder, callbacks=[observer, RunSummary()])
    table = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    table = {name: value.strip() for name, value in table.items()}
    summaries = [rollout.collapse for rollout in observer.seen]
    assert table["iterations"] == "3"
    assert table["mean ACR, raw"] == f"{sum(s.acr for s in summaries) / 3:.3f}"
    assert table["mean ACR, effective"] == f"{sum(s.acr_effective for s in summaries) / 3:.3f}"
    assert table["steps with augmentation"] == f"{sum(s.triggered for s in summaries) / 3:.1%}"
    assert table["val/arithmetic/accuracy before"] == "not measured"
    picture = Path(table["curves"]).read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_the_end_of_a_run_is_kept(tmp_path: Path, tiny_folder: str) -> None:
    checkpoint = IterationCheckpoint(tmp_path, save_last=True, every_n_train_steps=2)
    module, run = fit(tmp_path, tiny_folder, callbacks=[checkpoint], enable_checkpointing=True, max_epochs=3)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert state["global_step"] == run.global_step == 3
    for name, value in weights(module).items():
        assert torch.equal(state["state_dict"][f"model.{name}"], value)


def test_progress_bar(tmp_path: Path, tiny_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    bar = IterationProgressBar(refresh_rate=1)
    fit(tmp_path, tiny_folder, callbacks=[bar], enable_progress_bar=True)
    shown = capsys.readouterr().out
    assert "3/3" in shown
    assert "tau 0.5" in shown
    assert "ACR" in shown


class Foreign(pl.LightningModule):
    """Somebody else's module: it hands over rewards and knows nothing of this package."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches = batches

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(torch.ones(1)).sum(), "rewards": self.batches[batch_idx]}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_collapse_monitor_in_a_foreign_module(tmp_path: Path) -> None:
    batches = [torch.tensor([[1, 1], [0, 0], [0, 1], [1, 0.0]]), torch.tensor([[0, 0], [0, 0], [0, 1], [0, 0.0]])]
    run = trainer(tmp_path, CollapseMonitor(), max_epochs=1)
    run.fit(Foreign(batches), train_dataloaders=torch.utils.data.DataLoader([0, 1]))
    first, second = rows(tmp_path)
    assert first["train/collapse/acr"] == 0.5
    assert first["train/collapse/acr_all_right"] == 0.25
    assert second["train/collapse/acr"] == 0.75
    assert second["train/collapse/acr_all_wrong"] == 0.75
    assert second["train/collapse/acr_cumulative"] == 0.625


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "`group_size` must be at least 2"),
        ({"prompts_per_step": 0}, "`prompts_per_step`"),
        ({"num_passes": 0}, "`num_passes`"),
        ({"minibatch_size": 0}, "`minibatch_size`"),
        ({"temperature": 0.0}, "`temperature` must be above 0"),
        ({"max_completion_tokens": 0}, "`max_tokens`"),
        ({"truncated": "drop"}, "`truncated`"),
        ({"collapse_on": "format"}, "`collapse_on`"),
        ({"prompts": []}, "`prompts` must hold at least one"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutCallback(parity_reward, **options)


def test_what_only_the_trainer_knows_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    module = AVSPOModule("no/such/model")
    module.prepare_data = lambda: None  # type: ignore[method-assign]
    collect = rollouts(prompts_per_step=5)
    collect.setup(trainer(tmp_path), module, "fit")
    with pytest.raises(
        MisconfigurationException, match="`prompts_per_step` = 5 must be a multiple.*2; the next one is 6"
    ):
        collect.setup(_of_two(tmp_path), module, "fit")
    with pytest.raises(MisconfigurationException, match="has no prompts"):
        rollouts(prompts=None).setup(trainer(tmp_path), module, "fit")
    with pytest.warns(UserWarning, match="`prompts_per_step` = 2: ACR then takes 3 values only"):
        rollouts(prompts_per_step=2).setup(trainer(tmp_path), module, "fit")


def test_a_sharded_policy_is_refused_by_an_engine_that_shares_it(tmp_path: Path) -> None:
    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run = trainer(tmp_path, devices=2, strategy=sharded, gradient_clip_val=None)
    with pytest.raises(MisconfigurationException, match="`engine` = HFEngine generates with the trained module itself"):
        rollouts(prompts_per_step=4).setup(run, AVSPOModule("no/such/model"), "fit")


def test_a_precision_that_would_cast_rewards_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, precision="bf16-true")
    with pytest.raises(MisconfigurationException, match="`precision` = 'bf16-true' would cast rewards"):
        rollouts().setup(run, AVSPOModule("no/such/model"), "fit")


def _of_two(folder: Path) -> pl.Trainer:
    return trainer(folder, devices=2, strategy="ddp")


def test_a_module_without_a_model_is_told_what_is_missing(tmp_path: Path) -> None:
    collect = rollouts()
    run = trainer(tmp_path, collect, max_epochs=1)
    with pytest.raises(MisconfigurationException, match="needs `Foreign.model`"):
        run.fit(Foreign([]), train_dataloaders=collect.train_dataloader())
