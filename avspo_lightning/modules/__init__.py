"""What is learned."""

from avspo_lightning.modules.avspo import AVSPOModule
from avspo_lightning.modules.policy import CompletionStatistics, completion_statistics

__all__ = ["AVSPOModule", "CompletionStatistics", "completion_statistics"]
