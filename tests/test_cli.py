"""The command line: configs parse, print and run; what cannot work is refused by name before a model is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from avspo_lightning.cli import main

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config(tmp_path: Path, tiny_folder: str) -> str:
    """A run of seconds on the tiny model."""
    problems = tmp_path / "problems.jsonl"
    rows = [{"id": f"p{i}", "problem": f"w{i + 3} w5", "answer": "7", "level": str(i % 2)} for i in range(12)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model": {"policy": tiny_folder, "learning_rate": 1e-3},
        "data": {"class_path": "JSONLDataModule", "init_args": {"path": str(problems), "val_path": str(problems)}},
        "rollout": {"reward": "NumericReward", "group_size": 4, "prompts_per_step": 4, "max_completion_tokens": 4},
        "summary": {"metric": "val/heldout/accuracy"},
        "trainer": {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "enable_model_summary": False},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(options))
    return str(path)


def test_fit_validate_test_predict(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "-c", config])
    out = capsys.readouterr().out
    assert "val/heldout/accuracy before  0." in out
    assert "val/heldout/accuracy after   0." in out
    checkpoint = tmp_path / "runs" / "avspo" / "version_0" / "checkpoints" / "last.ckpt"
    assert checkpoint.is_file()
    assert (checkpoint.parents[1] / "config.yaml").is_file()
    main(["validate", "-c", config, "--ckpt_path", str(checkpoint)])
    assert "val/heldout/accuracy" in capsys.readouterr().out
    main(["test", "-c", config, "--ckpt_path", str(checkpoint)])
    assert "test/heldout/accuracy" in capsys.readouterr().out
    main(["predict", "-c", config, "--ckpt_path", str(checkpoint)])
    written = list(tmp_path.rglob("predictions.jsonl"))
    assert len(written) == 1
    assert len(written[0].read_text().splitlines()) == 12


def test_every_set_is_measured_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--trainer.max_epochs", "2", "--trainer.check_val_every_n_epoch", "2", "--data.num_val", "45"]
    main(["fit", "-c", str(ROOT / "configs" / "quickstart.yaml"), *quick, "--data.num_val_samples", "2"])
    table = capsys.readouterr().out
    assert re.search(r"val/arithmetic/accuracy before  0\.\d", table)
    assert re.search(r"val/arithmetic/accuracy after   0\.\d", table)
    events = EventAccumulator(str(tmp_path / "runs" / "avspo" / "version_0"))
    events.Reload()
    for name in ("arithmetic/accuracy", "arithmetic_sampled/accuracy", "arithmetic_sampled/pass@2"):
        assert [event.step for event in events.Scalars(f"val/{name}")] == [0, 1]


def test_the_switches_of_the_trainer_turn_callbacks_off(config: str, tmp_path: Path) -> None:
    off = ["--trainer.enable_progress_bar", "false", "--trainer.enable_checkpointing", "false", "--summary.picture", ""]
    main(["fit", "-c", config, *off])
    assert not list(tmp_path.rglob("*.ckpt"))
    assert not list(tmp_path.rglob("*.png"))


def test_print_config_names_every_knob_and_reads_back(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", config, "--rollout.advantage", "GRPO", "--rollout.threshold.eta", "0", "--print_config"])
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["rollout"]["advantage"]["class_path"] == "avspo_lightning.GRPO"
    assert printed["rollout"]["threshold"]["init_args"]["eta"] == 0
    assert set(printed["model"]) >= {"clip_low", "clip_high", "aggregation", "ratio_level", "kl_coef", "freeze"}


def test_help_gives_each_knob_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Completions per prompt (G), at least 2. (type: int, default: 8)" in text
    assert "The ratio is clipped at 1 - clip_low. (type: float, default: 0.2)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rollout.group_size", "1"], "`group_size` must be at least 2"),
        (["--rollout.temperature", "0"], "`temperature` must be above 0"),
        (["--rollout.threshold", "AdaptiveThreshold", "--rollout.threshold.init", "2"], "`init`"),
        (["--rollout.threshold", "AdaptiveThreshold", "--rollout.threshold.bounds", "[0.9,0.1]"], "`bounds`"),
        (["--model.clip_low", "-0.1"], "`clip_low` must be between 0 and 1, got -0.1"),
        (["--model.aggregation", "mean"], "seq_mean"),
        (["--model.lrr", "1"], "lrr"),
        (["--rollout.advantage", "AVSPO", "--rollout.advantage.alpha", "-1"], "`alpha`"),
    ],
)
def test_what_cannot_work_is_refused(
    config: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "-c", config, "--model.policy", "no/such/model", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_parses(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [] if path.parent.name == "configs" else ["-c", str(ROOT / "configs" / "quickstart.yaml")]
    with pytest.raises(SystemExit) as stop:
        main(["fit", *base, "-c", str(path), "--print_config"])
    assert stop.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["rollout"]


def test_every_config_says_what_it_is_for() -> None:
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert path.read_text().startswith("# "), f"{path} says what it is for"
