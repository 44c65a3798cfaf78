from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from avspo_lightning.functional import aggregate, kl_divergence, policy_loss, token_logprobs
from avspo_lightning.functional.losses import Aggregation
from tests.functional.reference import GOLDEN, TOLERANCE, assert_close, loop_loss

AGGREGATIONS = get_args(Aggregation)
SPLITTABLE = [name for name in AGGREGATIONS if name != "token_mean_local"]
NAMES = {
    "grpo": "seq_mean",
    "bnpo": "token_mean_local",
    "dapo": "token_mean_global",
    "dr_grpo": "constant",
    "otm": "sum_of_seq_means",
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def random_batch(
    rows: int = 8, tokens: int = 9, seed: int = 0, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Rows of unequal length, some tokens clipped on either side."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(rows, tokens, dtype=dtype, generator=generator) * 3
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.4 * torch.randn(rows, tokens, dtype=dtype, generator=generator),
        "advantages": torch.randn(rows, dtype=dtype, generator=generator),
        "mask": torch.arange(tokens) < lengths,
    }


def loss_and_gradient(batch: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    logprobs = batch["logprobs"].clone().requires_grad_()
    loss = policy_loss(logprobs, batch["old_logprobs"], batch["advantages"], batch["mask"], **options).loss
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


@DTYPES
def test_golden_losses_gradients_and_clip_fractions(dtype: torch.dtype) -> None:
    section = GOLDEN["loss"]
    batch = {
        "logprobs": torch.tensor(section["logps"], dtype=dtype),
        "old_logprobs": torch.tensor(section["old_logps"], dtype=dtype),
        "mask": torch.tensor(section["mask"]).bool(),
    }
    for case in section["cases"]:
        options = {
            "clip_low": case["eps_low"],
            "clip_high": case["eps_high"],
            "aggregation": NAMES[case["aggregation"]],
            "ratio_level": case["level"],
            "max_tokens": section["max_completion_length"],
            "num_tokens": int(section["num_items_in_batch"]),
        }
        batch["advantages"] = torch.tensor(case["advantages"], dtype=dtype)
        loss, gradient = loss_and_gradient(batch, **options)
        assert_close(loss, case["loss"], dtype, str(case["name"]))
        # The golden gradients are central differences, printed to nine digits.
        error = (gradient - torch.tensor(case["grad_logps"], dtype=dtype)).abs().max()
        assert error < max(2e-9, TOLERANCE[dtype]), case["name"]
        result = policy_loss(**batch, **options)
        assert_close(result.clip_low_fraction, case["clip_low_frac"], dtype)
        assert_close(result.clip_high_fraction, case["clip_high_frac"], dtype)


@DTYPES
def test_golden_losses_on_policy(dtype: torch.dtype) -> None:
    section = GOLDEN["loss"]
    logprobs = torch.tensor(section["logps"], dtype=dtype, requires_grad=True)
    mask = torch.tensor(section["mask"]).bool()
    for case in GOLDEN["loss_on_policy"]:
        options = {"aggregation": NAMES[case["aggregation"]], "max_tokens": 10, "num_tokens": 20}
        advantages = torch.tensor(case["advantages"], dtype=dtype)
        result = policy_loss(logprobs, None, advantages, mask, **options)
        assert_close(result.loss, case["loss"], dtype)
        given = policy_loss(logprobs, logprobs.detach(), advantages, mask, **options)
        assert torch.equal(given.loss, result.loss)
        gradients = [torch.autograd.grad(loss.loss, logprobs)[0] for loss in (result, given)]
        assert torch.equal(*gradients)
        assert gradients[0].abs().max() > 1e-4
        assert result.ratio_mean == 1
        assert result.ratio_max_deviation == 0


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_random_batches_match_a_plain_loop(aggregation: str, ratio_level: str) -> None:
    for seed in range(4):
        batch = random_batch(seed=seed)
        batch["mask"][2] = False
        if seed % 2:
            batch["advantages"] = torch.randn(8, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        options = {
            "clip_low": 0.15,
            "clip_high": 0.3,
            "aggregation": aggregation,
            "ratio_level": ratio_level,
            "max_tokens": 12,
            "num_tokens": 50,
            "num_sequences": None if seed < 2 else 16,
        }
        assert_close(policy_loss(**batch, **options).loss, loop_loss(**batch, **options), message=f"seed {seed}")


def test_diagnostics_match_a_plain_loop() -> None:
    batch = random_batch(seed=1)
    batch["mask"][3] = False
    ref_logprobs = batch["logprobs"] - 0.3
    tokens = [(r, t) for r in range(8) for t in range(9) if batch["mask"][r, t]]
    ratios = [math.exp(batch["logprobs"][rt] - batch["old_logprobs"][rt]) for rt in tokens]
    signs = [float(batch["advantages"][r]) for r, _ in tokens]
    result = policy_loss(**batch, clip_low=0.1, clip_high=0.2, ref_logprobs=ref_logprobs)
    count = len(tokens)
    assert_close(result.ratio_mean, sum(ratios) / count)
    assert_close(result.ratio_max_deviation, max(abs(ratio - 1) for ratio in ratios))
    low = sum(r < 0.9 and a < 0 for r, a in zip(ratios, signs, strict=True))
    high = sum(r > 1.2 and a > 0 for r, a in zip(ratios, signs, strict=True))
    assert low > 0
    assert high > 0
    assert_close(result.clip_low_fraction, low / count)
    assert_close(result.clip_high_fraction, high / count)
    assert_close(result.kl, math.exp(-0.3) + 0.3 - 1)
    assert (result.num_tokens.item(), result.num_sequences.item()) == (count, 7)
    assert policy_loss(**batch).kl == 0

    ratios = [
        math.exp((batch["logprobs"] - batch["old_logprobs"])[r][batch["mask"][r]].mean()) for r in range(8) if r != 3
    ]
    result = policy_loss(**batch, ratio_level="sequence")
    assert_close(result.ratio_mean, sum(ratios) / 7)
    assert_close(result.ratio_max_deviation, max(abs(ratio - 1) for ratio in ratios))


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", SPLITTABLE)
def test_micro_batches_add_up_to_the_step(aggregation: str, ratio_level: str) -> None:
    batch = random_batch(dtype=torch.float32)
    batch["mask"][5] = False
    options = {
        "aggregation": aggregation,
        "ratio_level": ratio_level,
        "max_tokens": 9,
        "num_tokens": int(batch["mask"].sum()),
        "num_sequences": 7,
    }
    loss, gradient = loss_and_gradient(batch, **options)
    assert torch.equal(loss_and_gradient(batch, **{**options, "num_sequences": None})[1], gradient)
    for size in (1, 2, 4, [3, 5]):
        parts = [
            dict(zip(batch, rows, strict=True)) for rows in zip(*(x.split(size) for x in batch.values()), strict=True)
        ]
        results = [loss_and_gradient(part, **options) for part in parts]
        assert abs(sum(part for part, _ in results) - loss) < 1e-6
        difference = (torch.cat([part for _, part in results]) - gradient).norm() / gradient.norm()
        assert difference < 1e-5


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_masked_row_leaves_numerator_and_denominator(aggregation: str) -> None:
    batch = random_batch(rows=2, tokens=6)
    batch["mask"] = torch.tensor([[True] * 4 + [False] * 2, [False] * 6])
    first = {name: value[:1] for name, value in batch.items()}
    options = {"aggregation": aggregation, "max_tokens": 6, "num_tokens": 4}
    loss, gradient = loss_and_gradient(batch, **options)
    expected, expected_gradient = loss_and_gradient(first, **options)
    assert torch.equal(loss, expected)
    assert torch.equal(gradient[:1], expected_gradient)
    assert not gradient[1].any()


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_unmasked_gives_zero(aggregation: str, ratio_level: str) -> None:
    batch = random_batch()
    batch["mask"] = torch.zeros_like(batch["mask"])
    for num_sequences in (None, 0):
        options = {
            "aggregation": aggregation,
            "ratio_level": ratio_level,
            "max_tokens": 9,
            "num_tokens": 0,
            "num_sequences": num_sequences,
            "ref_logprobs": batch["logprobs"] - 1,
            "kl_coef": 0.1,
        }
        loss, gradient = loss_and_gradient(batch, **options)
        assert loss == 0
        assert not gradient.any()
        result = asdict(policy_loss(**batch, **options))
        assert {name: float(value) for name, value in result.items()} == dict.fromkeys(result, 0.0)


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_positions_may_hold_anything(garbage: float, per_token: bool, ratio_level: str) -> None:
    batch = random_batch()
    batch["mask"][4] = False
    if per_token:
        batch["advantages"] = batch["advantages"][:, None] * torch.linspace(0.5, 1, 9, dtype=torch.float64)
    options = {"ratio_level": ratio_level, "kl_coef": 0.1}
    reference = batch["logprobs"] - 0.2
    loss, gradient = loss_and_gradient(batch, ref_logprobs=reference, **options)
    clean = policy_loss(**batch, ref_logprobs=reference, **options)
    spoilt = {name: value.clone() for name, value in batch.items()}
    for tensor in (spoilt["logprobs"], spoilt["old_logprobs"], reference):
        tensor[~batch["mask"]] = garbage
    spoilt["advantages"][~batch["mask"] if per_token else ~batch["mask"].any(-1)] = garbage
    # No NaN inside either, or a run under anomaly detection would stop.
    with torch.autograd.set_detect_anomaly(True):
        actual, actual_gradient = loss_and_gradient(spoilt, ref_logprobs=reference, **options)
    assert torch.equal(actual, loss)
    assert torch.equal(actual_gradient, gradient)
    assert asdict(policy_loss(**spoilt, ref_logprobs=reference, **options)) == asdict(clean)


@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_match_finite_differences(aggregation: str, ratio_level: str, kl_estimator: str) -> None:
    batch = random_batch(rows=3, tokens=4)
    logprobs = batch["logprobs"].clone().requires_grad_()

    def run(logprobs: Tensor) -> Tensor:
        return policy_loss(
            logprobs, batch["old_logprobs"], batch["advantages"], batch["mask"], aggregation=aggregation,
            ratio_level=ratio_level, max_tokens=5, num_tokens=7, num_sequences=4,
            ref_logprobs=batch["logprobs"] - 0.3, kl_coef=0.2, kl_estimator=kl_estimator,
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(run, (logprobs,))


def test_kl_estimators() -> None:
    policy, reference = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.5, -1.0]).double()
    assert_close(kl_divergence(policy, reference, estimator="k1"), [0.5, -1.0])
    assert_close(kl_divergence(policy, reference, estimator="k2"), [0.125, 0.5])
    assert_close(kl_divergence(policy, reference), [math.exp(-0.5) - 0.5, math.e - 2])


def test_k1_and_k3_are_unbiased() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.2, 0.1]]).double()
    policy, reference = torch.log_softmax(logits, -1)
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        assert_close((policy.exp() * kl_divergence(policy, reference, estimator=estimator)).sum(), exact)


