"""What is reported about a model that was imported or exported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sheepop.checkpoint.lazy_tensor import ForeignModel
from sheepop.core.console import Console
from sheepop.core.errors import TokenizerError, first_few
from sheepop.tokenizer import ChatTemplate, Tokenizer, chat_templates

_SHOWN_NAMES = 10
_GREETING = [{"role": "user", "content": "Hello"}]


@dataclass
class ExchangeReport:
    """What is learned about a model before its tensors pass and while they do, told at the end."""

    console: Console
    output: Path
    warnings: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)

    def tell(
        self, model: ForeignModel, family: object, notes: Sequence[str], dtypes: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Shows the warnings, also about values that are not finite, and the notes; returns it all as a table."""
        warnings = [*self.warnings, *self._numbers()]
        for warning in warnings:
            self.console.warn(warning)
        for note in notes:
            self.console.info(note)
        numbers = sum(tensor.count for name, tensor in model.tensors.items() if not name.endswith(".router.balance"))
        own = {str(tensor.dtype).removeprefix("torch.") for tensor in model.tensors.values()}
        return {
            "path": str(self.output),
            "family": family,
            "parameters": numbers,
            "vocab_size": model.config.vocabulary,
            "dtypes": sorted(own if dtypes is None else dtypes),
            "bytes": sum(file.stat().st_size for file in self._weight_files()),
            "not_finite": self.not_finite,
            "warnings": warnings,
            "notes": list(notes),
        }

    def _numbers(self) -> list[str]:
        if not self.not_finite:
            return []
        names = first_few(self.not_finite, _SHOWN_NAMES)
        return [f"There are NaN or infinite values in {names}. The model will not write anything sensible."]

    def _weight_files(self) -> list[Path]:
        return sorted(self.output.glob("*.safetensors")) if self.output.is_dir() else [self.output]


def template_problems(tokenizer: Tokenizer) -> list[str]:
    """What is wrong with the default chat template of a model, which is tried on a short conversation.

    A template is a program of somebody else's, and may be damaged or run in a circle; without it the model still
    writes, so that this is no reason to refuse the model.
    """
    if "default" not in chat_templates(tokenizer):
        return []
    try:
        with ChatTemplate.of(tokenizer) as template:
            template.render(_GREETING, add_generation_prompt=True)
    except TokenizerError as error:
        return [f"{error} It was tried on a short conversation; the model can be used without it."]
    return []
