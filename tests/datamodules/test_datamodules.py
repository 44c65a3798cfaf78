"""Prompts: tokenised once, drawn in an order that resumes, held out from each other."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers import PreTrainedTokenizerFast

from avspo_lightning.datamodules import (
    ArithmeticDataModule,
    JSONLDataModule,
    MultiplicationDataModule,
    PromptCursor,
    tokenized,
)
from avspo_lightning.types import EvaluationSet, Prompt
from tests.tiny import BOS, EOS, tiny_prompts, tiny_tokenizer


def test_the_cursor_sweeps_over_every_prompt_in_orders_of_its_own() -> None:
    prompts = tiny_prompts(7)
    cursor = PromptCursor(prompts, seed=1)
    sweeps = [[p.id for p in cursor.take(7)] for _ in range(3)]
    assert all(sorted(sweep) == sorted(p.id for p in prompts) for sweep in sweeps)
    assert len({tuple(sweep) for sweep in sweeps}) == 3
    again = PromptCursor(prompts, seed=1)
    assert [p.id for p in again.take(21)] == [*chain(*sweeps)]
    assert [p.id for p in PromptCursor(prompts, seed=2).take(7)] != sweeps[0]


def test_the_cursor_resumes_in_the_middle_of_a_sweep() -> None:
    cursor = PromptCursor(tiny_prompts(7), seed=1)
    cursor.take(10)
    resumed = PromptCursor(tiny_prompts(7), seed=1)
    resumed.load_state_dict(cursor.state_dict())
    assert resumed.take(9) == cursor.take(9)
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptCursor([])


def _with_bos() -> PreTrainedTokenizerFast:
    """A tokenizer that puts BOS before, and EOS behind, whatever it encodes."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    return tokenizer


@pytest.mark.parametrize("text", ["w5 w6", "<bos> w5 w6"])
def test_exactly_one_bos_and_no_end(text: str) -> None:
    (prompt,) = tokenized([Prompt(id="p", text=text, answer="")], _with_bos())
    assert prompt.token_ids == (BOS, 5, 6)


def test_a_chat_marker_at_the_end_is_kept_and_ids_are_not_touched() -> None:
    (prompt,) = tokenized([Prompt(id="p", text="w5 <eos>", answer="")], tiny_tokenizer())
    assert prompt.token_ids == (5, EOS)
    (given,) = tokenized([Prompt(id="p", text="w5", answer="", token_ids=(9, 9))], tiny_tokenizer())
    assert given.token_ids == (9, 9)
    with pytest.raises(ValueError, match=r"`p` has no token"):
        tokenized([Prompt(id="p", text="", answer="")], tiny_tokenizer())


def test_arithmetic_levels_occur_in_their_proportion(tiny_folder: str) -> None:
    data = ArithmeticDataModule(tiny_folder, num_train=900, num_val=90, num_val_samples=4)
    train = data.train_prompts()
    assert Counter(p.level for p in train) == {"add-1x1": 100, "add-2x1": 200, "add-2x2": 300, "sub-2x2": 300}
    greedy, sampled = data.evaluation_sets()
    assert (greedy.name, greedy.num_samples, greedy.temperature) == ("arithmetic", 1, 0.0)
    assert (sampled.name, sampled.num_samples, sampled.temperature) == ("arithmetic_sampled", 4, 1.0)
    assert not {p.text for p in train} & {p.text for p in greedy.prompts}
    other = ArithmeticDataModule(tiny_folder, num_train=900, num_val=90, seed=1)
    assert other.evaluation_sets()[0] == greedy, "what is held out does not depend on the seed"
    assert other.train_prompts() != train
    assert len(data.evaluation_sets()) == 2
    with pytest.raises(ValueError, match="`num_val` must be at least 9"):
        ArithmeticDataModule(tiny_folder, num_val=8)


