"""Imports go down only, and importing the package stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "avspo_lightning"
FLOORS = [
    {"__main__"},
    {"cli"},
    {"callbacks"},
    {"modules", "datamodules", "rollouts"},
    {"advantages", "metrics", "rewards"},
    {"embedded"},
    {"functional"},
    {"types", "seeds"},
]
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}


def _imports(path: Path) -> list[str]:
    """Names under ``avspo_lightning`` and top-level names of everything else that a file imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            nested = node.module == "avspo_lightning"
            found += [f"avspo_lightning.{alias.name}" for alias in node.names] if nested else [node.module]
    return found


def _floor(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    own = _floor(path)
    for name in _imports(path):
        if not name.startswith("avspo_lightning."):
            continue
        other = name.split(".")[1]
        below = LEVEL[other] > LEVEL[own] or other == own
        assert below, f"{own} must not import {other}"


@pytest.mark.parametrize("floor", ["functional", "types", "seeds"])
def test_the_ground_floor_sees_torch_alone(floor: str) -> None:
    allowed = {"torch", "jaxtyping", "avspo_lightning", "__future__", *sys.stdlib_module_names}
    files = [path for path in FILES if _floor(path) == floor]
    assert files
    for path in files:
        assert {name.split(".")[0] for name in _imports(path)} <= allowed, path


def test_importing_the_package_loads_neither_transformers_nor_vllm() -> None:
    code = "import sys, avspo_lightning; print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    import avspo_lightning

    for name in avspo_lightning.__all__:
        assert getattr(avspo_lightning, name).__name__ == name
