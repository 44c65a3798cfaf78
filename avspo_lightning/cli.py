"""The command ``avspo``: LightningCLI over the module, a data module of prompts and the callbacks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

# Importing the folders of advantages, rewards, engines and data modules makes their short class names known in YAML.
from avspo_lightning import advantages, datamodules, rewards, rollouts  # noqa: F401
from avspo_lightning.callbacks import (
    CollapseMonitor,
    CompletionLogger,
    IterationCheckpoint,
    IterationProgressBar,
    RolloutCallback,
    RunSummary,
)
from avspo_lightning.datamodules import PromptDataModule
from avspo_lightning.modules import AVSPOModule


class AVSPOCLI(LightningCLI):
    """Subcommands ``fit``, ``validate``, ``test`` and ``predict``; every constructor argument is a knob."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the callbacks that every run has, and ties together what must agree."""
        parser.add_lightning_class_args(RolloutCallback, "rollout")
        parser.add_lightning_class_args(CollapseMonitor, "collapse")
        parser.add_lightning_class_args(CompletionLogger, "completions")
        parser.add_lightning_class_args(RunSummary, "summary")
        parser.add_lightning_class_args(IterationProgressBar, "progress")
        parser.add_lightning_class_args(IterationCheckpoint, "checkpoint")
        parser.set_defaults(
            {"checkpoint.save_last": True, "checkpoint.save_on_exception": True, "progress.refresh_rate": 10}
        )
        parser.link_arguments(
            ("model.policy", "model.tokenizer"), "data.init_args.tokenizer", compute_fn=_tokenizer_source
        )
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=_seed)
        parser.link_arguments("seed_everything", "rollout.seed", compute_fn=_seed)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Leaves out the callbacks that the Trainer's own switches turn off; Lightning would refuse them."""
        switches = {"progress": "enable_progress_bar", "checkpoint": "enable_checkpointing"}
        parser = self._parser(self.subcommand)
        for key, switch in switches.items():
            if self._get(self.config_init, f"trainer.{switch}") is False:
                parser.callback_keys.remove(key)
        return super().instantiate_trainer(**kwargs)

    def instantiate_classes(self) -> None:
        """Builds module, data module and callbacks; a value that cannot work ends the command with its message."""
        try:
            super().instantiate_classes()
        except (ValueError, MisconfigurationException) as error:
            self.parser.error(str(error))


def main(args: ArgsType = None) -> None:
    """Entry point of ``avspo`` and ``python -m avspo_lightning``."""
    AVSPOCLI(
        AVSPOModule,
        PromptDataModule,
        subclass_mode_data=True,
        auto_configure_optimizers=False,  # the module brings its own
        seed_everything_default=42,
        trainer_defaults={
            "logger": {
                "class_path": f"{TensorBoardLogger.__module__}.{TensorBoardLogger.__name__}",
                "init_args": {"save_dir": "runs", "name": "avspo"},
            },
            "num_sanity_val_steps": -1,
            "log_every_n_steps": 1,
            "use_distributed_sampler": False,
        },
        args=args,
    )


def _tokenizer_source(policy: Any, tokenizer: str | None) -> str:
    return tokenizer or policy


def _seed(seed: bool | int) -> int:
    return int(seed)
