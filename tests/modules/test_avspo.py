"""The learner: its loss, its gradients however a step is split, and its place in Lightning."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from avspo_lightning import GRPO, AVSPOModule
from avspo_lightning.rollouts import to_batch
from avspo_lightning.types import Completion, Prompt, RolloutBatch, SamplingParams
from tests.running import (
    GradientRecorder,
    fit,
    largest_difference,
    largest_gradient_difference,
    trainer,
    weights,
)
from tests.tiny import completion, tiny_config

AGGREGATIONS = ["seq_mean", "token_mean_global", "constant", "seq_sum", "sum_of_seq_means"]


class Recorder(pl.Callback):
    """Keeps what was logged after each epoch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.callback_metrics:
            self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)


def batch(
    lengths: list[int],
    advantages: list[float],
    *,
    rewards: list[float] | None = None,
    truncated: list[bool] | None = None,
    **options: Any,
) -> RolloutBatch:
    """Rows with one prompt; token values differ from row to row."""
    completions = [
        completion([3 + (7 * i + t) % 60 for t in range(n)], truncated=bool(truncated and truncated[i]))
        for i, n in enumerate(lengths)
    ]
    return to_batch(
        [Prompt(id="p", text="", answer="", token_ids=(5, 6, 7))],
        [completions],
        rewards=torch.tensor([rewards or [0.0] * len(lengths)], dtype=torch.float64),
        advantages=torch.tensor([advantages], dtype=torch.float64),
        sampling=SamplingParams(max_tokens=10),
        **options,
    )


class Rows:
    """A loader of hand-made batches: the learner needs no rollouts callback."""

    def __init__(self, whole: RolloutBatch, split: list[list[int]], num_passes: int = 1) -> None:
        from dataclasses import replace

        counts = {"num_sequences": int(whole.loss_mask.any(-1).sum()), "num_tokens": int(whole.loss_mask.sum())}
        self.batches = [replace(whole.rows(index), **counts) for index in split] * num_passes

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def train_on(
    folder: Path, policy: Any, rows: Rows, *, module: dict[str, Any] | None = None, **options: Any
) -> tuple[AVSPOModule, GradientRecorder, Recorder]:
    pl.seed_everything(0, verbose=False)
    gradients, log = GradientRecorder(), Recorder()
    learner = AVSPOModule(policy, **{"learning_rate": 1e-2, **(module or {})})
    run = trainer(folder, gradients, log, **{"max_epochs": 1, "gradient_clip_val": None, **options})
    run.fit(learner, train_dataloaders=rows)
    return learner, gradients, log


