"""The learner: policy, old-policy snapshot, loss, optimiser. It learns from rollouts and generates nothing."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, get_scheduler

from avspo_lightning.embedded import model_path
from avspo_lightning.functional import PolicyLoss, policy_loss
from avspo_lightning.functional.losses import Aggregation, KLEstimator, RatioLevel
from avspo_lightning.metrics import WeightedMeans
from avspo_lightning.modules.evaluation import Evaluation
from avspo_lightning.modules.policy import CompletionStatistics, completion_statistics, freeze, load_policy
from avspo_lightning.types import Rollout, RolloutBatch

OldPolicy = Literal["logprobs", "weights"]

_MEANS = ("loss", "entropy", "ratio_mean", "clip_low_fraction", "clip_high_fraction", "kl", "grad_norm", "skipped")
_MAXIMA = ("ratio_max_deviation",)


class AVSPOModule(pl.LightningModule):
    """Policy optimisation on rollouts: GRPO's clipped objective with whatever advantages the rollouts carry.

    Paper eq. 3 and 13 (arXiv 2605.21125). Advantages, AVSPO's virtual samples among them, are made where rollouts are
    collected, so this module is the same for every method.

    Args:
        policy: Folder or hub id of a causal language model, ``builtin:NAME`` for one that the package makes itself, or
            a transformers config for fresh weights.
        tokenizer: Folder or hub id of the tokenizer; default: that of ``policy``.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Decoupled weight decay on matrices; norms and biases have none.
        betas: AdamW's moment decays.
        lr_schedule: Name of a transformers schedule (``constant_with_warmup``, ``linear``, ``cosine``, ...).
        warmup_steps: Optimizer steps of linear warm-up.
        clip_low: The ratio is clipped at 1 - clip_low.
        clip_high: The ratio is clipped at 1 + clip_high.
        aggregation: How token losses become one number: ``seq_mean`` (GRPO), ``token_mean_global`` (DAPO),
            ``token_mean_local`` (BNPO), ``constant`` (Dr. GRPO), ``seq_sum``, ``sum_of_seq_means`` (DCPO).
        ratio_level: ``token``, or ``sequence`` (GSPO).
        kl_coef: Weight of the KL term to the initial policy; 0 keeps no second model.
        kl_estimator: ``k1``, ``k2`` or ``k3`` (Schulman's).
        old_policy: Snapshot of the policy that collected: its ``logprobs``, or a copy of its ``weights``.
        freeze: Regular expressions; parameters whose name matches are not trained.
        gradient_checkpointing: Recompute activations in backward, to save memory.
        compile: Backend of ``torch.compile`` for the policy's update, such as ``inductor``; default: not compiled.
        dtype: Of the weights: ``float32``, ``bfloat16`` or ``float16``.
        attention: Attention implementation of transformers; default: its own choice.
        trust_remote_code: Run code that comes with the model.
    """

    def __init__(
        self,
        policy: str | PretrainedConfig,
        tokenizer: str | None = None,
        learning_rate: float = 1e-6,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        lr_schedule: str = "constant_with_warmup",
        warmup_steps: int = 0,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        aggregation: Aggregation = "seq_mean",
        ratio_level: RatioLevel = "token",
        kl_coef: float = 0.0,
        kl_estimator: KLEstimator = "k3",
        old_policy: OldPolicy = "logprobs",
        freeze: list[str] | None = None,
        gradient_checkpointing: bool = False,
        compile: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        attention: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        _require(learning_rate > 0, "learning_rate", learning_rate, "above 0")
        _require(weight_decay >= 0, "weight_decay", weight_decay, "at least 0")
        _require(warmup_steps >= 0, "warmup_steps", warmup_steps, "at least 0")
        _require(0 <= clip_low <= 1, "clip_low", clip_low, "between 0 and 1")
        _require(clip_high >= 0, "clip_high", clip_high, "at least 0")
        _require(kl_coef >= 0, "kl_coef", kl_coef, "at least 0")
        _require_choice("aggregation", aggregation, Aggregation)
        _require_choice("ratio_level", ratio_level, RatioLevel)
        _require_choice("kl_estimator", kl_estimator, KLEstimator)
        _require_choice("old_policy", old_policy, OldPolicy)
        if compile is not None:
            _require(
                compile in torch.compiler.list_backends(exclude_tags=()),
                "compile",
                compile,
                "a backend of torch.compile",
            )
        if isinstance(policy, PretrainedConfig) and tokenizer is None:
            raise ValueError("`tokenizer` must be given where `policy` is a config: a config names no tokenizer.")
        self.save_hyperparameters(ignore=["policy"] if isinstance(policy, PretrainedConfig) else [])
        self.source = policy
        self.model: PreTrainedModel | None = None
        self.old_model: PreTrainedModel | None = None
        self.reference_model: PreTrainedModel | None = None
        self.statistics = WeightedMeans(_MEANS, maxima=_MAXIMA)  # persistent: a resumed iteration keeps its means
        self._evaluation = Evaluation()
        self._num_tokens = 0
        self._update_seconds = 0.0

    def prepare_data(self) -> None:
        """Makes a built-in model once per node, before the ranks load it."""
        if isinstance(self.source, str):
            model_path(self.source)

    def setup(self, stage: str) -> None:
        """Loads the tokenizer."""
        source = str(self.hparams["tokenizer"] or self.source)
        self.tokenizer = AutoTokenizer.from_pretrained(
            model_path(source), trust_remote_code=self.hparams["trust_remote_code"]
        )

    def configure_model(self) -> None:
        """Loads the policy, with the copies of it that the options ask for."""
        if self.model is not None:
            return
        options = self.hparams
        source = model_path(self.source) if isinstance(self.source, str) else self.source
        self.model = load_policy(
            source,
            dtype=getattr(torch, options["dtype"]),
            attention=options["attention"],
            trust_remote_code=options["trust_remote_code"],
        )
        freeze(self.model, options["freeze"] or [])
        if options["kl_coef"] > 0:
            self.reference_model = _frozen_copy(self.model)
        if options["old_policy"] == "weights":
            self.old_model = _frozen_copy(self.model)
        if options["gradient_checkpointing"]:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if options["compile"]:
            self.model.get_decoder().compile(backend=options["compile"], dynamic=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with the chosen schedule, stepped once per optimizer step."""
        options = self.hparams
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": options["weight_decay"]},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=options["learning_rate"], betas=options["betas"])
        num_steps = self.trainer.estimated_stepping_batches
        if num_steps == float("inf") and "constant" not in options["lr_schedule"]:
            raise MisconfigurationException(
                f"`lr_schedule` = {options['lr_schedule']!r} needs an end: set `max_epochs`, the number of iterations."
            )
        scheduler = get_scheduler(
            options["lr_schedule"],
            optimizer,
            num_warmup_steps=options["warmup_steps"],
            num_training_steps=None if num_steps == float("inf") else int(num_steps),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def forward(self, batch: RolloutBatch) -> CompletionStatistics:
        """Log-prob and entropy of the completion tokens under the current policy."""
        assert self.model is not None, "configure_model() comes first"
        return completion_statistics(self.model, batch)

    def refresh_old_policy(self) -> None:
        """Takes the snapshot of weights, where that is the kind of snapshot asked for."""
        if self.old_model is not None and self.model is not None:
            self.old_model.load_state_dict(self.model.state_dict())

    def on_train_batch_start(self, batch: RolloutBatch, batch_idx: int) -> None:
        """Notes whether the step has anything to learn from, before its closure runs."""
        self._num_tokens = batch.num_tokens
        self._update_started = time.perf_counter()

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        """Loss of a micro-batch: its share of the loss of the optimizer step."""
        statistics = self(batch)
        loss = self._policy_loss(statistics.logprobs, batch)
        # Every aggregation but the local one divides by counts of the whole step. The Trainer will divide by the number
        # of accumulated batches, and DDP or FSDP by that of ranks: undo both, so that the shares add up.
        local = self.hparams["aggregation"] == "token_mean_local"
        scaled = loss.loss * (1 if local else self.trainer.accumulate_grad_batches * self.trainer.world_size)
        self._record(scaled, loss, statistics, batch)
        return scaled

    def _policy_loss(self, logprobs: Tensor, batch: RolloutBatch) -> PolicyLoss:
        options = self.hparams
        old_logprobs = batch.old_logprobs
        if self.old_model is not None:
            old_logprobs = _logprobs_without_grad(self.old_model, batch)
        reference = self.reference_model
        return policy_loss(
            logprobs,
            old_logprobs,
            batch.advantages,
            batch.loss_mask,
            clip_low=options["clip_low"],
            clip_high=options["clip_high"],
            aggregation=options["aggregation"],
            ratio_level=options["ratio_level"],
            num_sequences=max(1, batch.num_sequences),
            num_tokens=max(1, batch.num_tokens),
            max_tokens=batch.max_tokens,
            ref_logprobs=None if reference is None else _logprobs_without_grad(reference, batch),
            kl_coef=options["kl_coef"],
            kl_estimator=options["kl_estimator"],
        )

    def _record(self, scaled: Tensor, loss: PolicyLoss, statistics: CompletionStatistics, batch: RolloutBatch) -> None:
        tokens = batch.loss_mask.sum()
        entropy = statistics.entropy.masked_fill(~batch.loss_mask, 0.0).sum() / tokens.clamp(min=1)
        self.statistics.update(
            {
                "loss": (scaled.detach(), 1),
                "entropy": (entropy, tokens),
                "ratio_mean": (loss.ratio_mean, tokens),
                "clip_low_fraction": (loss.clip_low_fraction, tokens),
                "clip_high_fraction": (loss.clip_high_fraction, tokens),
                "kl": (loss.kl, tokens),
                "ratio_max_deviation": (loss.ratio_max_deviation, tokens),
            }
        )

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips as the Trainer says; the norm before clipping is logged."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        self.statistics.update({"grad_norm": (norm, 1)})
        if gradient_clip_val and gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        elif gradient_clip_val:
            torch.nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, norm)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """One update; none where the step has no token to learn from, since AdamW moves weights on zero gradients too.

        The count of tokens is that of all ranks, so all of them decide alike.
        """
        skip = self._num_tokens == 0
        self.statistics.update({"skipped": (float(skip), 1)})
        if skip and optimizer_closure is not None:
            optimizer_closure()
            optimizer.zero_grad()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def on_train_batch_end(self, outputs: Any, batch: RolloutBatch, batch_idx: int) -> None:
        """Adds up the time of the updates."""
        self._update_seconds += time.perf_counter() - self._update_started

    def on_train_epoch_end(self) -> None:
        """Logs the iteration: token-weighted means over all micro-batches and ranks."""
        values = {f"train/policy/{name}": value.float() for name, value in self.statistics.compute().items()}
        values["train/policy/learning_rate"] = torch.tensor(self.trainer.optimizers[0].param_groups[0]["lr"])
        values["train/time/update_seconds"] = torch.tensor(self._update_seconds)
        self.log_dict(values)
        self.statistics.reset()
        self._update_seconds = 0.0

    def validation_step(self, batch: Rollout, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Scores the answers to some held-out prompts."""
        self._evaluation.update(batch)

    def on_validation_epoch_end(self) -> None:
        """Logs every evaluation set."""
        self.log_dict(self._evaluation.compute("val", self.device))

    def test_step(self, batch: Rollout, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The same under ``test/``."""
        self._evaluation.update(batch)

    def on_test_epoch_end(self) -> None:
        """Logs every evaluation set."""
        self.log_dict(self._evaluation.compute("test", self.device))

    def predict_step(self, batch: Rollout, batch_idx: int, dataloader_idx: int = 0) -> Rollout:
        """The answers themselves."""
        return batch


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"`{name}` must be {expected}, got {value!r}.")


def _require_choice(name: str, value: str, choices: Any) -> None:
    _require(value in get_args(choices), name, value, f"one of {', '.join(get_args(choices))}")


def _frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).requires_grad_(False).eval()


@torch.no_grad()
def _logprobs_without_grad(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    return completion_statistics(model, batch).logprobs
