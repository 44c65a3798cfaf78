from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from avspo_lightning.embedded import model_path
from avspo_lightning.embedded import pretrain as module
from avspo_lightning.embedded.arithmetic import LEVELS, problems, solve
from avspo_lightning.embedded.pretrain import RECIPES, arithmetic_model, pretrain, teach, tokenizer

SHORT = replace(RECIPES["arithmetic-tiny"], num_steps=3, batch_size=4, warmup_steps=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "short", SHORT)
        return arithmetic_model("short", cache_dir=tmp_path_factory.mktemp("cache"))


def weights(model: Qwen2ForCausalLM) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_recipe_alone_decides_the_weights():
    first = weights(pretrain(SHORT))
    torch.manual_seed(99)
    random.seed(99)
    assert torch.equal(weights(pretrain(SHORT)), first)
    assert not torch.equal(weights(pretrain(replace(SHORT, seed=1))), first)
    assert not torch.equal(weights(pretrain(replace(SHORT, num_steps=4))), first)


def test_the_global_random_state_stays_as_it_was():
    before = torch.get_rng_state()  # that of `random` moves in these tests: beartype draws from it
    pretrain(SHORT)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_corpus_holds_training_problems_only_and_forgets_as_often_as_each_level_says():
    rng = random.Random(0)
    trained = {prompt.text: prompt for level in LEVELS for prompt in problems(level, "train")}
    seen, tricky, forgotten = Counter(), Counter(), Counter()
    num_lines = 5_000
    for _ in range(num_lines):
        line = teach(rng)
        prompt, answer = trained[line[:6]], line[6:]
        seen[prompt.level] += 1
        careless = solve(int(line[:2]), int(line[3:5]), line[2], forgetful=True)
        assert answer in (prompt.answer, careless)
        tricky[prompt.level] += careless != prompt.answer
        forgotten[prompt.level] += answer == careless != prompt.answer
    for level in LEVELS:
        assert seen[level.name] / num_lines == pytest.approx(level.weight / 9, abs=0.02)
        assert forgotten[level.name] / tricky[level.name] == pytest.approx(level.forgetting, abs=0.08)


def test_training_teaches_the_form_of_an_answer():
    model = pretrain(replace(RECIPES["arithmetic-tiny"], num_steps=150))
    coder = tokenizer()
    prompts = problems(LEVELS[2], "heldout")[::25]
    ids = torch.tensor([coder.encode(prompt.text + prompt.answer) for prompt in prompts])
    with torch.no_grad():
        probabilities = model(ids).logits.softmax(-1)
    digits = torch.tensor(coder.convert_tokens_to_ids(list("0123456789")))
    assert probabilities[:, 5:7, digits].sum(-1).mean() > 0.95
    assert probabilities[:, 7, coder.convert_tokens_to_ids(["0", "1"])].sum(-1).mean() > 0.9
    assert probabilities[:, 8, coder.eos_token_id].mean() > 0.9


def test_the_folder_is_an_ordinary_model(folder):
    model, coder = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model) is Qwen2ForCausalLM
    assert torch.equal(weights(model), weights(pretrain(SHORT)))
    assert not model.training
    assert model.config.vocab_size == len(coder)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == coder.eos_token_id
    assert model.generation_config.pad_token_id == model.config.pad_token_id == coder.pad_token_id
    assert coder.pad_token_id != coder.eos_token_id
    assert not model.generation_config.do_sample


def test_text_survives_the_tokenizer_one_token_per_character(folder):
    coder = AutoTokenizer.from_pretrained(folder)
    for level in LEVELS:
        prompt = problems(level, "heldout")[-1]
        ids = coder.encode(prompt.text + prompt.answer)
        assert len(ids) == len(prompt.text + prompt.answer)
        assert coder.decode([*ids, coder.eos_token_id, coder.pad_token_id], skip_special_tokens=True) == (
            prompt.text + prompt.answer
        )
    ids = coder.encode("0123456789+-=")
    assert len(set(ids)) == 13
    assert not set(ids) & {coder.eos_token_id, coder.pad_token_id}


def test_a_model_is_made_once_for_each_recipe(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(module, "pretrain", lambda recipe: made.append(recipe) or pretrain(recipe))
    monkeypatch.setitem(RECIPES, "arithmetic", SHORT)
    first = arithmetic_model(cache_dir=tmp_path)
    assert arithmetic_model(cache_dir=tmp_path) == first
    assert made == [SHORT]
    monkeypatch.setitem(RECIPES, "arithmetic", replace(SHORT, seed=1))
    assert arithmetic_model(cache_dir=tmp_path) != first
    assert made == [SHORT, replace(SHORT, seed=1)]


def test_builtin_names_lead_to_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AVSPO_CACHE", str(tmp_path))
    monkeypatch.setitem(RECIPES, "arithmetic", SHORT)
    assert Path(model_path("builtin:arithmetic")).parent == tmp_path
    assert model_path("some/hub-id") == "some/hub-id"
    with pytest.raises(ValueError, match=r"`builtin:large` .*arithmetic-tiny"):
        model_path("builtin:large")