def test_multiplication_holds_a_pair_out_in_both_orders(tiny_folder: str) -> None:
    data = MultiplicationDataModule(tiny_folder)
    train = {prompt.id: prompt for prompt in data.train_prompts()}
    held_out = {prompt.id: prompt for prompt in data.evaluation_sets()[0].prompts}
    shown = {"3*4", "4*3", "11*6", "6*11", "2*9", "9*2", "8*5", "5*8"}
    everything = {f"{a}*{b}" for a in range(2, 13) for b in range(2, 13)}
    assert train.keys() | held_out.keys() == everything - shown
    assert len(train) + len(held_out) == len(everything) - 8
    mirrored = {"*".join(reversed(name.split("*"))) for name in held_out}
    assert mirrored == held_out.keys()
    assert len(held_out) == 41
    prompt = train.get("7*8") or held_out["7*8"]
    assert prompt.text == "3*4=12\n11*6=66\n2*9=18\n8*5=40\n7*8="
    assert prompt.answer == "56"
    with pytest.raises(ValueError, match="`smallest`"):
        MultiplicationDataModule(tiny_folder, smallest=5, largest=5)


ROWS = [
    {"question": "w3 w4", "gold": "1", "key": "a", "level": 2},
    {"question": "w5", "gold": "", "key": "b", "level": None},
    {"question": " ".join(["w6"] * 30), "gold": "2", "key": "c", "level": 1},
    {"question": "w7 w8", "gold": 3, "key": "d", "level": 1},
]
COLUMNS = {"problem_column": "question", "answer_column": "gold", "id_column": "key"}


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_jsonl(tmp_path: Path, tiny_folder: str, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    lines = "".join(json.dumps({**row, "gold": str(row["gold"])}) + "\n" for row in ROWS).encode()
    path.write_bytes(gzip.compress(lines) if suffix.endswith("gz") else lines)
    data = JSONLDataModule(
        tiny_folder, str(path), val_path=str(path), template="w9 {problem}", max_prompt_tokens=8, name="own", **COLUMNS
    )
    data.setup("fit")
    prompts = data.next_prompts(2)
    assert {p.id: (p.token_ids, p.answer, p.level) for p in prompts} == {
        "a": ((9, 3, 4), "1", "2"),
        "d": ((9, 7, 8), "3", "1"),
    }, "without an answer, or too long: dropped"
    (evaluation,) = data.evaluation_sets()
    assert (evaluation.name, [p.id for p in evaluation.prompts]) == ("own", ["a", "c", "d"])


def test_jsonl_refuses_what_it_cannot_use(tmp_path: Path, tiny_folder: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(ValueError, match=r"`problem_column` = 'problem' is not in .*; its columns are question, gold"):
        JSONLDataModule(tiny_folder, str(path)).setup("fit")
    with pytest.raises(ValueError, match="`val_path` = 'nowhere.jsonl' is no file"):
        JSONLDataModule(tiny_folder, str(path), val_path="nowhere.jsonl")
    with pytest.raises(ValueError, match="`template` must contain '{problem}'"):
        JSONLDataModule(tiny_folder, str(path), template="problem")


def test_the_cursor_of_a_data_module_is_in_its_state(tmp_path: Path, tiny_folder: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": i, "problem": f"w{i + 3}", "answer": "1"}) + "\n" for i in range(9)))

    def fresh() -> JSONLDataModule:
        data = JSONLDataModule(tiny_folder, str(path), seed=5)
        data.setup("fit")
        return data

    data, resumed = fresh(), fresh()
    data.next_prompts(7)
    resumed.load_state_dict(data.state_dict())
    early = JSONLDataModule(tiny_folder, str(path), seed=5)
    early.load_state_dict(data.state_dict())
    early.setup("fit")
    expected = data.next_prompts(7)
    assert resumed.next_prompts(7) == early.next_prompts(7) == expected


def test_a_data_module_needs_a_callback(tiny_folder: str) -> None:
    with pytest.raises(MisconfigurationException, match="RolloutCallback"):
        ArithmeticDataModule(tiny_folder).train_dataloader()


def test_greedy_sets_have_one_answer_per_prompt() -> None:
    with pytest.raises(ValueError, match="`num_samples` = 4 at `temperature` = 0"):
        EvaluationSet(name="held", prompts=(), num_samples=4)
