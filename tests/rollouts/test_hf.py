"""The transformers engine against transformers' own generate, and against log-probs computed anew."""

from __future__ import annotations

import pytest
import torch

from avspo_lightning.modules import completion_statistics
from avspo_lightning.rollouts import HFEngine, to_batch
from avspo_lightning.rollouts.engine import end_of_sequence_ids, tokens_containing
from avspo_lightning.types import Completion, Prompt, SamplingParams
from tests.tiny import EOS, VOCAB, tiny_model, tiny_prompts, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPTS = [
    Prompt(id=p.id, text=p.text, answer=p.answer, token_ids=tuple(TOKENIZER.encode(p.text))) for p in tiny_prompts(5)
]
SEEDS = [100 * i for i in range(5)]


def engine(model: torch.nn.Module, **options: int) -> HFEngine:
    made = HFEngine(**options)
    made.setup(model, TOKENIZER)
    return made


def draw(sampler: HFEngine, prompts: list[Prompt], seeds: list[int], params: SamplingParams) -> list[list[Completion]]:
    groups = dict(sampler.generate(prompts, seeds, params))
    return [groups[i] for i in range(len(prompts))]


def ids(groups: list[list[Completion]]) -> list[tuple[int, ...]]:
    return [completion.token_ids for group in groups for completion in group]


def test_same_seeds_draw_the_same_and_every_sample_differs() -> None:
    sampler, params = engine(tiny_model()), SamplingParams(num_samples=4, max_tokens=12)
    first = draw(sampler, PROMPTS, SEEDS, params)
    assert ids(first) == ids(draw(sampler, PROMPTS, SEEDS, params))
    assert all(len({completion.token_ids for completion in group}) == 4 for group in first)
    other = draw(sampler, PROMPTS, [seed + 7 for seed in SEEDS], params)
    assert ids(other) != ids(first)


def test_a_completion_does_not_depend_on_its_batch_mates() -> None:
    params = SamplingParams(num_samples=4, max_tokens=12)
    together = draw(engine(tiny_model()), PROMPTS, SEEDS, params)
    for i in (0, 3):
        alone = draw(engine(tiny_model()), PROMPTS[i : i + 1], SEEDS[i : i + 1], params)
        assert ids(alone) == ids(together[i : i + 1])
    assert ids(draw(engine(tiny_model(), max_rows=4), PROMPTS, SEEDS, params)) == ids(together)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_the_trainer(temperature: float) -> None:
    model, params = (
        tiny_model(),
        SamplingParams(num_samples=4, max_tokens=12, temperature=temperature, stop_token_ids=(9, 21, 33, 45)),
    )
    groups = draw(engine(model), PROMPTS, SEEDS, params)
    assert {len(c.token_ids) for group in groups for c in group} > {12}, "some end early"
    batch = to_batch(PROMPTS, groups, rewards=torch.zeros(5, 4), advantages=torch.zeros(5, 4), sampling=params)
    with torch.no_grad():
        recomputed = completion_statistics(model, batch).logprobs
    torch.testing.assert_close(recomputed, batch.rollout_logprobs, atol=1e-5, rtol=1e-5)


def test_first_token_follows_the_distribution() -> None:
    model = tiny_model()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0].token_ids])).logits[0, -1].double()
    expected = torch.softmax(logits / 0.7, dim=-1)
    num_samples = 4000
    params = SamplingParams(max_tokens=1, temperature=0.7, num_samples=num_samples)
    groups = draw(engine(model, max_rows=num_samples), PROMPTS[:1], [0], params)
    drawn = torch.tensor([c.token_ids[0] for c in groups[0]])
    counts = torch.bincount(drawn, minlength=VOCAB).double()
    assert counts[expected < 1e-9].sum() == 0
    likely = expected * num_samples >= 5
    statistic = ((counts - expected * num_samples)[likely].square() / (expected * num_samples)[likely]).sum()
    degrees = likely.sum().item() - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5, "chi-square, four standard deviations"


def test_greedy_is_generate_s() -> None:
    model = tiny_model()
    params = SamplingParams(max_tokens=10, temperature=0)
    groups = draw(engine(model), PROMPTS, [0] * 5, params)
    for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
        inputs = torch.tensor([prompt.token_ids])
        reference = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=10, do_sample=False, eos_token_id=EOS
        )[0, len(prompt.token_ids) :]
        assert completion.token_ids == tuple(reference.tolist())


def test_nothing_of_the_generation_config_leaks_but_its_stop_tokens() -> None:
    params = SamplingParams(num_samples=4, max_tokens=12)
    plain = draw(engine(tiny_model()), PROMPTS, SEEDS, params)
    meddling = tiny_model()
    meddling.generation_config.update(
        top_k=2, top_p=0.1, temperature=0.1, repetition_penalty=5.0, min_new_tokens=9, do_sample=True
    )
    assert ids(draw(engine(meddling), PROMPTS, SEEDS, params)) == ids(plain)


def test_every_stop_token_ends_a_completion_and_is_part_of_it() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [9, 11]
    assert end_of_sequence_ids(model, TOKENIZER) == {EOS, 9, 11}
    groups = draw(engine(model), PROMPTS, SEEDS, SamplingParams(num_samples=4, max_tokens=40, stop_token_ids=(13,)))
    stops = {EOS, 9, 11, 13}
    ended = [c for group in groups for c in group if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in ended} == stops, "each of them occurs"
    for completion in (c for group in groups for c in group):
        assert not stops & set(completion.token_ids[:-1])
        assert (completion.token_ids[-1] in stops) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 40


def test_generation_leaves_mode_and_global_rng_alone() -> None:
    model = tiny_model().train()
    state = torch.get_rng_state()
    draw(engine(model), PROMPTS, SEEDS, SamplingParams(num_samples=4, max_tokens=4))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_tokens_containing() -> None:
    assert tokens_containing(["w63", "w62"], TOKENIZER) == (62, 63)
    assert tokens_containing([], TOKENIZER) == ()
    with pytest.raises(ValueError, match="'nowhere'"):
        tokens_containing(["nowhere"], TOKENIZER)
