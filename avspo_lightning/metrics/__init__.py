"""torchmetrics over :mod:`avspo_lightning.functional`, exact over batches and ranks."""

from avspo_lightning.metrics.collapse import AdvantageCollapseRate
from avspo_lightning.metrics.passk import PassAtK
from avspo_lightning.metrics.threshold import AdaptiveThreshold
from avspo_lightning.metrics.weighted import WeightedMeans

__all__ = ["AdaptiveThreshold", "AdvantageCollapseRate", "PassAtK", "WeightedMeans"]
