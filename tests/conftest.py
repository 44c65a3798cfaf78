from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved tiny model with its tokenizer."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _run_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test writes beside itself goes to its own folder."""
    monkeypatch.chdir(tmp_path)
