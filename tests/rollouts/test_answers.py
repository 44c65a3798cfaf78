"""Answers: who waits for whom, and what order things come back in."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from avspo_lightning.rewards import FunctionReward
from avspo_lightning.rollouts.answers import Answers, answer
from avspo_lightning.types import Completion, Prompt, SamplingParams
from tests.tiny import ScriptedEngine, completion, tiny_tokenizer

PROMPTS = [Prompt(id=f"p{i}", text="", answer=str(10 + i), token_ids=(10 + i,)) for i in range(4)]
PARAMS = SamplingParams(max_tokens=4, num_samples=2)


class OutOfOrder(ScriptedEngine):
    """Finishes the last prompt first, and waits for ``gate`` before the others."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        super().__init__(lambda prompt, j: completion([prompt.token_ids[0], 20 + j]))
        self.gate = gate

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], params: SamplingParams
    ) -> Iterator[tuple[int, list[Completion]]]:
        for i, group in reversed(list(super().generate(prompts, seeds, params))):
            yield i, group
            if self.gate is not None:
                assert self.gate.wait(timeout=30), "nothing was scored while the engine was at work"


def ask(engine: ScriptedEngine, reward: FunctionReward) -> Answers:
    return answer(engine, reward, tiny_tokenizer(), PROMPTS, range(4), PARAMS)


def first_token(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
    assert [p.answer for p in prompts] == [str(c.token_ids[0]) for c in completions]
    return [float(c.token_ids[0] + c.token_ids[1] / 100) for c in completions]


def test_answers_come_back_in_the_order_of_the_prompts() -> None:
    found = ask(OutOfOrder(), FunctionReward(first_token))
    assert found.total.tolist() == [[10 + i + 0.20, 10 + i + 0.21] for i in range(4)]
    assert [[c.text for c in group] for group in found.completions] == [
        [f"w{10 + i} w20", f"w{10 + i} w21"] for i in range(4)
    ]


def test_scoring_starts_while_the_engine_still_draws() -> None:
    gate = threading.Event()

    def reward(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        gate.set()
        return first_token(prompts, completions)

    assert ask(OutOfOrder(gate), FunctionReward(reward)).accuracy[0, 1] == 10.21


def test_an_error_of_the_reward_ends_the_collection() -> None:
    def reward(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        raise RuntimeError("the judge is ill")

    with pytest.raises(RuntimeError, match="the judge is ill"):
        ask(OutOfOrder(), FunctionReward(reward))


def test_the_version_of_the_weights_is_kept() -> None:
    engine = OutOfOrder()
    engine.version = 17
    assert ask(engine, FunctionReward(first_token)).policy_version == 17
