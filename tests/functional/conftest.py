from __future__ import annotations

import jaxtyping
import pytest


@pytest.fixture
def annotations_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls as a user makes them: what the annotations forbid must be refused by the functions themselves."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