def test_kl_is_added_with_its_weight_to_the_same_tokens() -> None:
    batch = random_batch()
    reference = batch["logprobs"] - 0.5
    plain = policy_loss(**batch, ref_logprobs=reference)
    with_kl = policy_loss(**batch, ref_logprobs=reference, kl_coef=0.3)
    assert torch.equal(plain.loss, policy_loss(**batch).loss)
    assert_close(with_kl.loss - plain.loss, 0.3 * (math.exp(-0.5) + 0.5 - 1))


def test_on_policy_loss_is_zero_but_teaches() -> None:
    logits = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    token_ids = torch.randint(0, 7, (4, 5), generator=torch.Generator().manual_seed(1))
    advantages = torch.tensor([0.866, -0.866, 0.866, -0.866])
    result = policy_loss(token_logprobs(logits, token_ids), None, advantages, torch.ones(4, 5, dtype=torch.bool))
    result.loss.backward()
    assert abs(result.loss.item()) < 1e-6
    assert result.ratio_max_deviation < 1e-6
    assert logits.grad.norm() > 1e-4


def test_only_the_policy_gets_a_gradient() -> None:
    batch = random_batch()
    tensors = {name: value.clone().requires_grad_() for name, value in batch.items() if name != "mask"}
    reference = (batch["logprobs"] - 0.5).requires_grad_()
    result = policy_loss(**tensors, mask=batch["mask"], ref_logprobs=reference, kl_coef=0.1)
    result.loss.backward()
    assert tensors["logprobs"].grad is not None
    assert tensors["old_logprobs"].grad is None
    assert tensors["advantages"].grad is None
    assert reference.grad is None
    assert [name for name, value in vars(result).items() if value.requires_grad] == ["loss"]


