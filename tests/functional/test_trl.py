"""The same numbers as TRL's own loss and advantages, executed on a stand-in for its trainer."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from avspo_lightning.functional import group_advantages, policy_loss
from tests.functional.reference import assert_close
from tests.functional.test_losses import random_batch

pytest.importorskip("trl")
AGGREGATION = {
    "grpo": "seq_mean",
    "bnpo": "token_mean_local",
    "dr_grpo": "constant",
    "dapo": "token_mean_global",
    "luspo": "seq_sum",
}
NUM_TOKENS, MAX_TOKENS = 60, 12


def trl_loss(batch: dict[str, Tensor], loss_type: str, level: str, beta: float) -> tuple[Tensor, dict[str, float]]:
    """What ``GRPOTrainer._compute_loss`` makes of a batch: one process, no accumulation."""
    from trl import GRPOTrainer

    mask = batch["mask"].long()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            batch["logprobs"],
            torch.zeros_like(batch["logprobs"]),
            None,
        ),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=1,
        epsilon_low=0.2,
        epsilon_high=0.28,
        importance_sampling_level=level,
        loss_type=loss_type,
        max_completion_length=MAX_TOKENS,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old_logprobs"],
        "ref_per_token_logps": batch["ref_logprobs"],
        "num_items_in_batch": torch.tensor(float(NUM_TOKENS), dtype=torch.float64),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", sorted(AGGREGATION))
def test_loss_gradient_and_diagnostics_equal_trl_s(loss_type: str, level: str, beta: float) -> None:
    for seed in range(3):
        batch = random_batch(seed=seed)
        batch["logprobs"].requires_grad_()
        batch["ref_logprobs"] = batch["logprobs"].detach() + 0.2 * torch.randn(
            8, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 100)
        )
        expected, metrics = trl_loss(batch, loss_type, level, beta)
        actual = policy_loss(
            **batch, clip_high=0.28, aggregation=AGGREGATION[loss_type], ratio_level=level, kl_coef=beta,
            max_tokens=MAX_TOKENS, num_tokens=NUM_TOKENS,
        )  # fmt: skip
        assert_close(actual.loss, expected)
        gradients = [torch.autograd.grad(loss, batch["logprobs"])[0] for loss in (actual.loss, expected)]
        assert_close(*gradients)
        # TRL averages these in float32.
        assert_close(actual.clip_low_fraction, metrics["clip_ratio/low_mean"], torch.float32)
        assert_close(actual.clip_high_fraction, metrics["clip_ratio/high_mean"], torch.float32)
        if beta:
            assert_close(actual.kl, metrics["kl"], torch.float32)


def test_advantages_equal_trl_s() -> None:
    from trl.trainer.utils import nanstd

    rewards = torch.rand(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rewards[2] = 1.0
    rewards[3, 4] = torch.nan
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    spreads = {
        "group": nanstd(rewards, dim=1, keepdim=True),
        "batch": nanstd(rewards.flatten(), dim=0),
    }
    for scale, spread in spreads.items():
        expected = (centred / (spread + 1e-4)).nan_to_num(nan=0.0)
        # TRL corrects for the sample's size in float32.
        assert_close(group_advantages(rewards, scale=scale), expected, torch.float32)
