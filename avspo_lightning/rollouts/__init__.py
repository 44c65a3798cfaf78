"""Rollouts: engines, the collector and the buffer. vllm is imported by its engines when they start, not here."""

from avspo_lightning.rollouts.batch import to_batch
from avspo_lightning.rollouts.buffer import RolloutBuffer
from avspo_lightning.rollouts.collector import Collector, Topology
from avspo_lightning.rollouts.engine import RolloutEngine
from avspo_lightning.rollouts.hf import HFEngine
from avspo_lightning.rollouts.sampler import FilterDrop, GroupSampler, KeepAll
from avspo_lightning.rollouts.weights import named_weights

__all__ = [
    "Collector",
    "FilterDrop",
    "GroupSampler",
    "HFEngine",
    "KeepAll",
    "RolloutBuffer",
    "RolloutEngine",
    "Topology",
    "named_weights",
    "to_batch",
]
