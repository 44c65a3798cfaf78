"""A language model of a few thousand weights, its tokenizer, and engines that follow a script."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from avspo_lightning.rollouts import HFEngine, RolloutEngine
from avspo_lightning.types import Completion, Prompt, SamplingParams

VOCAB = 64
PAD, BOS, EOS = 0, 1, 2


def tiny_config(**overrides: object) -> LlamaConfig:
    options: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    return LlamaConfig(**{**options, **overrides})


def tiny_model(seed: int = 0, **overrides: object) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config(**overrides))
        for parameter in model.parameters():  # spread out, so that the distribution is far from uniform
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.3)
        return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, VOCAB))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


def save_tiny(folder: Path, seed: int = 0, **overrides: object) -> str:
    tiny_model(seed, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def tiny_prompts(num_prompts: int = 16, seed: int = 0) -> list[Prompt]:
    """Prompts of three to six words; the answer is the parity of the first."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for i in range(num_prompts):
        length = int(torch.randint(3, 7, (1,), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        text = " ".join(f"w{token}" for token in ids)
        prompts.append(Prompt(id=f"p{i}", text=text, answer=str(ids[0] % 2), level="even" if i % 2 else "odd"))
    return prompts


def parity_reward(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
    """1 where the first sampled token has the parity of the answer: learnable, and mixed at random weights."""
    return [float(str(c.token_ids[0] % 2) == p.answer) for p, c in zip(prompts, completions, strict=True)]


class ScriptedEngine(RolloutEngine):
    """Answers each prompt with what a function of (prompt, sample index) gives."""

    def __init__(self, script: Callable[[Prompt, int], Completion]) -> None:
        self.script = script
        self.versions: list[int] = []
        self.names: list[str] = []
        self.seeds: list[list[int]] = []

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], params: SamplingParams
    ) -> Iterator[tuple[int, list[Completion]]]:
        self.seeds += [[seed + j for j in range(params.num_samples)] for seed in seeds]
        for i, prompt in enumerate(prompts):
            yield i, [self.script(prompt, j) for j in range(params.num_samples)]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.names = [name for name, _ in weights]
        self.versions.append(version)


class CopyEngine(HFEngine):
    """Generates with a copy of the policy, which lags behind where ``corrupt`` changes a weight on its way."""

    shares_policy = False
    logprob_tolerance = 1e-5

    def __init__(self, corrupt: Callable[[int, Tensor], Tensor] = lambda version, weight: weight) -> None:
        super().__init__()
        self.corrupt = corrupt
        self.torn_down = 0

    def setup(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().setup(copy.deepcopy(policy), tokenizer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        state = {name: self.corrupt(version, weight) for name, weight in weights}
        self._policy.load_state_dict(state, strict=False)

    def sequence_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            logprobs = self._policy(ids).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()

    def teardown(self) -> None:
        self.torn_down += 1


def completion(ids: Sequence[int], *, logprob: float = -1.0, truncated: bool = False, text: str = "") -> Completion:
    return Completion(
        token_ids=tuple(ids),
        logprobs=(logprob,) * len(ids),
        finish_reason="length" if truncated else "stop",
        text=text,
    )
