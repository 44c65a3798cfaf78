"""The embedded task: sums and differences of two-digit numbers, whose only difficulty is to carry and to borrow.

Operands are padded to two digits and answers to three, least significant digit first, so that each digit of an answer
follows from digits already written: ``27+48=`` is answered ``570``. A fifth of each level is held out, by a hash of
the unordered operands, so that no held-out sum has its mirror image in training.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

from avspo_lightning.types import Prompt

Split = Literal["train", "heldout"]
_HELD_OUT_OF = 5  # one problem in five


@dataclass(frozen=True, kw_only=True)
class Level:
    """A kind of problem, and how well the model knows it before reinforcement learning."""

    name: str
    operator: Literal["+", "-"]
    left: range
    right: range
    weight: int
    """Share of the prompts, relative to the other levels."""
    forgetting: float
    """How often the teacher of the pre-training corpus forgets to carry or to borrow."""


_ONE, _TWO = range(10), range(10, 100)
LEVELS = (
    Level(name="add-1x1", operator="+", left=_ONE, right=_ONE, weight=1, forgetting=0.3),
    Level(name="add-2x1", operator="+", left=_TWO, right=_ONE, weight=2, forgetting=0.5),
    Level(name="add-2x2", operator="+", left=_TWO, right=_TWO, weight=3, forgetting=0.75),
    Level(name="sub-2x2", operator="-", left=_TWO, right=_TWO, weight=3, forgetting=0.93),
)


@cache
def problems(level: Level, split: Split) -> tuple[Prompt, ...]:
    """Every problem of a level, in a fixed order.

    >>> [len(problems(level, "train")) for level in LEVELS]
    [79, 1442, 6475, 3255]
    >>> [len(problems(level, "heldout")) for level in LEVELS]
    [21, 358, 1625, 840]
    """
    return tuple(
        Prompt(id=text, text=text, answer=solve(a, b, level.operator), level=level.name)
        for a, b in _operands(level)
        if _held_out(a, b, level.operator) == (split == "heldout")
        for text in [f"{a:02d}{level.operator}{b:02d}="]
    )


def draw(num_prompts: int, split: Split, *, seed: int) -> list[Prompt]:
    """Problems of all levels in the proportion of their weights; a level that has too few repeats itself.

    Args:
        num_prompts: How many, rounded down to the same number for each unit of weight.
        split: Which of the two.
        seed: Of the draw.
    """
    rng = random.Random(seed)
    share = num_prompts // sum(level.weight for level in LEVELS)
    drawn: list[Prompt] = []
    for level in LEVELS:
        pool, wanted = problems(level, split), share * level.weight
        whole, rest = divmod(wanted, len(pool))
        drawn += [*(pool * whole), *rng.sample(pool, rest)]
    return drawn


def solve(a: int, b: int, operator: Literal["+", "-"], *, forgetful: bool = False) -> str:
    """The answer as the model must write it; the forgetful never carry or borrow.

    >>> solve(27, 48, "+"), solve(27, 48, "+", forgetful=True)
    ('570', '560')
    >>> solve(52, 17, "-"), solve(52, 17, "-", forgetful=True)
    ('530', '540')
    """
    if not forgetful:
        return f"{a + b if operator == '+' else a - b:03d}"[::-1]
    tens, units = zip(divmod(a, 10), divmod(b, 10), strict=True)
    digits = [(x + y if operator == "+" else x - y) % 10 for x, y in (units, tens)]
    return "".join(map(str, digits)) + "0"


def _operands(level: Level) -> Iterator[tuple[int, int]]:
    pairs = set(product(level.left, level.right))
    if level.operator == "+":
        pairs |= {(b, a) for a, b in pairs}
    return iter(sorted(pair for pair in pairs if level.operator == "+" or pair[0] >= pair[1]))


def _held_out(a: int, b: int, operator: str) -> bool:
    key = f"{min(a, b)}{operator}{max(a, b)}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % _HELD_OUT_OF == 0
