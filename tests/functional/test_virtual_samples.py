from __future__ import annotations

import math

import pytest
import torch

from avspo_lightning.functional import num_virtual_samples, num_virtual_triggered, virtual_rewards
from tests.functional.reference import GOLDEN, assert_close

FORMS = {"acr_pow_alpha": "alpha", "acr_pow_one_minus_alpha": "one_minus_alpha"}


def test_golden_number_of_samples() -> None:
    for case in GOLDEN["avspo_K"]:
        assert num_virtual_samples(case["acr"], case["G"], alpha=case["alpha"]) == case["K"], case


def test_golden_number_of_samples_under_both_exponents() -> None:
    checked = 0
    for case in GOLDEN["avspo_K_variants_alpha_ablation"]:
        if case["form"] in FORMS:
            for alpha, expected in case["K_by_alpha"].items():
                actual = num_virtual_samples(case["acr"], case["G"], alpha=float(alpha), exponent=FORMS[case["form"]])
                assert actual == expected, (case, alpha)
                checked += 1
    assert checked == 32


@pytest.mark.usefixtures("annotations_off")
def test_number_of_samples_is_the_exact_ceiling() -> None:
    for size in range(1, 33):
        for groups in range(1, 65):
            for collapsed in range(1, groups + 1):
                root = math.isqrt(size * size * collapsed * groups)  # floor(groups * size * sqrt(rate)), all integers
                exact = root * root == size * size * collapsed * groups
                expected = -(-root // groups) if exact else root // groups + 1
                assert num_virtual_samples(collapsed / groups, size) == max(1, min(size, expected))
    assert 100 * 0.07 > 7
    assert num_virtual_samples(0.07, 100, alpha=1.0) == 7


def test_trigger_is_strict() -> None:
    assert num_virtual_triggered(0.5, 8, threshold=0.5) == 0
    assert num_virtual_triggered(math.nextafter(0.5, 1.0), 8, threshold=0.5) == 6
    assert num_virtual_triggered(torch.tensor(0.625), 8, threshold=torch.tensor(0.5)) == 7
    assert num_virtual_triggered(0.0, 8, threshold=0.0) == 0
    assert num_virtual_triggered(1.0, 8, threshold=0.5, strategy="none") == 0
    assert [num_virtual_triggered(0.6, 8, threshold=0.5, num_virtual=k) for k in (1, 4, 9)] == [1, 4, 8]


def test_golden_values() -> None:
    for case in GOLDEN["avspo_virtual_rewards"]:
        values = virtual_rewards(case["r_obs"], case["K"], r_anchor=case["r_anchor"])
        assert values.dtype == torch.float64
        assert_close(values, case["values"], message=str(case))


def test_golden_strategies() -> None:
    checked = set()
    for case in GOLDEN["virtual_strategies"]:
        if case["strategy"] not in ("fixed", "exp", "stratified"):
            continue
        r_obs = 1.0 if case["group"] == "all_correct" else 0.0
        r_max = r_obs if case["r_max_source"] == "max_observed" else 1.0
        values = virtual_rewards(r_obs, case["K"], strategy=case["strategy"], r_max=r_max)
        assert_close(values, case["values"], message=str(case))
        checked.add(case["strategy"])
    assert checked == {"stratified", "fixed", "exp"}


def test_failures_above_zero_are_anchored_to_their_own_reward() -> None:
    values = virtual_rewards(0.1, 4, success_threshold=0.5)
    assert_close(values, [0.1 + 0.1 * k / 4 for k in (4, 3, 2, 1)])
    assert_close(virtual_rewards(0.6, 2, success_threshold=0.5), [0.4, 0.2])


def test_uniform_draws_come_from_the_generator() -> None:
    draws = virtual_rewards(1.0, 1000, strategy="uniform", r_max=2.0, generator=torch.Generator().manual_seed(5))
    again = virtual_rewards(0.0, 1000, strategy="uniform", r_max=2.0, generator=torch.Generator().manual_seed(5))
    assert torch.equal(draws, again)
    assert draws.min() >= 0
    assert draws.max() < 2
    assert abs(draws.mean().item() - 1.0) < 5 * 2 / math.sqrt(12 * 1000)
    expected = 2 * torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    assert torch.equal(draws, expected)


def test_nothing_is_asked_for() -> None:
    assert virtual_rewards(1.0, 4, strategy="none").shape == (0,)
    assert virtual_rewards(1.0, 0).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: virtual_rewards(-1.0, 4), "`reward_range`"),
        (lambda: virtual_rewards(1.0, 4, strategy="geometric"), "none, uniform, fixed, exp, stratified"),
        (lambda: virtual_rewards(1.0, -1), "`num_virtual`"),
        (lambda: virtual_rewards(0.0, 4, r_anchor=0.0), "`r_anchor`"),
        (lambda: num_virtual_samples(1.5, 8), "`acr`"),
        (lambda: num_virtual_samples(math.nan, 8), "`acr`"),
        (lambda: num_virtual_samples(0.5, 0), "`group_size`"),
        (lambda: num_virtual_samples(0.5, 8, alpha=-0.1), "`alpha`"),
        (lambda: num_virtual_samples(0.5, 8, alpha=1.1, exponent="one_minus_alpha"), "`alpha` must be <= 1"),
        (lambda: num_virtual_samples(0.5, 8, exponent="inverse"), "`exponent`"),
        (lambda: num_virtual_triggered(0.5, 8, threshold=0.1, num_virtual=0), "`num_virtual`"),
    ],
)
@pytest.mark.usefixtures("annotations_off")
def test_wrong_options_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
