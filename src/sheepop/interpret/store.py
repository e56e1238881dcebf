"""A trace on disk: ``trace.safetensors`` with its tensors, and ``manifest.json`` with everything else.

The trace of a short prompt has the tensor of every probe; that of a long prompt has only the residual stream, from
which the model can recompute the rest. `StoredTrace.read` also reads slices of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sheepop.core.errors import DataError
from sheepop.core.files import damaged_files, read_json, write_json
from sheepop.interpret.checks import Check
from sheepop.interpret.parts import direct_attribution
from sheepop.interpret.predictions import Prediction
from sheepop.interpret.tokens import Token
from sheepop.interpret.trace import Trace
from sheepop.model import ModelConfig

FORMAT, FORMAT_VERSION = "sheepop-trace", 1
EMBEDDED, RESIDUALS = "embedded", "residuals"
_MANIFEST, _TENSORS = "manifest.json", "trace.safetensors"
# The largest size on disk of a trace with all of its tensors.
_WHOLE_BYTES = 2**28


def write_trace(trace: Trace, directory: Path, checks: Sequence[Check], model: str, **more: Any) -> None:
    """Writes a trace into an existing `directory`. The manifest has the path of the `model`, and the entries `more`.

    It also has what each part of the network contributes to the likeliest token after the last one, in logits, because
    that needs weights, which a trace lacks.
    The caller then writes the checksums of all files, with `write_checksums`.
    """
    tensors = {EMBEDDED: trace.embedded, RESIDUALS: trace.residuals}
    if trace.source is not None:
        tensors |= {f"source_{EMBEDDED}": trace.source.embedded, f"source_{RESIDUALS}": trace.source.residuals}
    logits = trace.num_tokens * trace.config.vocabulary * trace.residuals.element_size()
    is_whole = len(trace.model.layers) * trace.block_bytes + logits <= _WHOLE_BYTES
    if is_whole:
        outside = [name for name in ("memory", "final", "logits") if name in trace.names]
        tensors |= trace.collect(["*"]) | {name: trace[name] for name in outside}
    # Copies, because two probes with nothing between them share one tensor.
    own = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(own, directory / _TENSORS)
    parts = direct_attribution(trace, -1, trace.predictions[-1].top[0][0])
    write_json(
        directory / _MANIFEST,
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "model": model,
            "prompt": trace.prompt.text,
            "is_whole": is_whole,
            "tokens": [token.to_dict() for token in trace.tokens],
            "source_tokens": [token.to_dict() for token in trace.source_tokens],
            "predictions": [prediction.to_dict() for prediction in trace.predictions],
            "words": {each: trace.text_of(each) for found in trace.predictions for each, _ in found.top},
            "contributions": dict(zip(parts.names, parts.values, strict=True)),
            "checks": [check.to_dict() for check in checks],
            "config": trace.config.model_dump(mode="json"),
            **more,
        },
    )


@dataclass(frozen=True)
class StoredTrace:
    """A trace on disk; tensors are read on demand."""

    directory: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, directory: str | Path) -> StoredTrace:
        """Opens and verifies a trace; raises `DataError` if it is damaged, no trace, or of a newer format."""
        directory = Path(directory)
        if problems := damaged_files(directory):
            raise DataError(f"The trace in {directory} cannot be read: {problems[0]}. Trace the prompt again.")
        found = read_json(directory / _MANIFEST, DataError)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise DataError(f"{directory / _MANIFEST} does not describe a trace.")
        if found.get("format_version") != FORMAT_VERSION:
            raise DataError(
                f"{directory} has format version {found.get('format_version')} of traces; this SheepOp reads "
                f"{FORMAT_VERSION}. Install a newer SheepOp."
            )
        return cls(directory, found)

    @cached_property
    def names(self) -> list[str]:
        """The names of the stored tensors."""
        with self._tensors() as file:
            return sorted(file.keys())

    @cached_property
    def config(self) -> ModelConfig:
        """The shape of the traced network."""
        return ModelConfig.model_validate(self.manifest["config"])

    @cached_property
    def tokens(self) -> list[Token]:
        """The tokens of the target's stream."""
        return [Token(**each) for each in self.manifest["tokens"]]

    @cached_property
    def predictions(self) -> list[Prediction]:
        """The prediction after each token."""
        return [Prediction(**each) for each in self.manifest["predictions"]]

    @property
    def contributions(self) -> dict[str, float] | None:
        """What each part adds to the logit of the likeliest token after the last one; None in an older trace."""
        found: dict[str, float] | None = self.manifest.get("contributions")
        return found

    @property
    def is_whole(self) -> bool:
        """Whether the tensors inside the blocks are stored."""
        return bool(self.manifest["is_whole"])

    @property
    def num_tokens(self) -> int:
        """The number of tokens, T."""
        return len(self.manifest["tokens"])

    @property
    def num_layers(self) -> int:
        """The number of blocks, L."""
        return self.shape(RESIDUALS)[0] - 1

    @property
    def residuals(self) -> Tensor:
        """The residual stream (L + 1, T, D) before each block and after the last."""
        return self.read(RESIDUALS)

    def text_of(self, token_id: int) -> str:
        """The readable form of a token that is among the likeliest after some token."""
        return str(self.manifest["words"][str(token_id)])

    def collect(self, names: Iterable[str], keep: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, Tensor]:
        """The tensors `names`, each as its entry of `keep` maps it."""
        return {name: keep[name](self.read(name)) for name in names}

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor; raises `KeyError` for an unknown name."""
        with self._tensors() as file:
            return list(self._slice(file, name).get_shape())

    def read(self, name: str, *index: int | slice) -> Tensor:
        """Reads a tensor, or only a slice of it: ``read("logits", slice(0, 8))`` reads eight rows."""
        with self._tensors() as file:
            found: Tensor = self._slice(file, name)[index or (slice(None),)]
            return found

    def _tensors(self) -> Any:
        try:
            return safe_open(self.directory / _TENSORS, framework="pt")
        except (OSError, SafetensorError) as error:
            raise DataError(f"{self.directory / _TENSORS} cannot be read: {error}.") from None

    def _slice(self, file: Any, name: str) -> Any:
        if name not in file.keys():  # noqa: SIM118 - it is not a mapping
            raise KeyError(f"{self.directory} has no tensor {name!r}; stored.names lists all of them")
        return file.get_slice(name)
