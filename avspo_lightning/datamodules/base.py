"""What every data module of prompts does: tokenise once, draw by a cursor, serve what the rollouts bring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from avspo_lightning.datamodules.cursor import PromptCursor
from avspo_lightning.embedded import model_path
from avspo_lightning.types import EvaluationSet, Prompt, Rollout, RolloutBatch


class PromptDataModule(pl.LightningDataModule, ABC):
    """Prompts for training and evaluation.

    The Trainer does not iterate over prompts but over rollouts: RolloutCallback draws prompts by ``next_prompts`` and,
    by ``connect``, hands over the loaders that this module returns to the Trainer.

    Args:
        tokenizer: Folder or hub id, or ``builtin:NAME``; LightningCLI takes it from the model's.
        seed: Of the order of the prompts.
        max_prompt_tokens: Longer training prompts are dropped and counted.
        trust_remote_code: Run code that comes with the tokenizer.
    """

    def __init__(
        self, tokenizer: str, seed: int = 0, max_prompt_tokens: int = 512, trust_remote_code: bool = False
    ) -> None:
        super().__init__()
        if max_prompt_tokens < 1:
            raise ValueError(f"`max_prompt_tokens` must be at least 1, got {max_prompt_tokens}.")
        self.tokenizer_source = tokenizer
        self.seed = seed
        self.max_prompt_tokens = max_prompt_tokens
        self.trust_remote_code = trust_remote_code
        self._cursor: PromptCursor | None = None
        self._cursor_state: dict[str, int] | None = None
        self._evaluation_sets: list[EvaluationSet] = []
        self._train_loader: Iterable[RolloutBatch] | None = None
        self._evaluate: Callable[[EvaluationSet], Iterable[Rollout]] | None = None

    @abstractmethod
    def train_prompts(self) -> Sequence[Prompt]:
        """Training prompts; ``token_ids`` are filled in later."""

    @abstractmethod
    def evaluation_sets(self) -> Sequence[EvaluationSet]:
        """Held-out prompts with their protocols; ``token_ids`` are filled in later."""

    def prepare_data(self) -> None:
        """Makes a built-in model once per node, for its tokenizer."""
        model_path(self.tokenizer_source)

    def setup(self, stage: str) -> None:
        """Tokenises every prompt."""
        if self._cursor is not None:
            return
        tokenizer = AutoTokenizer.from_pretrained(
            model_path(self.tokenizer_source), trust_remote_code=self.trust_remote_code
        )
        self._evaluation_sets = [
            replace(evaluation, prompts=tuple(tokenized(evaluation.prompts, tokenizer)))
            for evaluation in self.evaluation_sets()
        ]
        prompts = tokenized(self.train_prompts(), tokenizer)
        kept = [prompt for prompt in prompts if len(prompt.token_ids) <= self.max_prompt_tokens]
        if len(kept) < len(prompts):
            rank_zero_info(f"Dropped {len(prompts) - len(kept)} of {len(prompts)} prompts over `max_prompt_tokens`.")
        self._cursor = PromptCursor(kept, seed=self.seed)
        if self._cursor_state is not None:
            self._cursor.load_state_dict(self._cursor_state)

    def next_prompts(self, num_prompts: int) -> list[Prompt]:
        """The next training prompts of all ranks; every rank is given the same ones."""
        assert self._cursor is not None, "setup() comes first"
        return self._cursor.take(num_prompts)

    def connect(
        self, *, train_loader: Iterable[RolloutBatch], evaluate: Callable[[EvaluationSet], Iterable[Rollout]]
    ) -> None:
        """Takes the loaders that RolloutCallback fills."""
        self._train_loader = train_loader
        self._evaluate = evaluate

    def train_dataloader(self) -> Iterable[RolloutBatch]:
        """Micro-batches of the rollouts of an iteration."""
        return _connected(self._train_loader)

    def val_dataloader(self) -> list[Iterable[Rollout]]:
        """One loader of answers per evaluation set."""
        evaluate = _connected(self._evaluate)
        return [evaluate(evaluation) for evaluation in self._evaluation_sets]

    def test_dataloader(self) -> list[Iterable[Rollout]]:
        """The same sets."""
        return self.val_dataloader()

    def predict_dataloader(self) -> list[Iterable[Rollout]]:
        """The same sets."""
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """Where the cursor stands."""
        return {} if self._cursor is None else self._cursor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Moves the cursor, now or when there is one."""
        self._cursor_state = state_dict or None
        if self._cursor is not None and state_dict:
            self._cursor.load_state_dict(state_dict)


def tokenized(prompts: Iterable[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The prompts with their ids, those that have ids unchanged.

    Exactly one BOS where the tokenizer adds one, whether the text (a chat template's, say) begins with it or not.

    Raises:
        ValueError: If a prompt has no token.
    """
    encoded = [p if p.token_ids else replace(p, token_ids=_encode(p.text, tokenizer)) for p in prompts]
    for prompt in encoded:
        if not prompt.token_ids:
            raise ValueError(f"Prompt `{prompt.id}` has no token, its text is {prompt.text!r}; a model needs one.")
    return encoded


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    bos = tokenizer.bos_token
    starts_with_bos = bos is not None and text.startswith(bos)
    ids = tuple(tokenizer.encode(text, add_special_tokens=not starts_with_bos))
    # a tokenizer's template may append EOS as well: a prompt must go on
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id and not _ends_with_eos(text, tokenizer) else ids


def _ends_with_eos(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.eos_token is not None and text.endswith(tokenizer.eos_token)


def _connected(loader: Any) -> Any:
    if loader is None:
        raise MisconfigurationException(
            "This data module serves rollouts, and nothing makes them: add a `RolloutCallback` to the callbacks."
        )
    return loader
