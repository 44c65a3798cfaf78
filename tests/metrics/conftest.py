from __future__ import annotations

from tests.functional.conftest import annotations_off

__all__ = ["annotations_off"]