def test_collapsed_groups_add_nothing_to_the_gradient() -> None:
    batch = random_batch()
    batch["advantages"][4:] = 0.0
    assert not loss_and_gradient(batch)[1][4:].any()
    assert loss_and_gradient(batch)[1][:4].any()


@pytest.mark.usefixtures("annotations_off")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "mean"}, "seq_mean, token_mean_global"),
        ({"aggregation": "token_mean_global"}, "`num_tokens`"),
        ({"aggregation": "constant"}, "`max_tokens`"),
        ({"aggregation": "constant", "max_tokens": 0}, "`max_tokens`"),
        ({"num_sequences": -1}, "`num_sequences`"),
        ({"num_tokens": -1}, "`num_tokens`"),
        ({"clip_low": -0.1}, "`clip_low`"),
        ({"clip_low": 1.1}, "`clip_low`"),
        ({"clip_high": -0.1}, "`clip_high`"),
        ({"ratio_level": "row"}, "token, sequence"),
        ({"kl_coef": 0.1}, "`ref_logprobs`"),
        ({"kl_coef": -0.1}, "`kl_coef`"),
        ({"kl_estimator": "k4"}, "k1, k2, k3"),
        ({"old_logprobs": torch.zeros(8)}, "`old_logprobs`"),
        ({"ref_logprobs": torch.zeros(8, 1)}, "`ref_logprobs`"),
        ({"advantages": torch.zeros(9)}, "`advantages`"),
        ({"mask": torch.ones(8, 8, dtype=torch.bool)}, "`logprobs`"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(**{**random_batch(), **options})


def test_aggregate_of_ones_counts() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    counts = {"max_tokens": 4, "num_tokens": 8}
    expected = {
        "seq_mean": 1.0,
        "sum_of_seq_means": 2.0,
        "seq_sum": 2.0,
        "constant": 0.5,
        "token_mean_global": 0.5,
        "token_mean_local": 1.0,
    }
    actual = {name: aggregate(torch.ones(3, 3), mask, aggregation=name, **counts).item() for name in AGGREGATIONS}
    assert actual == expected
