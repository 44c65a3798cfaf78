"""The examples of the documentation run, and what it says about the code is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_examples_run(block: str) -> None:
    exec(compile(block, "example", "exec"), {"__name__": "example"})


def test_an_engine_and_a_reward_take_fewer_than_forty_lines() -> None:
    block = BLOCKS[-1].values[0]
    assert "class Guesser(RolloutEngine)" in block
    assert len(block.strip().splitlines()) < 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_configs_and_commands_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"configs/[\w/.-]+\.yaml|benchmarks/\w+\.py", page.read_text(encoding="utf-8")):
        assert (ROOT / name).is_file(), name
