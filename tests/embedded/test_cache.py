from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from avspo_lightning.embedded.cache import built_once, cache_root


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"AVSPO_CACHE": "/a", "XDG_CACHE_HOME": "/x"}, "/a"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/avspo_lightning"),
        ({}, "/home/me/.cache/avspo_lightning"),
    ],
)
def test_own_variable_then_xdg_then_home(variables, expected, monkeypatch):
    for name in ("AVSPO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


def test_a_build_that_fails_leaves_nothing_and_may_be_repeated(tmp_path):
    folder = tmp_path / "deep" / "model"

    def fail(staged: Path) -> None:
        (staged / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built_once(folder, fail)
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == []
    built_once(folder, lambda staged: (staged / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_those_who_ask_at_once_wait_for_the_first(tmp_path):
    builds = []

    def build(staged: Path) -> None:
        builds.append(staged)
        time.sleep(0.2)
        (staged / "weights").touch()

    found = []
    threads = [
        threading.Thread(target=lambda: found.append((built_once(tmp_path / "model", build) / "weights").exists()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert len(builds) == 1
