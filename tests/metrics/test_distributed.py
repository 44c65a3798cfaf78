"""Two processes see what one would."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from avspo_lightning.metrics import AdaptiveThreshold, AdvantageCollapseRate, PassAtK, WeightedMeans
from tests.functional.reference import assert_close

REWARDS = (torch.tensor([[1.0, 1], [1, 1], [0, 0]]), torch.tensor([[1.0, 0]]))
ENTROPY = ((1.0, 10), (2.0, 90))
CORRECT = (torch.tensor([[True, False], [False, False]]), torch.tensor([[True, True]]))


def _run(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    rate, wrong, passed = AdvantageCollapseRate(), AdvantageCollapseRate("wrong"), PassAtK(1)
    means = WeightedMeans(["entropy", "idle"], maxima=["deviation"])
    threshold = AdaptiveThreshold()
    rounds = []
    for _ in range(2):
        rate.update(REWARDS[rank])
        wrong.update(REWARDS[rank])
        passed.update(CORRECT[rank])
        means.update({"entropy": ENTROPY[rank], "deviation": (0.1 + rank, 1)})
        threshold.update(0.8, 0.1 * (len(rounds) + 1) * (1 + rank))
        result = {"rate": rate.compute(), "wrong": wrong.compute(), "pass": passed.compute(), **means.compute()}
        rounds.append({name: value.item() for name, value in (result | {"tau": threshold.compute()}).items()})
        for metric in (rate, wrong, passed, means, threshold):
            metric.reset()
    Path(folder, f"{rank}.json").write_text(json.dumps(rounds), encoding="utf-8")
    dist.destroy_process_group()


def test_two_ranks_equal_one_process_and_again_after_reset(tmp_path: Path) -> None:
    # The server imports torchmetrics once, and its children are forks of it.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["avspo_lightning.metrics"])
    mp.start_processes(_run, args=(str(tmp_path),), nprocs=2, start_method="forkserver")
    for rank in range(2):
        rounds = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        for tau, result in zip((0.5, 0.503), rounds, strict=True):
            expected = {
                "rate": 0.75,  # 3 of 4 groups, not the mean of 1.0 and 0.0
                "wrong": 0.25,
                "pass": 0.5,
                "entropy": 1.9,
                "idle": 0.0,
                "deviation": 1.1,
                "tau": tau,
            }
            assert list(result) == list(expected)
            for name, value in expected.items():
                assert_close(result[name], value, message=name)
