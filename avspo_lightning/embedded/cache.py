"""Where built-in models are kept once they are made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock


def cache_root() -> Path:
    """Folder of everything that the package makes once and keeps.

    Returns:
        ``$AVSPO_CACHE`` where it is set, else ``avspo_lightning`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    >>> from unittest.mock import patch
    >>> with patch.dict(os.environ, AVSPO_CACHE="/scratch/avspo"):
    ...     print(cache_root())
    /scratch/avspo
    """
    if own := os.environ.get("AVSPO_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "avspo_lightning"


def built_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """``folder``, filled by ``build`` where it does not exist; nobody ever sees it half filled.

    Processes that ask at the same time, such as the ranks of one run, wait for the first of them.

    Args:
        folder: What is asked for; a folder that exists is taken as it is.
        build: Fills the empty folder that it is given, which lies beside ``folder`` until it is complete.

    Returns:
        ``folder``.

    >>> with TemporaryDirectory() as root:
    ...     made = built_once(Path(root) / "squares", lambda staged: (staged / "nine").write_text("9"))
    ...     (made / "nine").read_text()
    '9'
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as staging:
                staged = Path(staging) / folder.name
                staged.mkdir()
                build(staged)
                staged.rename(folder)
    return folder
