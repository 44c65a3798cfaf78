"""The policy's weights as engines load them: under the names of its checkpoint, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# What wrappers put between the names of modules: torch.compile, activation checkpointing, FSDP.
_WRAPPERS = re.compile(r"\b_(orig_mod|checkpoint_wrapped_module|fsdp_wrapped_module)\.")
_PEFT = "base_model.model."


@torch.no_grad()
def named_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every weight, lazily, so that one merged tensor is alive at a time.

    Tied weights come once, under the name of the embedding. Of a layer with LoRA adapters comes the sum of base weight
    and scaled update, made anew from the base weight, which itself is never changed: merging and unmerging in place
    would add a rounding error with every synchronisation.

    Args:
        policy: A causal LM of transformers, or peft's wrapper of one with LoRA adapters.

    Raises:
        ValueError: If an adapter is not a sum of weights (DoRA), or of another kind than LoRA.
    """
    merged = {f"{name}.base_layer.": module for name, module in policy.named_modules() if hasattr(module, "lora_A")}
    adapter = tuple(f"{layer.removesuffix('base_layer.')}lora_" for layer in merged)
    for name, parameter in policy.named_parameters():
        if adapter and name.startswith(adapter):
            continue
        layer = next((layer for layer in merged if name.startswith(layer)), None)
        weight = parameter.detach()
        if layer is not None and name == f"{layer}weight":
            weight = _merged(name, weight, merged[layer])
        yield _checkpoint_name(name), weight


def _merged(name: str, weight: Tensor, layer: Any) -> Tensor:
    total = weight.clone()
    for active in layer.active_adapters:
        if active in getattr(layer, "lora_variant", {}):
            raise ValueError(
                f"The adapter {active!r} of `{name}` is not a plain LoRA (DoRA, say): it is no sum of weights that an"
                " engine could be given. Use LoRA without variants."
            )
        if active in layer.scaling:
            total += layer.get_delta_weight(active).to(total)
    return total


def _checkpoint_name(name: str) -> str:
    name = _WRAPPERS.sub("", name)
    if not name.startswith(_PEFT):
        return name
    name = name.removeprefix(_PEFT).replace(".base_layer.", ".")
    if re.search(r"\.(original_module|modules_to_save|token_adapter|ia3_|oft_|vera_|hada_|lokr_)", name):
        raise ValueError(f"`{name}` belongs to an adapter that is no LoRA; engines are given plain and LoRA weights.")
    return name
