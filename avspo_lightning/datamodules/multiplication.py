"""Products of small numbers, asked of a language model by example."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from avspo_lightning.datamodules.base import PromptDataModule
from avspo_lightning.seeds import derive_seed
from avspo_lightning.types import EvaluationSet, Prompt

_EXAMPLES = ((3, 4), (11, 6), (2, 9), (8, 5))
_HELD_OUT_OF = 3  # one pair in three


class MultiplicationDataModule(PromptDataModule):
    """``a*b=`` behind four solved examples, one to a line; the answer ends with its line.

    A third of the pairs is held out, a*b together with b*a, by a hash of the pair; the pairs of the examples are asked
    in neither split. Set ``rollout.stop`` to a newline and the reward to exact match.

    Args:
        tokenizer: See PromptDataModule.
        smallest: Smallest factor.
        largest: Largest factor.
        seed: See PromptDataModule.
        max_prompt_tokens: See PromptDataModule.
        trust_remote_code: See PromptDataModule.
    """

    def __init__(
        self,
        tokenizer: str,
        smallest: int = 2,
        largest: int = 12,
        seed: int = 0,
        max_prompt_tokens: int = 512,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(tokenizer, seed, max_prompt_tokens, trust_remote_code)
        if not 0 <= smallest < largest:
            raise ValueError(f"`smallest` must be at least 0 and below `largest`, got {smallest} and {largest}.")
        self.factors = range(smallest, largest + 1)

    def train_prompts(self) -> Sequence[Prompt]:
        """The pairs that are not held out."""
        return self._prompts(held_out=False)

    def evaluation_sets(self) -> Sequence[EvaluationSet]:
        """The held-out pairs, answered greedily; set ``multiplication``."""
        return [EvaluationSet(name="multiplication", prompts=tuple(self._prompts(held_out=True)))]

    def _prompts(self, *, held_out: bool) -> list[Prompt]:
        examples = "".join(f"{a}*{b}={a * b}\n" for a, b in _EXAMPLES)
        shown = {frozenset(pair) for pair in _EXAMPLES}
        return [
            Prompt(id=f"{a}*{b}", text=f"{examples}{a}*{b}=", answer=str(a * b))
            for a, b in product(self.factors, repeat=2)
            if frozenset((a, b)) not in shown and _held_out(a, b) == held_out
        ]


def _held_out(a: int, b: int) -> bool:
    return derive_seed("times", min(a, b), max(a, b)) % _HELD_OUT_OF == 0
