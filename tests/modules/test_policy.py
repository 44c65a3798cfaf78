"""Log-probs of completion tokens: right at any padding, temperature and output head, and never [R, T, V] at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GPT2Config, GraniteConfig, PreTrainedModel

from avspo_lightning.modules import completion_statistics
from avspo_lightning.modules.policy import freeze, load_policy
from avspo_lightning.rollouts import to_batch
from avspo_lightning.types import Prompt, RolloutBatch, SamplingParams
from tests.tiny import completion, tiny_config, tiny_model

PROMPTS = [(3, 4, 5), (6, 7, 8, 9, 10, 11, 12), tuple(range(20, 32))]
COMPLETIONS = [(13, 14), (15, 16, 17, 18, 2), (19,)]


def batch(rows: list[int], *, temperature: float = 1.0) -> RolloutBatch:
    return to_batch(
        [Prompt(id=str(i), text="", answer="", token_ids=PROMPTS[i]) for i in rows],
        [[completion(COMPLETIONS[i])] for i in rows],
        rewards=torch.zeros(len(rows), 1),
        advantages=torch.zeros(len(rows), 1),
        sampling=SamplingParams(max_tokens=8, temperature=temperature),
    )


def padded(rows: RolloutBatch, columns: int) -> RolloutBatch:
    def pad(value: torch.Tensor, *, left: bool) -> torch.Tensor:
        return torch.nn.functional.pad(value, (columns, 0) if left else (0, columns))

    left = {name: pad(getattr(rows, name), left=True) for name in ("prompt_ids", "prompt_mask")}
    right = {
        name: pad(getattr(rows, name), left=False)
        for name in ("completion_ids", "completion_mask", "loss_mask", "rollout_logprobs")
    }
    return replace(rows, **left, **right)


@torch.no_grad()
def by_hand(model: PreTrainedModel, row: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of one completion in float64, from a forward of its own."""
    ids = torch.tensor([PROMPTS[row] + COMPLETIONS[row]])
    logits = model(ids).logits[0].double()
    start = len(PROMPTS[row])
    logprobs = torch.log_softmax(logits[start - 1 : -1] / temperature, dim=-1)
    picked = torch.stack([logprobs[t, token] for t, token in enumerate(COMPLETIONS[row])])
    return picked, -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_against_a_forward_for_each_row(temperature: float) -> None:
    model = tiny_model()
    statistics = completion_statistics(model, batch([0, 1, 2], temperature=temperature))
    for row, tokens in enumerate(COMPLETIONS):
        logprobs, entropy = by_hand(model, row, temperature)
        found = statistics.logprobs[row, : len(tokens)].double()
        torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(statistics.entropy[row, : len(tokens)].double(), entropy, atol=1e-5, rtol=0)
        assert statistics.logprobs[row, len(tokens) :].eq(0).all()


def test_padding_and_batch_mates_change_nothing() -> None:
    model = tiny_model()
    together = completion_statistics(model, batch([0, 1, 2])).logprobs
    wider = completion_statistics(model, padded(batch([0, 1, 2]), 5)).logprobs
    for row, tokens in enumerate(COMPLETIONS):
        alone = completion_statistics(model, batch([row])).logprobs[0]
        torch.testing.assert_close(together[row, : len(tokens)], alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(wider[row, : len(tokens)], alone, atol=1e-5, rtol=0)


def test_backward_reaches_every_weight_at_another_temperature() -> None:
    model = tiny_model()
    completion_statistics(model, batch([0, 1, 2], temperature=0.5)).logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES = {
    "soft-capped (Gemma 2)": Gemma2Config(
        **SMALL, num_key_value_heads=2, head_dim=16, final_logit_softcapping=2.0, sliding_window=64
    ),
    "scaled (Cohere)": CohereConfig(**SMALL, num_key_value_heads=2, logit_scale=0.25),
    "divided (Granite)": GraniteConfig(**SMALL, num_key_value_heads=2, logits_scaling=4.0),
    "learned positions (GPT-2)": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64),
}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
def test_output_heads_of_other_families(config: object) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    statistics = completion_statistics(model, batch([0, 1, 2]))
    for row, tokens in enumerate(COMPLETIONS):
        logprobs, _ = by_hand(model, row, 1.0)
        torch.testing.assert_close(statistics.logprobs[row, : len(tokens)].double(), logprobs, atol=1e-5, rtol=0)


def test_dropout_is_off_even_in_training_mode() -> None:
    options = {"dtype": torch.float32, "attention": None, "trust_remote_code": False}
    noisy = load_policy(tiny_config(attention_dropout=0.5), **options).train()
    rows = batch([0, 1, 2])
    assert torch.equal(completion_statistics(noisy, rows).logprobs, completion_statistics(noisy, rows).logprobs)
    torch.manual_seed(0)
    gpt = load_policy(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64), **options).train()
    assert torch.equal(completion_statistics(gpt, rows).logprobs, completion_statistics(gpt, rows).logprobs)


def test_freeze() -> None:
    model = tiny_model()
    freeze(model, [r"layers\.0\.", "embed_tokens"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {
        name for name, _ in model.named_parameters() if "layers.1." in name or name == "model.norm.weight"
    }
    with pytest.raises(ValueError, match="'nowhere' matches no parameter"):
        freeze(model, ["nowhere"])
    with pytest.raises(ValueError, match="leaves no parameter"):
        freeze(model, ["."])