def test_on_policy_the_ratio_is_one_the_loss_zero_and_the_gradient_is_not(tmp_path: Path, tiny_folder: str) -> None:
    rows = Rows(batch([4, 4, 4, 4], [1.0, -1.0, 1.0, -1.0]), [[0, 1, 2, 3]])
    _, _, log = train_on(tmp_path, tiny_folder, rows)
    logged = log.rows[-1]
    assert abs(logged["train/policy/loss"]) < 1e-6
    assert logged["train/policy/ratio_max_deviation"] < 1e-6
    assert logged["train/policy/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert logged["train/policy/grad_norm"] > 1e-4


def test_dropout_in_the_config_leaves_the_ratio_at_one(tmp_path: Path, tiny_folder: str) -> None:
    rollout = {"num_passes": 2, "advantage": GRPO()}
    module = {"tokenizer": tiny_folder, "learning_rate": 1e-12}
    log = Recorder()
    fit(tmp_path, tiny_config(attention_dropout=0.5), module=module, rollout=rollout, callbacks=[log], max_epochs=1)
    assert log.rows[-1]["train/policy/ratio_max_deviation"] < 1e-6


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("size", [4, 2, 1])
def test_gradient_is_the_same_for_any_split_of_a_step(
    tmp_path: Path, tiny_folder: str, aggregation: str, size: int
) -> None:
    whole = batch([1, 9, 3, 5, 2, 7, 4, 6], [1.5, -0.5, 0.3, -1.0, 0.8, -0.2, -0.7, 0.4])
    module = {"aggregation": aggregation}
    _, one, _ = train_on(tmp_path, tiny_folder, Rows(whole, [list(range(8))]), module=module)
    split = [list(range(i, i + size)) for i in range(0, 8, size)]
    _, many, _ = train_on(tmp_path, tiny_folder, Rows(whole, split), module=module, accumulate_grad_batches=len(split))
    assert len(one.steps) == len(many.steps) == 1
    assert largest_gradient_difference(one.steps[0], many.steps[0]) < 1e-5


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_two_steps_per_rollout_are_the_same_for_any_split(tmp_path: Path, tiny_folder: str, aggregation: str) -> None:
    results = []
    for size, accumulate in ((8, 1), (4, 2), (2, 4)):
        recorder = GradientRecorder()
        module, _ = fit(
            tmp_path,
            tiny_folder,
            module={"aggregation": aggregation},
            rollout={"num_passes": 2, "minibatch_size": size, "prompts_per_step": 2},
            callbacks=[recorder],
            accumulate_grad_batches=accumulate,
            max_epochs=2,
        )
        assert len(recorder.steps) == 4
        results.append((recorder.steps, weights(module)))
    for steps, end in results[1:]:
        for step, expected in zip(steps, results[0][0], strict=True):
            assert largest_gradient_difference(expected, step) < 1e-4
        assert largest_difference(end, results[0][1]) < 1e-4


def test_masked_truncation_leaves_the_denominator_too(tmp_path: Path, tiny_folder: str) -> None:
    both = batch([4, 6], [1.0, -0.5], truncated=[False, True], mask_truncated=True)
    for aggregation in ("token_mean_global", "seq_mean"):
        module = {"aggregation": aggregation}
        _, masked, _ = train_on(tmp_path, tiny_folder, Rows(both, [[0, 1]]), module=module)
        _, alone, _ = train_on(tmp_path, tiny_folder, Rows(batch([4], [1.0]), [[0]]), module=module)
        assert largest_gradient_difference(alone.steps[0], masked.steps[0]) < 1e-5


@pytest.mark.parametrize("case", ["truncated", "unscorable"])
def test_nothing_to_learn_from_changes_nothing(tmp_path: Path, tiny_folder: str, case: str) -> None:
    if case == "truncated":
        rows = batch([4, 6], [1.0, -0.5], truncated=[True, True], mask_truncated=True)
    else:
        rows = batch([4, 6], [0.0, 0.0], rewards=[math.nan, math.nan])
    module, _, log = train_on(tmp_path, tiny_folder, Rows(rows, [[0, 1]]))
    before = AVSPOModule(tiny_folder)
    before.configure_model()
    assert largest_difference(weights(module), weights(before)) == 0, "AdamW's weight decay would have moved them"
    assert log.rows[-1]["train/policy/skipped"] == 1
    assert log.rows[-1]["train/policy/loss"] == 0
    assert all(math.isfinite(value) for value in log.rows[-1].values())


def test_a_snapshot_of_weights_gives_the_same_ratios_as_one_of_logprobs(tmp_path: Path, tiny_folder: str) -> None:
    logs, ends = [], []
    for old_policy in ("logprobs", "weights"):
        log = Recorder()
        module, _ = fit(
            tmp_path, tiny_folder, module={"old_policy": old_policy}, rollout={"num_passes": 3}, callbacks=[log]
        )
        logs.append(log.rows)
        ends.append(weights(module))
    assert largest_difference(*ends) < 1e-6
    for a, b in zip(*logs, strict=True):
        assert a["train/policy/ratio_max_deviation"] > 1e-3, "the later passes are off-policy"
        for name in ("ratio_mean", "ratio_max_deviation", "clip_low_fraction", "clip_high_fraction", "loss"):
            assert a[f"train/policy/{name}"] == pytest.approx(b[f"train/policy/{name}"], abs=1e-5)


def test_kl_to_the_initial_policy(tmp_path: Path, tiny_folder: str) -> None:
    log = Recorder()
    module, _ = fit(tmp_path, tiny_folder, module={"kl_coef": 0.1}, callbacks=[log], max_epochs=4)
    kl = [row["train/policy/kl"] for row in log.rows]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-4
    assert all(not p.requires_grad for p in module.reference_model.parameters())


def test_lightning_counts_steps_clips_and_saves(tmp_path: Path, tiny_folder: str) -> None:
    norms: list[float] = []

    class Norms(pl.Callback):
        def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
            grads = [p.grad for p in pl_module.model.parameters() if p.grad is not None]
            if grads:
                norms.append(torch.nn.utils.get_total_norm(grads).item())

    log = Recorder()
    _, run = fit(
        tmp_path,
        tiny_folder,
        rollout={"num_passes": 2},
        callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1), Norms(), log],
        enable_checkpointing=True,
        max_epochs=4,
        gradient_clip_val=0.05,
    )
    assert run.global_step == 8
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"epoch=1-step=3.ckpt", "epoch=2-step=6.ckpt"}
    assert norms
    assert max(norms) <= 0.05 + 1e-6
    assert max(row["train/policy/grad_norm"] for row in log.rows) > 0.05


