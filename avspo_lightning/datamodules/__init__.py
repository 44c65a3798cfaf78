"""Prompts: one data module per file, chosen by class_path."""

from avspo_lightning.datamodules.arithmetic import ArithmeticDataModule
from avspo_lightning.datamodules.base import PromptDataModule, tokenized
from avspo_lightning.datamodules.cursor import PromptCursor
from avspo_lightning.datamodules.jsonl import JSONLDataModule
from avspo_lightning.datamodules.multiplication import MultiplicationDataModule

__all__ = [
    "ArithmeticDataModule",
    "JSONLDataModule",
    "MultiplicationDataModule",
    "PromptCursor",
    "PromptDataModule",
    "tokenized",
]
