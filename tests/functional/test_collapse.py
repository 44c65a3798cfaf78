from __future__ import annotations

import math

import pytest
import torch

from avspo_lightning.functional import (
    advantage_collapse_rate,
    all_right_groups,
    all_wrong_groups,
    as_rewards,
    collapsed_groups,
    pack_groups,
    scorable_groups,
    unpack_groups,
)
from avspo_lightning.functional.collapse import group_mean_std
from tests.functional.reference import GOLDEN, assert_close, mean_std

NAN = math.nan


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_batches(dtype: torch.dtype) -> None:
    cases = GOLDEN["avspo_batches"] + [case for case in GOLDEN["edge_cases"] if not case["name"].startswith("G1_")]
    for case in cases:
        rewards = torch.tensor(case["rewards"], dtype=dtype)
        assert collapsed_groups(rewards).tolist() == case["expected"]["collapsed"], case["name"]
        assert_close(advantage_collapse_rate(rewards), case["expected"]["acr"], message=case["name"])


def test_rate_is_a_float64_scalar_on_any_input_type() -> None:
    expected = torch.tensor(2 / 3, dtype=torch.float64)
    for dtype in (torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        rewards = torch.tensor([[1, 1], [0, 1], [0, 0]]).to(dtype)
        assert torch.equal(advantage_collapse_rate(rewards), expected), dtype
    assert torch.equal(advantage_collapse_rate([[1, 1], [0, 1], (0, 0)]), expected)


def test_right_and_wrong_groups_follow_the_threshold() -> None:
    rewards = [[1, 1], [0, 0], [1, 0], [0.1, 0.1], [None, None], [1, None]]
    assert all_right_groups(rewards).tolist() == [True, False, False, True, False, False]
    assert all_wrong_groups(rewards).tolist() == [False, True, False, False, False, False]
    assert all_right_groups(rewards, success_threshold=0.5).tolist() == [True, False, False, False, False, False]
    assert all_wrong_groups(rewards, success_threshold=0.5).tolist() == [False, True, False, True, False, False]


def test_unscored_rewards_leave_the_statistics() -> None:
    rewards = [[1, None, 0, 0], [None] * 4, [None, 1, None, None], [1, NAN, 1, 1]]
    values = as_rewards(rewards)
    mean, std = group_mean_std(values, ddof=0)
    assert_close(mean[0], 1 / 3)
    assert_close(std[0], mean_std([1, 0, 0], 0)[1])
    assert scorable_groups(rewards).tolist() == [True, False, False, True]
    assert collapsed_groups(rewards).tolist() == [False, False, False, True]
    assert advantage_collapse_rate(rewards) == 0.5


def test_without_a_scorable_group_the_rate_is_zero() -> None:
    assert advantage_collapse_rate([[None] * 3, [1, None, None]]) == 0.0
    assert advantage_collapse_rate(torch.empty(0, 4)) == 0.0


def test_comparison_with_atol_is_strict() -> None:
    rewards = [[0.0, 2.0]]
    assert not collapsed_groups(rewards, atol=1.0).item()
    assert collapsed_groups(rewards, atol=math.nextafter(1.0, 2.0)).item()


@pytest.mark.parametrize("size", [3, 7, 8])
@pytest.mark.parametrize("value", [0.1, 100.1, 1e12 + 0.1, -7.3])
def test_equal_rewards_of_any_size_have_no_spread(value: float, size: int) -> None:
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((1, size), value, dtype=dtype)
        assert group_mean_std(rewards.double(), ddof=0)[1].item() == 0.0
        assert collapsed_groups(rewards).item()


def test_mean_and_std_match_a_plain_loop() -> None:
    rewards = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5 + 40
    rewards[torch.rand(20, 6, generator=torch.Generator().manual_seed(1)) < 0.3] = NAN
    for ddof in (0, 1):
        mean, std = group_mean_std(rewards, ddof=ddof)
        for row, group in enumerate(rewards.tolist()):
            valid = [reward for reward in group if not math.isnan(reward)]
            if len(valid) >= 2:
                assert_close(torch.stack([mean[row], std[row]]), mean_std(valid, ddof))


def test_two_scored_rewards_have_a_sample_spread() -> None:
    mean, std = group_mean_std(as_rewards([[1, None, 0]]), ddof=1)
    assert_close(torch.stack([mean, std])[:, 0], [0.5, math.sqrt(0.5)])


def test_parts_that_cancel_collapse_in_total_only() -> None:
    first, second = torch.tensor([[1.0, 0.0, 1.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    assert collapsed_groups(first + second).item()
    assert not collapsed_groups(first).item()
    assert advantage_collapse_rate([[1, 1], [0, 0], [1, 0], [0, 1]]) == 0.5


def test_order_of_groups_and_samples_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = (torch.rand(12, 4, generator=generator) < 0.7).double()
    groups, samples = torch.randperm(12, generator=generator), torch.randperm(4, generator=generator)
    assert torch.equal(collapsed_groups(rewards[groups][:, samples]), collapsed_groups(rewards)[groups])
    assert torch.equal(advantage_collapse_rate(rewards[groups][:, samples]), advantage_collapse_rate(rewards))


def test_ragged_groups_are_packed_and_unpacked() -> None:
    group_ids = torch.tensor([4, -1, 4, 4, 9, -1, 9])
    values = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    packed = pack_groups(values, group_ids)
    assert torch.equal(
        packed.nan_to_num(nan=-1.0), torch.tensor([[0.0, 0, -1], [1, 1, 1], [0, 1, -1]], dtype=torch.float64)
    )
    assert torch.equal(unpack_groups(packed, group_ids), values)
    assert collapsed_groups(values, group_ids=group_ids).tolist() == [True, True, False]
    assert_close(advantage_collapse_rate(values.tolist(), group_ids=group_ids), 2 / 3)


def test_rewards_outside_unit_range_are_mapped() -> None:
    assert as_rewards([[-1, 1, None]], reward_range=(-1.0, 1.0))[0, :2].tolist() == [0.0, 1.0]
    values = torch.rand(3, 4, dtype=torch.float64)
    assert torch.equal(as_rewards(values), values)


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([[1.0], [0.0]], {}, "at least 2 completions"),
        ([1.0, 0.0], {}, "group_ids"),
        ([[1, 0], [1, 0, 1]], {}, "group_ids"),
        ([[1.0, math.inf]], {}, "finite"),
        ([[1.0, 0.0]], {"atol": 0.0}, "`atol`"),
        ([1.0, 0.0, 1.0], {"group_ids": torch.tensor([0, 0, 1])}, "1 of 2 groups have one"),
        ([1.0, 0.0], {"group_ids": torch.tensor([0, 0, 0])}, "same length"),
        ([[1.0, 0.0]], {"group_ids": torch.tensor([0, 0])}, "flat rewards"),
    ],
)
@pytest.mark.usefixtures("annotations_off")
def test_wrong_rewards_are_refused(rewards: list, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collapsed_groups(rewards, **options)


@pytest.mark.usefixtures("annotations_off")
def test_empty_reward_range_is_refused() -> None:
    with pytest.raises(ValueError, match="`reward_range`"):
        as_rewards([[0, 1]], reward_range=(1.0, 1.0))
