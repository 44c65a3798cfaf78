"""The collector: who is scored against what, which groups count, and in which order things happen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from avspo_lightning import AVSPO, GRPO, AdaptiveThreshold, AdvantageCollapseRate, WeightedSumReward
from avspo_lightning.functional import avspo_advantages, group_advantages, policy_loss
from avspo_lightning.rewards import FunctionReward
from avspo_lightning.rollouts import Collector, FilterDrop, KeepAll, Topology
from avspo_lightning.types import Completion, EvaluationSet, Prompt, Rollout, SamplingParams
from tests.tiny import ScriptedEngine, completion, tiny_tokenizer

G = 4


def prompts(num_prompts: int) -> list[Prompt]:
    return [
        Prompt(id=f"p{i}", text=f"w{10 + i}", answer=f"w{10 + i}", token_ids=(10 + i,), level=f"level{i % 2}")
        for i in range(num_prompts)
    ]


def table(rewards: list[list[float | None]]) -> tuple[ScriptedEngine, FunctionReward]:
    """An engine whose j-th completion of prompt i earns ``rewards[i][j]``; the token carries both indices."""

    def script(prompt: Prompt, j: int) -> Completion:
        return completion([10 + G * int(prompt.id[1:]) + j, 2])

    def reward(prompts: list[Prompt], completions: list[Completion]) -> list[float | None]:
        indices = [divmod(c.token_ids[0] - 10, G) for c in completions]
        assert [f"p{i}" for i, _ in indices] == [p.id for p in prompts]
        return [rewards[i][j] for i, j in indices]

    return ScriptedEngine(script), FunctionReward(reward)


def collector(**options: Any) -> Collector:
    defaults: dict[str, Any] = {
        "estimator": AVSPO(),
        "threshold": AdaptiveThreshold(),
        "sampler": KeepAll(),
        "collapse_rate": AdvantageCollapseRate(sync_on_compute=False),
        "tokenizer": tiny_tokenizer(),
        "group_size": G,
        "sampling": SamplingParams(max_tokens=4),
    }
    return Collector(**{**defaults, **options})


def collect(rewards: list[list[float | None]], **options: Any) -> Rollout:
    engine, reward = table(rewards)
    return collector(engine=engine, reward=reward, **options).collect(prompts(len(rewards)), iteration=0)


MIXED, RIGHT, WRONG = [1.0, 0.0, 1.0, 0.0], [1.0] * 4, [0.0] * 4


def on_ranks(world_size: int, work: Callable[[Topology], Rollout]) -> list[Rollout]:
    """Runs ``work`` on as many threads, whose gathers meet each other."""
    barrier, slots, results = threading.Barrier(world_size), [None] * world_size, [None] * world_size

    def run(rank: int) -> None:
        def gather(local: Tensor) -> Tensor:
            slots[rank] = local
            barrier.wait(timeout=30)
            stacked = torch.stack(slots)
            barrier.wait(timeout=30)
            return stacked

        results[rank] = work(Topology(rank=rank, world_size=world_size, all_gather=gather))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_answer_is_scored_against_its_own_prompt(world_size: int) -> None:
    """The engine echoes the prompt; two prompts are the same text and stay two groups."""
    asked = [*prompts(5), replace(prompts(1)[0], id="twin")]
    engine = ScriptedEngine(lambda prompt, j: completion([prompt.token_ids[0], 2]))

    def echoed(prompts: list[Prompt], completions: list[Completion]) -> list[float]:
        return [float(c.text == p.answer) for p, c in zip(prompts, completions, strict=True)]

    def work(topology: Topology) -> Rollout:
        made = collector(engine=engine, reward=FunctionReward(echoed), topology=topology)
        return made.collect(asked, iteration=0)

    rollouts = on_ranks(world_size, work)
    assert all(rollout.rewards.eq(1).all() for rollout in rollouts)
    assert [p.id for rollout in rollouts for p in rollout.prompts] == [
        p.id for rank in range(world_size) for p in asked[rank::world_size]
    ]
    assert {rollout.collapse.num_groups for rollout in rollouts} == {6}
    assert len({seed for row in engine.seeds for seed in row}) == 6 * G, "no two completions share a seed"


def test_ranks_see_the_whole_and_keep_their_share() -> None:
    rewards = [MIXED, WRONG, RIGHT, WRONG, MIXED, RIGHT]
    whole = collect(rewards)
    engine, reward = table(rewards)

    def work(topology: Topology) -> Rollout:
        return collector(engine=engine, reward=reward, topology=topology).collect(prompts(6), iteration=0)

    for rank, rollout in enumerate(on_ranks(2, work)):
        assert rollout.collapse == whole.collapse
        assert torch.equal(rollout.advantages, whole.advantages[rank::2])
        metrics = {k: v for k, v in rollout.metrics.items() if not k.startswith("time/")}
        assert metrics == {k: v for k, v in whole.metrics.items() if not k.startswith("time/")}


def test_acr_decides_with_the_tau_of_this_iteration_and_moves_it_for_the_next() -> None:
    threshold = AdaptiveThreshold(init=0.5)
    engine, reward = table([RIGHT, WRONG, RIGHT, MIXED])
    made = collector(engine=engine, reward=reward, threshold=threshold)
    first = made.collect(prompts(4), iteration=0)
    assert first.collapse.tau == 0.5
    assert threshold.compute() == 0.5, "the first iteration has no reward before it"
    made.engine, made.reward = table([RIGHT, RIGHT, RIGHT, MIXED])
    second = made.collect(prompts(4), iteration=1)
    assert second.collapse.tau == 0.5
    assert threshold.compute() == pytest.approx(0.5 + 0.01 * (0.75 - 0.5))
    assert second.collapse.acr_cumulative == 0.75


def test_summary_of_collapse() -> None:
    summary = collect([RIGHT, WRONG, WRONG, MIXED, [None] * 4, [None, None, None, 1.0]]).collapse
    assert (summary.num_groups, summary.num_unscorable) == (4, 2)
    assert (summary.acr, summary.acr_all_right, summary.acr_all_wrong) == (0.75, 0.25, 0.5)
    assert summary.acr_effective == 0
    assert summary.triggered
    assert summary.num_virtual == 4
    assert summary.acr_by_level == {"level0": 1.0, "level1": 0.5}
    plain = collect([RIGHT, WRONG, WRONG, MIXED], estimator=GRPO()).collapse
    assert (plain.acr_effective, plain.num_virtual, plain.triggered) == (0.75, 0, False)
    half = collect([RIGHT, WRONG, WRONG, MIXED], estimator=AVSPO(augment="wrong")).collapse
    assert half.acr_effective == 0.25


def test_advantages_are_the_functions_of_the_rewards() -> None:
    rewards = [RIGHT, WRONG, MIXED, [1.0, None, 0.0, 0.0]]
    found = collect(rewards, threshold=AdaptiveThreshold(init=0.3))
    assert torch.equal(found.advantages, avspo_advantages(rewards, threshold=0.3))
    assert torch.equal(collect(rewards, estimator=GRPO()).advantages, group_advantages(rewards))
    assert found.batch.advantages.dtype == torch.float32
    torch.testing.assert_close(found.batch.advantages.double(), found.advantages.flatten(), atol=1e-7, rtol=1e-7)


def test_unscored_answers_teach_nothing() -> None:
    found = collect([[1.0, None, 0.0, 0.0], [None] * 4, [None, None, None, 1.0]])
    assert found.advantages[0, 1] == 0
    has_loss = found.batch.loss_mask.any(-1).reshape(3, 4)
    assert has_loss.tolist() == [[True, False, True, True], [False] * 4, [False] * 4]
    assert found.metrics["reward/mean"] == 0.5
    assert found.metrics["reward/unscorable"] == pytest.approx(8 / 12)


def test_collapse_is_measured_on_accuracy_unless_told_otherwise() -> None:
    engine, accuracy = table([[1.0, 0.0, 1.0, 0.0], [1.0] * 4])
    _, other = table([[0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]])
    reward = WeightedSumReward([accuracy, other], [1.0, 1.0])

    def summary(collapse_on: str) -> list[float]:
        made = collector(engine=engine, reward=reward, collapse_on=collapse_on)
        found = made.collect(prompts(2), iteration=0).collapse
        return [found.acr, found.acr_all_right, found.acr_all_wrong]

    assert summary("accuracy") == [0.5, 0.5, 0.0]
    assert summary("total") == [0.5, 0.5, 0.0]
    only_first = collector(engine=engine, reward=reward, collapse_on="total").collect(prompts(1), iteration=0)
    assert only_first.collapse.acr == 1.0, "the parts cancel"
    assert only_first.rewards.tolist() == [[1.0] * 4]


def test_collapsed_groups_count_in_the_denominator_unless_dropped() -> None:
    """GRPO by hand: with two tokens a row, the gradient of a token is - advantage / 2 / rows."""
    rewards = [[1.0, 0.0, 0.0, 0.0], WRONG, RIGHT, [1.0, 1.0, 1.0, 0.0]]
    kept = collect(rewards, estimator=GRPO(), sampler=KeepAll()).batch
    dropped = collect(rewards, estimator=GRPO(), sampler=FilterDrop()).batch
    assert (int(kept.loss_mask.sum()), int(dropped.loss_mask.sum())) == (32, 16)
    logprobs = torch.randn(16, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for batch, num_rows in ((kept, 16), (dropped, 8)):
        leaf = logprobs.clone().requires_grad_()
        policy_loss(leaf, None, batch.advantages, batch.loss_mask).loss.backward()
        by_hand = -batch.advantages.double()[:, None].expand(16, 2) / 2 / num_rows
        torch.testing.assert_close(leaf.grad, by_hand, atol=1e-12, rtol=1e-12)
    nothing = collect([WRONG, RIGHT], estimator=GRPO(), sampler=FilterDrop()).batch
    assert not nothing.loss_mask.any()
    augmented = collect([WRONG, RIGHT], sampler=FilterDrop()).batch
    assert augmented.loss_mask.all(), "with virtual samples they are collapsed no more"


@pytest.mark.parametrize(("truncated", "loss_rows", "mean"), [("keep", 4, 0.5), ("mask", 2, 0.5), ("exclude", 2, 0.0)])
def test_truncated_completions(truncated: str, loss_rows: int, mean: float) -> None:
    """Of the four, the two right ones were cut."""
    engine, reward = table([MIXED])
    engine.script = lambda prompt, j: completion([10 + j, 3], truncated=j % 2 == 0)
    found = collector(engine=engine, reward=reward, truncated=truncated).collect(prompts(1), iteration=0)
    assert found.batch.loss_mask.any(-1).sum() == loss_rows
    assert found.metrics["reward/mean"] == mean
    assert found.metrics["completion/truncated"] == 0.5


def test_seeds_name_iteration_prompt_and_sample() -> None:
    engine, reward = table([MIXED, MIXED])
    made = collector(engine=engine, reward=reward, seed=3)
    made.collect(prompts(2), iteration=0)
    made.collect(prompts(2), iteration=1)
    made.collect(prompts(2), iteration=0)
    first, second, again = engine.seeds[:2], engine.seeds[2:4], engine.seeds[4:]
    assert first == again
    assert len({seed for row in first + second for seed in row}) == 4 * G


def test_evaluation_answers_under_its_own_protocol_and_changes_no_state() -> None:
    engine, reward = table([RIGHT, WRONG])
    params: list[SamplingParams] = []
    generate = engine.generate
    engine.generate = lambda p, s, sampling: params.append(sampling) or generate(p, s, sampling)
    threshold, rate = AdaptiveThreshold(), AdvantageCollapseRate(sync_on_compute=False)
    made = collector(engine=engine, reward=reward, threshold=threshold, collapse_rate=rate)
    evaluation = EvaluationSet(name="held", prompts=tuple(prompts(2)), num_samples=4, temperature=0.6)
    found = made.evaluate(evaluation, prompts(2), first_index=0)
    assert found.rewards.tolist() == [RIGHT, WRONG]
    assert (found.name, found.batch, found.collapse) == ("held", None, None)
    assert params[0].temperature == 0.6
    assert threshold.compute() == 0.5
    assert not rate.update_called
    assert made.evaluate(evaluation, [], first_index=0).rewards.shape == (0, 4)


def test_an_engine_that_answers_too_little_is_caught() -> None:
    engine, reward = table([MIXED])
    engine.generate = lambda p, s, sampling: ((i, [completion([10])]) for i in range(len(p)))
    with pytest.raises(AssertionError, match="answers every request"):
        collector(engine=engine, reward=reward).collect(prompts(1), iteration=0)
