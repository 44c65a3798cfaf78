"""GRPO, AVSPO and always-on augmentation on the embedded task: paired seeds, equal budgets.

python benchmarks/compare_methods.py --seeds 10 --iterations 300

Each cell is one ``avspo fit``; a cell whose result is there is not run again, so the command can be stopped and
repeated. Writes one JSON line per cell and prints the paired table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[1]
METHODS = ("grpo", "avspo", "avspo_always")
FINAL = {
    "accuracy, greedy": "val/arithmetic/accuracy",
    "accuracy, sampled": "val/arithmetic_sampled/accuracy",
    "pass@8": "val/arithmetic_sampled/pass@8",
    "length": "val/arithmetic_sampled/length",
}
OVER_RUN = {
    "reward, mean of run": "train/reward/mean",
    "ACR, raw": "train/collapse/acr",
    "ACR, effective": "train/collapse/acr_effective",
    "share augmented": "train/collapse/triggered",
}
AT_END = {"entropy, last 20": "train/policy/entropy", "reward, last 20": "train/reward/mean"}
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 12: 2.201}


def run_cell(method: str, seed: int, iterations: int, folder: Path) -> dict[str, float | str]:
    """Trains one cell unless its result is there."""
    cell = folder / f"{method}-{seed}-{iterations}"
    result = cell / "result.json"
    if not result.is_file():
        started = time.perf_counter()
        configs = ["-c", ROOT / "configs" / "quickstart.yaml", "-c", ROOT / "configs" / "methods" / f"{method}.yaml"]
        options = {
            "seed_everything": seed,
            "data.num_val_samples": 8,
            "trainer.max_epochs": iterations,
            "trainer.check_val_every_n_epoch": iterations,
            "trainer.logger.save_dir": cell,
            "trainer.enable_progress_bar": "false",
            "summary.picture": "",
        }
        command = [sys.executable, "-m", "avspo_lightning", "fit", *configs]
        command += [f"--{name}={value}" for name, value in options.items()]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        newest = max(cell.rglob("events.out.*"), key=lambda path: path.stat().st_mtime)
        values = {"method": method, "seed": seed, **read(newest.parent), "seconds": time.perf_counter() - started}
        result.write_text(json.dumps(values))
    return json.loads(result.read_text())


def read(folder: Path) -> dict[str, float]:
    """The numbers of a finished run."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()

    def series(tag: str) -> np.ndarray:
        return np.array([event.value for event in events.Scalars(tag)])

    values = {name: float(series(tag)[-1]) for name, tag in FINAL.items()}
    values["accuracy, greedy, before"] = float(series(FINAL["accuracy, greedy"])[0])
    values |= {name: float(series(tag).mean()) for name, tag in OVER_RUN.items()}
    values |= {name: float(series(tag)[-20:].mean()) for name, tag in AT_END.items()}
    return values


def table(cells: list[dict[str, float | str]]) -> str:
    """Mean of each method, and its paired difference to GRPO with a 95 % interval."""
    seeds = sorted({cell["seed"] for cell in cells})
    by_method = {m: {c["seed"]: c for c in cells if c["method"] == m} for m in METHODS}
    lines = [
        "| | GRPO | AVSPO | always on | AVSPO - GRPO | always on - GRPO |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("accuracy, greedy, before", *FINAL, *OVER_RUN, *AT_END, "seconds"):
        columns = {m: np.array([float(by_method[m][seed][name]) for seed in seeds]) for m in METHODS}
        means = [f"{columns[m].mean():.3f}" for m in METHODS]
        differences = [interval(columns[m] - columns["grpo"]) for m in METHODS[1:]]
        lines.append(f"| {name} | {' | '.join(means + differences)} |")
    return "\n".join(lines)


def interval(differences: np.ndarray) -> str:
    """Mean and half-width of the 95 % interval (Student's t)."""
    count = len(differences)
    half = T_975.get(count, 1.96) * differences.std(ddof=1) / count**0.5
    return f"{differences.mean():+.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="paired seeds, from 0")
    parser.add_argument("--iterations", type=int, default=300, help="iterations of reinforcement learning per cell")
    parser.add_argument("--processes", type=int, default=1, help="cells at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/compare"), help="where results are kept")
    arguments = parser.parse_args()
    cells = [(method, seed) for seed in range(arguments.seeds) for method in METHODS]
    with ThreadPoolExecutor(arguments.processes) as pool:
        results = list(pool.map(lambda cell: run_cell(*cell, arguments.iterations, arguments.folder.absolute()), cells))
    (arguments.folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    print(table(results))


if __name__ == "__main__":
    main()
