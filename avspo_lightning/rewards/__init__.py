"""Rewards: one file each, chosen by class_path."""

from avspo_lightning.rewards.base import FunctionReward, Reward, RewardFunction, RewardScores
from avspo_lightning.rewards.exact_match import ExactMatchReward
from avspo_lightning.rewards.numeric import NumericReward
from avspo_lightning.rewards.weighted_sum import WeightedSumReward

__all__ = [
    "ExactMatchReward",
    "FunctionReward",
    "NumericReward",
    "Reward",
    "RewardFunction",
    "RewardScores",
    "WeightedSumReward",
]
