"""The embedded task as a data module."""

from __future__ import annotations

from collections.abc import Sequence

from avspo_lightning.datamodules.base import PromptDataModule
from avspo_lightning.embedded.arithmetic import draw
from avspo_lightning.types import EvaluationSet, Prompt


class ArithmeticDataModule(PromptDataModule):
    """Sums and differences of two-digit numbers; see ``avspo_lightning.embedded.arithmetic``.

    Args:
        tokenizer: See PromptDataModule.
        num_train: Training prompts; the levels occur 1 : 2 : 3 : 3.
        num_val: Held-out prompts, in the same proportion, answered greedily; set ``arithmetic``.
        num_val_samples: If above 1, the held-out prompts are also answered as often at temperature 1; set
            ``arithmetic_sampled``.
        seed: See PromptDataModule.
        max_prompt_tokens: See PromptDataModule.
        trust_remote_code: See PromptDataModule.
    """

    def __init__(
        self,
        tokenizer: str,
        num_train: int = 9000,
        num_val: int = 900,
        num_val_samples: int = 1,
        seed: int = 0,
        max_prompt_tokens: int = 512,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(tokenizer, seed, max_prompt_tokens, trust_remote_code)
        for name, value in {"num_train": num_train, "num_val": num_val}.items():
            if value < 9:
                raise ValueError(f"`{name}` must be at least 9, for one prompt of the rarest level, got {value}.")
        if num_val_samples < 1:
            raise ValueError(f"`num_val_samples` must be at least 1, got {num_val_samples}.")
        self.num_train = num_train
        self.num_val = num_val
        self.num_val_samples = num_val_samples

    def train_prompts(self) -> Sequence[Prompt]:
        """Problems of the training split."""
        return draw(self.num_train, "train", seed=self.seed)

    def evaluation_sets(self) -> Sequence[EvaluationSet]:
        """Problems of the held-out split: the same ones whatever the seed of the run."""
        prompts = tuple(draw(self.num_val, "heldout", seed=0))
        sets = [EvaluationSet(name="arithmetic", prompts=prompts)]
        if self.num_val_samples > 1:
            sampled = EvaluationSet(
                name="arithmetic_sampled", prompts=prompts, num_samples=self.num_val_samples, temperature=1.0
            )
            sets.append(sampled)
        return sets
