from __future__ import annotations

import itertools

import pytest
import torch
from torchmetrics import MetricCollection

from avspo_lightning.metrics import PassAtK
from tests.functional.reference import assert_close


@pytest.mark.parametrize("k", [1, 2, 5])
def test_mean_over_problems_of_the_share_of_draws_that_pass(k: int) -> None:
    correct = torch.rand(9, 5, generator=torch.Generator().manual_seed(0)) < 0.3
    metric = PassAtK(k)
    for part in correct.split([4, 1, 4]):
        metric.update(part)
    shares = []
    for row in correct.tolist():
        draws = list(itertools.combinations(row, k))
        shares.append(sum(any(draw) for draw in draws) / len(draws))
    assert_close(metric.compute(), sum(shares) / 9)
    metric.reset()
    metric.update(torch.ones(1, 5, dtype=torch.bool))
    assert metric.compute() == 1.0


def test_a_collection_keeps_each_k_apart_after_an_equal_start() -> None:
    metrics = MetricCollection({"pass@1": PassAtK(1), "pass@2": PassAtK(2)})
    metrics.update(torch.tensor([[True, True]]))
    metrics.update(torch.tensor([[True, False]]))
    rates = metrics.compute()
    assert_close(rates["pass@1"], 0.75)
    assert_close(rates["pass@2"], 1.0)


@pytest.mark.usefixtures("annotations_off")
def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="`k` must be at least 1"):
        PassAtK(0)
    with pytest.raises(ValueError, match=r"`k` must be in \[1, num_samples\]"):
        PassAtK(3).update(torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="`correct` must be bool"):
        PassAtK(1).update(torch.ones(1, 2))
