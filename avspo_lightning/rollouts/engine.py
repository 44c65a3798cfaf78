"""The contract of a rollout engine, and the one decision that all engines share: which tokens end a completion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from avspo_lightning.types import Completion, Prompt, SamplingParams


class RolloutEngine(ABC):
    """Samples completions from the current policy."""

    shares_policy: bool = False
    """True where the engine generates with the trained module itself, so that no weights need to travel."""

    def setup(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Called once, on every rank, before the first use."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        """Samples ``len(seeds[i])`` completions of ``prompts[i]``, the j-th from ``seeds[i][j]`` alone.

        Ids and log-probs are those that were drawn; ``Completion.text`` may be left empty.
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes the policy's weights over, as a stream of full tensors with their Hugging Face names.

        Args:
            weights: Must be consumed to its end: under sharding it is collective.
            version: Number of the policy, rising by one with every synchronisation.
        """

    def sleep(self) -> None:
        """Frees what the policy's update needs; called after a collection."""

    def wake(self) -> None:
        """Takes it back; called before the weights are loaded."""

    def teardown(self) -> None:
        """Releases everything; called once, at the end of the run."""


def end_of_sequence_ids(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a sequence: those of the generation config, of the model config and of the tokenizer."""
    ids: set[int] = set()
    configs = (getattr(policy, "generation_config", None), policy.config, tokenizer)
    for found in (getattr(config, "eos_token_id", None) for config in configs):
        ids.update([found] if isinstance(found, int) else found or [])
    return frozenset(ids)


def tokens_containing(stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the vocabulary whose text contains one of the strings, so that a stop needs no decoding.

    Raises:
        ValueError: If no token contains one of the strings.
    """
    if not stop:
        return ()
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    for string in stop:
        if not any(string in text for text in texts):
            raise ValueError(f"`stop` holds {string!r}, which no single token of the vocabulary contains.")
    return tuple(i for i, text in enumerate(texts) if any(string in text for string in stop))
