"""Seeds that depend on what is drawn, never on which rank draws it."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed below 2**63 from the parts that name a draw, such as (seed, iteration, prompt index, sample index).

    >>> derive_seed(42, 0, 3, 1) == derive_seed(42, 0, 3, 1)
    True
    >>> derive_seed(42, 0, 3, 1) == derive_seed(42, 0, 31, 0)
    False
    """
    key = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
