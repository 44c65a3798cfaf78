"""Models that the package makes itself, so that everything can be tried without a download."""

from __future__ import annotations

_PREFIX = "builtin:"


def model_path(source: str) -> str:
    """The folder or hub id that ``source`` stands for; a model named ``builtin:NAME`` is made first where it must be.

    Raises:
        ValueError: If there is no such built-in model.
    """
    if not source.startswith(_PREFIX):
        return source
    name = source.removeprefix(_PREFIX)
    if name == "smollm2-135m":
        from avspo_lightning.embedded.smollm2 import smollm2_model

        return str(smollm2_model())
    from avspo_lightning.embedded.pretrain import arithmetic_model

    return str(arithmetic_model(name))
