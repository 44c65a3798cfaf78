"""AVSPO and its relatives for PyTorch Lightning: language models trained with verifiable rewards.

Public names load what they need at first use, so importing the package pulls in neither transformers nor vllm.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "AVSPO": "advantages",
    "GRPO": "advantages",
    "AdvantageEstimator": "advantages",
    "CollapseMonitor": "callbacks",
    "CompletionLogger": "callbacks",
    "IterationCheckpoint": "callbacks",
    "IterationProgressBar": "callbacks",
    "RolloutCallback": "callbacks",
    "RolloutObserver": "callbacks",
    "RunSummary": "callbacks",
    "ArithmeticDataModule": "datamodules",
    "JSONLDataModule": "datamodules",
    "MultiplicationDataModule": "datamodules",
    "PromptDataModule": "datamodules",
    "AdaptiveThreshold": "metrics",
    "AdvantageCollapseRate": "metrics",
    "PassAtK": "metrics",
    "AVSPOModule": "modules",
    "ExactMatchReward": "rewards",
    "NumericReward": "rewards",
    "Reward": "rewards",
    "WeightedSumReward": "rewards",
    "FilterDrop": "rollouts",
    "GroupSampler": "rollouts",
    "HFEngine": "rollouts",
    "KeepAll": "rollouts",
    "RolloutEngine": "rollouts",
    "AdvantageContext": "types",
    "Completion": "types",
    "EvaluationSet": "types",
    "Prompt": "types",
    "Rollout": "types",
    "RolloutBatch": "types",
    "SamplingParams": "types",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