@pytest.mark.parametrize(
    "module",
    [
        {"gradient_checkpointing": True},
        {"freeze": [r"layers\.0\."]},
        {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
        {"aggregation": "token_mean_local"},
        {"lr_schedule": "cosine", "warmup_steps": 1},
    ],
    ids=str,
)
def test_options_train(tmp_path: Path, tiny_folder: str, module: dict[str, Any]) -> None:
    before = AVSPOModule(tiny_folder)
    before.configure_model()
    after, _ = fit(tmp_path, tiny_folder, module=module, rollout={"num_passes": 2})
    moved = {n for n, w in weights(after).items() if not torch.equal(w, weights(before)[n])}
    frozen = {n for n in weights(before) if "freeze" in module and "layers.0." in n}
    assert moved == set(weights(before)) - frozen


@pytest.mark.parametrize("options", [{"precision": "bf16-mixed"}, {"module": {"dtype": "bfloat16"}}], ids=str)
def test_lower_precision_trains_and_leaves_the_means_exact(
    tmp_path: Path, tiny_folder: str, options: dict[str, Any]
) -> None:
    log = Recorder()
    module, _ = fit(tmp_path, tiny_folder, callbacks=[log], rollout={"num_passes": 2}, **options)
    assert module.statistics.sums.dtype == torch.float64
    assert all(math.isfinite(value) for row in log.rows for value in row.values())
    assert log.rows[-1]["train/policy/grad_norm"] > 0
    assert next(module.model.parameters()).dtype == (torch.float32 if "precision" in options else torch.bfloat16)


def test_compiling_changes_neither_rollouts_nor_gradients(tmp_path: Path, tiny_folder: str) -> None:
    plain, compiled = GradientRecorder(), GradientRecorder()
    fit(tmp_path, tiny_folder, callbacks=[plain])
    fit(tmp_path, tiny_folder, callbacks=[compiled], module={"compile": "aot_eager"})
    for expected, found in zip(plain.steps, compiled.steps, strict=True):
        assert largest_gradient_difference(expected, found) < 1e-4


def test_gradient_checkpointing_changes_no_gradient(tmp_path: Path, tiny_folder: str) -> None:
    rows = Rows(batch([4, 6, 2, 5], [1.0, -0.5, 0.2, -0.7]), [[0, 1, 2, 3]])
    _, plain, _ = train_on(tmp_path, tiny_folder, rows)
    _, recomputed, _ = train_on(tmp_path, tiny_folder, rows, module={"gradient_checkpointing": True})
    assert largest_gradient_difference(plain.steps[0], recomputed.steps[0]) < 1e-5


def test_no_graph_outlives_its_micro_batch(tmp_path: Path, tiny_folder: str) -> None:
    alive: list[weakref.ref[Tensor]] = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            def remember(module: torch.nn.Module, args: Any, output: Tensor) -> None:
                alive.append(weakref.ref(output))

            pl_module.model.get_output_embeddings().register_forward_hook(remember)

        def on_train_batch_end(self, *_: Any) -> None:
            gc.collect()
            assert alive
            assert all(ref() is None for ref in alive)

    fit(tmp_path, tiny_folder, callbacks=[Watch()], rollout={"minibatch_size": 4}, accumulate_grad_batches=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": -0.1}, "`clip_low`"),
        ({"clip_high": -0.1}, "`clip_high`"),
        ({"learning_rate": 0.0}, "`learning_rate`"),
        ({"aggregation": "mean"}, "`aggregation` must be one of seq_mean"),
        ({"kl_coef": -1.0}, "`kl_coef`"),
        ({"old_policy": "both"}, "`old_policy` must be one of logprobs, weights"),
        ({"warmup_steps": -1}, "`warmup_steps`"),
        ({"compile": "fast"}, "`compile` must be a backend of torch.compile"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AVSPOModule("no/such/model", **options)


def test_rewards_of_nan_leave_no_nan_behind(tmp_path: Path, tiny_folder: str) -> None:
    def unscorable(prompts: list[Prompt], completions: list[Completion]) -> list[float | None]:
        return [None] * len(completions)

    log = Recorder()
    module, _ = fit(tmp_path, tiny_folder, rollout={"reward": unscorable}, callbacks=[log], max_epochs=2)
    assert all(weight.isfinite().all() for weight in weights(module).values())
    assert all(math.isfinite(value) for row in log.rows for value in row.values())
    assert log.rows[-1]["train/collapse/num_unscorable"] == 4
    assert log.rows[-1]["train/policy/skipped"] == 1
