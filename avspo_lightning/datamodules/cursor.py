"""The order in which prompts are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from avspo_lightning.seeds import derive_seed
from avspo_lightning.types import Prompt


class PromptCursor:
    """Draws prompts without end: every sweep visits each once, in an order of its own.

    The order depends on the seed and the sweep alone, so the position is the whole state.

    Args:
        prompts: At least one.
        seed: Of the order.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0) -> None:
        if not prompts:
            raise ValueError("`prompts` must hold at least one prompt, got none.")
        self.prompts = tuple(prompts)
        self.seed = seed
        self.position = 0
        self._sweep = -1
        self._order: list[int] = []

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts."""
        taken = [self._at(self.position + i) for i in range(num_prompts)]
        self.position += num_prompts
        return taken

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on from a saved position."""
        self.position = state_dict["position"]

    def _at(self, position: int) -> Prompt:
        sweep, offset = divmod(position, len(self.prompts))
        if sweep != self._sweep:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "sweep", sweep))
            self._sweep, self._order = sweep, torch.randperm(len(self.prompts), generator=generator).tolist()
        return self.prompts[self._order[offset]]
