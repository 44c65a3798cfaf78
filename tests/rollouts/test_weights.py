"""Weights by their checkpoint names, whatever wraps the policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from avspo_lightning.rollouts import named_weights
from tests.tiny import tiny_model

peft = pytest.importorskip("peft")


def untied(seed: int = 0) -> nn.Module:
    return tiny_model(seed, tie_word_embeddings=False)


def lora(model: nn.Module, **options: object) -> nn.Module:
    """With an update that is not zero."""
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj", "embed_tokens"], **options})
    wrapped = peft.get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return wrapped


def test_names_are_those_of_the_checkpoint_and_tied_weights_come_once() -> None:
    tied, separate = dict(named_weights(tiny_model())), dict(named_weights(untied()))
    assert "lm_head.weight" not in tied
    assert set(separate) == {*tied, "lm_head.weight"} == set(untied().state_dict())
    assert not any(weight.requires_grad for weight in separate.values())


def test_wrappers_leave_no_trace_in_the_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = tiny_model()
    names = [name for name, _ in named_weights(model)]
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert [name for name, _ in named_weights(torch.compile(model))] == names


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"lora_alpha": 32}], ids=str)
def test_lora_is_merged_without_touching_the_base(options: dict[str, object]) -> None:
    wrapped = lora(untied(), **options)
    before = {name: parameter.clone() for name, parameter in wrapped.named_parameters()}
    found = {name: weight.clone() for name, weight in named_weights(wrapped)}
    assert all(torch.equal(before[name], parameter) for name, parameter in wrapped.named_parameters())
    assert list(found) == [name for name, _ in named_weights(untied())]

    plain = untied(seed=1)
    plain.load_state_dict(found, strict=False)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        merged = wrapped.merge_and_unload()
        torch.testing.assert_close(plain(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(plain(ids).logits, untied()(ids).logits, atol=1e-2), "the update counts"


def test_weights_are_made_one_at_a_time() -> None:
    stream = named_weights(lora(untied()))
    name, weight = next(stream)
    assert name == "model.embed_tokens.weight"
    assert weight.shape == (64, 32)


@pytest.mark.parametrize("kind", ["DoRA", "IA3"])
def test_other_adapters_are_refused(kind: str) -> None:
    targets = {"target_modules": ["q_proj"]}
    config = peft.IA3Config(**targets, feedforward_modules=[])
    if kind == "DoRA":
        config = peft.LoraConfig(**targets, use_dora=True)
    with pytest.raises(ValueError, match="LoRA"):
        list(named_weights(peft.get_peft_model(tiny_model(), config)))
