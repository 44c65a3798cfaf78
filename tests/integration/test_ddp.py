"""Two processes learn what one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.running import largest_difference, largest_gradient_difference

ROOT = Path(__file__).parents[2]


def run(world_size: int, policy: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank saved."""
    script = Path(__file__).with_name("two_ranks.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(world_size), policy, str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{world_size}.{rank}.pt") for rank in range(world_size)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tiny_folder: str) -> list[dict[str, Any]]:
    """Of one process, and of the first and second of two."""
    folder = tmp_path_factory.mktemp("ranks")
    return run(1, tiny_folder, folder) + run(2, tiny_folder, folder)


def test_two_ranks_draw_log_and_learn_what_one_does(results: list[dict[str, Any]]) -> None:
    one, first, second = (result["fit"] for result in results)
    together = [pair for groups in zip(first["drawn"], second["drawn"], strict=True) for pair in groups]
    assert together == one["drawn"], "the rank does not enter the seeds"
    groups = dict(together)
    assert groups["twin"] != groups["p0"], "two prompts of the same text are two groups"
    assert all(len(set(group)) > 1 for group in groups.values())

    assert largest_difference(first["weights"], second["weights"]) == 0
    assert largest_difference(one["weights"], first["weights"]) < 1e-4
    assert len(one["gradients"]) == len(first["gradients"]) == 6
    for expected, found in zip(one["gradients"], first["gradients"], strict=True):
        assert largest_gradient_difference(expected, found) < 1e-4

    for row, *others in zip(one["log"], first["log"], second["log"], strict=True):
        for other in others:
            assert row.keys() == other.keys()
            for name in (name for name in row if "/time/" not in name):
                assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("case", ["unequal", "masked"])
def test_ranks_with_unequal_tokens_give_the_gradient_of_one_process(results: list[dict[str, Any]], case: str) -> None:
    one, *ranks = (result[case] for result in results)
    assert len(one) == 5
    for rank in ranks:
        for aggregation, gradients in rank.items():
            assert largest_gradient_difference(one[aggregation], gradients) < 1e-5, aggregation
