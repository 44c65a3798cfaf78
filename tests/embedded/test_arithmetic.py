from __future__ import annotations

from collections import Counter

import pytest

from avspo_lightning.embedded.arithmetic import LEVELS, draw, problems, solve

EVERY = [(level, prompt) for level in LEVELS for split in ("train", "heldout") for prompt in problems(level, split)]


def operands(text: str) -> tuple[int, str, int]:
    return int(text[:2]), text[2], int(text[3:5])


def test_every_problem_occurs_once_and_its_answer_is_right():
    assert Counter(level.name for level, _ in EVERY) == {
        "add-1x1": 100,
        "add-2x1": 1800,
        "add-2x2": 8100,
        "sub-2x2": 4095,
    }
    assert len({prompt.id for _, prompt in EVERY}) == len(EVERY)
    for level, prompt in EVERY:
        a, operator, b = operands(prompt.text)
        assert prompt.level == level.name
        assert prompt.text == f"{a:02d}{operator}{b:02d}="
        assert len(prompt.answer) == 3
        assert int(prompt.answer[::-1]) == {"+": a + b, "-": a - b}[operator]


def test_neither_a_held_out_problem_nor_its_mirror_image_is_trained_on():
    trained = {operands(prompt.text) for level in LEVELS for prompt in problems(level, "train")}
    held_out = {operands(prompt.text) for level in LEVELS for prompt in problems(level, "heldout")}
    assert not trained & held_out
    assert not trained & {(b, operator, a) for a, operator, b in held_out}


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_a_fifth_is_held_out(level):
    held_out, trained = len(problems(level, "heldout")), len(problems(level, "train"))
    assert held_out / (held_out + trained) == pytest.approx(0.2, abs=0.015)


@pytest.mark.parametrize(
    ("a", "operator", "b", "right", "forgetful"),
    [
        (3, "+", 4, "700", "700"),
        (7, "+", 5, "210", "200"),
        (99, "+", 99, "891", "880"),
        (50, "+", 50, "001", "000"),
        (40, "-", 40, "000", "000"),
        (50, "-", 17, "330", "340"),
        (52, "-", 47, "500", "510"),
    ],
)
def test_answers_worked_by_hand(a, operator, b, right, forgetful):
    assert solve(a, b, operator) == right
    assert solve(a, b, operator, forgetful=True) == forgetful


def test_the_forgetful_are_wrong_exactly_where_something_is_carried_or_borrowed():
    for _, prompt in EVERY:
        a, operator, b = operands(prompt.text)
        simple = a % 10 + b % 10 < 10 and a + b < 100 if operator == "+" else a % 10 >= b % 10
        assert (solve(a, b, operator, forgetful=True) == prompt.answer) == simple, prompt.text


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_draw_holds_each_level_by_its_weight_and_repeats_only_what_runs_out(split):
    drawn = draw(905, split, seed=3)
    assert Counter(prompt.level for prompt in drawn) == {"add-1x1": 100, "add-2x1": 200, "add-2x2": 300, "sub-2x2": 300}
    occurrences = Counter(prompt.text for prompt in drawn)
    for level in LEVELS:
        pool = [prompt.text for prompt in problems(level, split)]
        times = [occurrences[text] for text in pool]
        assert sum(times) == 100 * level.weight
        assert max(times) - min(times) == 1


def test_a_draw_depends_on_its_seed_alone():
    assert draw(90, "train", seed=0) == draw(90, "train", seed=0)
    assert draw(90, "train", seed=0) != draw(90, "train", seed=1)
