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
    version: int | None = None
    """Of the weights that it holds, set by RolloutCallback; None where it holds none: they are brought anew."""
    max_length: int | None = None
    """Most tokens of prompt and completion together; None: no limit."""
    logprob_tolerance: float = float("inf")
    """Largest mean difference, in nats, between its log-probs and the trainer's for the same tokens and weights."""

    def setup(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Called once, on every rank, before the first use."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], params: SamplingParams
    ) -> Iterable[tuple[int, list[Completion]]]:
        """Samples ``params.num_samples`` completions of each prompt, the j-th of ``prompts[i]`` from ``seeds[i] + j``.

        Ids and log-probs are those that were drawn; ``Completion.text`` may be left empty.

        Yields:
            (i, completions of ``prompts[i]``) as they are finished, in any order.
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes the policy's weights over, as a stream of full tensors with their Hugging Face names.

        Args:
            weights: Must be consumed to its end: under sharding it is collective.
            version: Of the policy; optimizer steps taken.
        """

    def sequence_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Log-probs at temperature 1 of ``token_ids[1:]``, each given all before it, under the weights that it holds.

        RolloutCallback compares them with the trainer's after every synchronisation. None: the engine cannot tell, and
        is trusted.
        """
        return None

    def sleep(self) -> None:
        """Frees what the policy's update needs; called after a collection."""

    def wake(self) -> None:
        """Takes it back; called before the weights are loaded."""

    def teardown(self) -> None:
        """Releases everything; called once, at the end of the run."""

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Refuses prompts that the engine cannot complete, before anything is generated.

        Raises:
            ValueError: If a prompt is empty, or leaves no room for the longest completion.
        """
        for prompt in prompts:
            if not prompt.token_ids:
                raise ValueError(f"Prompt `{prompt.id}` has no token; a model needs one.")
            length = len(prompt.token_ids) + params.max_tokens
            if self.max_length is not None and length > self.max_length:
                raise ValueError(
                    f"Prompt `{prompt.id}` has {len(prompt.token_ids)} tokens; with `max_completion_tokens` ="
                    f" {params.max_tokens} it may grow to {length}, over the {self.max_length} of"
                    f" {type(self).__name__}. Lower `max_completion_tokens` or `max_prompt_tokens`."
                )


def end_of_sequence_ids(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a sequence: those of the generation config, of the model config and of the tokenizer."""
    ids: set[int] = set()
    configs = (getattr(policy, "generation_config", None), policy.config, tokenizer)
    for found in (getattr(config, "eos_token_id", None) for config in configs):
        ids.update([found] if isinstance(found, int) else found or [])
    return frozenset(ids)


def max_positions(policy: PreTrainedModel) -> int | None:
    """Longest sequence that the model is made for; None where its config does not say."""
    return getattr(policy.config.get_text_config(), "max_position_embeddings", None)


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
