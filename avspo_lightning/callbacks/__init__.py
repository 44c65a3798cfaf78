"""When things happen."""

from avspo_lightning.callbacks.checkpoint import IterationCheckpoint
from avspo_lightning.callbacks.collapse import CollapseMonitor
from avspo_lightning.callbacks.completions import CompletionLogger
from avspo_lightning.callbacks.observer import RolloutObserver
from avspo_lightning.callbacks.progress import IterationProgressBar
from avspo_lightning.callbacks.rollout import RolloutCallback
from avspo_lightning.callbacks.summary import RunSummary

__all__ = [
    "CollapseMonitor",
    "CompletionLogger",
    "IterationCheckpoint",
    "IterationProgressBar",
    "RolloutCallback",
    "RolloutObserver",
    "RunSummary",
]
