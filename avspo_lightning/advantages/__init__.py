"""Advantage estimators: one file each, chosen by class_path."""

from avspo_lightning.advantages.avspo import AVSPO
from avspo_lightning.advantages.base import AdvantageEstimator
from avspo_lightning.advantages.grpo import GRPO

__all__ = ["AVSPO", "GRPO", "AdvantageEstimator"]
