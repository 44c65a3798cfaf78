"""Prompts from files of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from avspo_lightning.datamodules.base import PromptDataModule
from avspo_lightning.types import EvaluationSet, Prompt


class JSONLDataModule(PromptDataModule):
    """One problem per line of a JSON Lines file (``.jsonl`` or ``.jsonl.gz``), read by ``datasets``.

    Args:
        tokenizer: See PromptDataModule.
        path: File of training problems.
        val_path: File of held-out problems; none: no validation.
        name: Of the evaluation set, in the metric keys.
        template: Text of a prompt, with ``{problem}`` in it.
        problem_column: Column of the problem.
        answer_column: Column of the gold answer.
        id_column: Column of the stable id; where there is none, the row number serves.
        max_val_prompts: Most held-out problems that are used, the first ones; default: all.
        seed: See PromptDataModule.
        max_prompt_tokens: See PromptDataModule.
        trust_remote_code: See PromptDataModule.
    """

    def __init__(
        self,
        tokenizer: str,
        path: str,
        val_path: str | None = None,
        name: str = "heldout",
        template: str = "{problem}",
        problem_column: str = "problem",
        answer_column: str = "answer",
        id_column: str = "id",
        max_val_prompts: int | None = None,
        seed: int = 0,
        max_prompt_tokens: int = 512,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(tokenizer, seed, max_prompt_tokens, trust_remote_code)
        if "{problem}" not in template:
            raise ValueError(f"`template` must contain '{{problem}}', got {template!r}.")
        for key, file in {"path": path, "val_path": val_path}.items():
            if file is not None and not Path(file).is_file():
                raise ValueError(f"`{key}` = {file!r} is no file; give the path of a JSON Lines file.")
        self.path = path
        self.val_path = val_path
        self.evaluation_name = name
        self.template = template
        self.columns = {"problem": problem_column, "answer": answer_column}
        self.id_column = id_column
        self.max_val_prompts = max_val_prompts

    def train_prompts(self) -> Sequence[Prompt]:
        """Every row of ``path`` that has an answer."""
        return self._prompts(self.path)

    def evaluation_sets(self) -> Sequence[EvaluationSet]:
        """The rows of ``val_path``, answered greedily."""
        if self.val_path is None:
            return []
        prompts = self._prompts(self.val_path)[: self.max_val_prompts]
        return [EvaluationSet(name=self.evaluation_name, prompts=tuple(prompts))]

    def _prompts(self, path: str) -> list[Prompt]:
        from datasets import Dataset  # half a second and more: only where a file is read

        rows = Dataset.from_json(path)
        for key, column in self.columns.items():
            if column not in rows.column_names:
                raise ValueError(
                    f"`{key}_column` = {column!r} is not in {path}; its columns are {', '.join(rows.column_names)}."
                )
        return [self._prompt(row, i) for i, row in enumerate(rows) if str(row[self.columns["answer"]] or "").strip()]

    def _prompt(self, row: dict[str, Any], index: int) -> Prompt:
        return Prompt(
            id=str(row.get(self.id_column, index)),
            text=self.template.replace("{problem}", row[self.columns["problem"]]),
            answer=str(row[self.columns["answer"]]),
            level=str(row.get("level") or ""),
        )
