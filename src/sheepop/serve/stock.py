"""The models of a server on disk: what is known of each without its weights, and how it is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sheepop.checkpoint import LoadedModel, load_model, resolve_model_directory, with_adapters
from sheepop.checkpoint.generation_settings import GENERATION, read_generation
from sheepop.checkpoint.lazy_tensor import dtype_named, total_bytes
from sheepop.checkpoint.model_description import read_model_config, read_quantization
from sheepop.checkpoint.model_directory import stored_tensors
from sheepop.checkpoint.model_source import resolve_adapter
from sheepop.core.device import resolve_device
from sheepop.core.errors import UsageError
from sheepop.core.files import read_json
from sheepop.generate.config import model_defaults
from sheepop.generate.generator import free_memory
from sheepop.serve.config import ServerConfig
from sheepop.serve.served_model import ServedModel
from sheepop.tokenizer.interface import CHAT_TEMPLATE, SETTINGS_FILE

if TYPE_CHECKING:
    from sheepop.generate.split_model import Followers

_GIB = 2**30
_SHARE = 0.9  # of the free memory
_SHARE_OF_WEIGHTS = 0.75  # of the budget, for models that are kept together
_PARTS = re.compile(r"adapter(_model)?\.safetensors")


@dataclass(frozen=True)
class Source:
    """Where a model is; for an adapter also the name of its `base`."""

    path: Path
    base: str | None = None


@dataclass(frozen=True)
class Description:
    """What is known of a model without its weights, which take `num_bytes`; `defaults` are its own settings."""

    num_bytes: int
    num_parameters: int
    max_model_len: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    chats: bool = False
    encodes: bool = False


@dataclass(frozen=True)
class Card:
    """A model as clients see it: `root` is the name behind an alias, `parent` that of an adapter's base.

    `state` is loaded, loading or unloaded. An idle model is unloaded in `seconds_left`; None if it is not loaded.
    `path` is where it lies, which only users of this machine may see.
    """

    name: str
    about: Description
    created: int
    state: str
    root: str
    parent: str | None
    seconds_left: float | None
    path: Path


class ModelTooLargeError(UsageError):
    """The model never fits the memory budget."""


class Stock:
    """The models at `paths` by name, and `adapters` of the first of them."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        adapters: Mapping[str, Path],
        config: ServerConfig,
        device: str = "auto",
        dtype: str | None = None,
    ) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        first = next(iter(paths), None)
        self.sources = {name: Source(path) for name, path in paths.items()}
        self.sources |= {name: Source(path, first) for name, path in adapters.items()}
        if adapters and config.tensor_parallel > 1:
            raise UsageError("Models with adapters cannot be split over processes. Leave server.tensor_parallel out.")
        if config.adapter_directory is not None and not Path(config.adapter_directory).is_dir():
            raise UsageError(f"server.adapter_directory: there is no directory {config.adapter_directory}.")
        self._followers: Followers | None = None

    @cached_property
    def budget(self) -> int:
        """The bytes that all models together may take, on the machine that first asks."""
        if self.config.memory_budget is not None:
            return int(self.config.memory_budget * _GIB)
        return int(_SHARE * free_memory(torch.device(resolve_device(self.device))))

    def cache_bytes(self, weights: Sequence[int]) -> int:
        """The memory for the cache of each of the models with so many bytes of `weights`: an even share of the rest.

        The largest ones whose weights fit three quarters of the budget share what they leave, with one part to spare.
        """
        if self.config.cache_memory is not None:
            return int(self.config.cache_memory * _GIB)
        together = count = 0
        for size in sorted((size for size in weights if size < self.budget), reverse=True):
            if count and together + size > _SHARE_OF_WEIGHTS * self.budget:
                break
            together, count = together + size, count + 1
        return (self.budget - together) // (count + 1)

    def require_room(self, name: str, weights: int, cache: int, base: int = 0) -> None:
        """Raises `ModelTooLargeError` for a model that never fits, or an adapter beside a `base` of so many bytes."""
        if weights + cache + base > self.budget:
            needed, more, budget = (f"{size / _GIB:.3g} GiB" for size in (weights, cache + base, self.budget))
            raise ModelTooLargeError(
                f"{name} needs {needed} for its weights and {more} for {'its base' if base else 'its cache'}, and the "
                f"memory budget is {budget}. Give another --memory-budget, or a smaller model."
            )

    def describe(self, source: Source, base: Description | None = None) -> Description:
        """Describes a model without reading its weights, an adapter by its `base`; raises `CheckpointError`."""
        if base is not None:
            folder = resolve_adapter(source.path)
            if not (folder / "adapter_config.json").is_file():
                folder = resolve_model_directory(folder)
            found = (path for path in folder.iterdir() if _PARTS.fullmatch(path.name))
            return replace(base, num_bytes=sum(path.stat().st_size for path in found))
        directory = resolve_model_directory(source.path)
        config, weights = read_model_config(directory), stored_tensors(directory)
        num_parameters = sum(tensor.count for tensor in weights.values())
        num_bytes, dtype = total_bytes(weights), dtype_named(self.dtype)
        if dtype is not None and read_quantization(directory) is None:
            num_bytes = num_parameters * dtype.itemsize
        template = read_json(directory / SETTINGS_FILE).get(CHAT_TEMPLATE)
        return Description(
            num_bytes // self.config.tensor_parallel,
            num_parameters,
            self.config.max_model_len or config.max_seq_len,
            model_defaults(read_generation(directory), str(directory / GENERATION)),
            chats=bool(self.config.chat_template or template),
            encodes=config.architecture == "encoder_decoder",
        )

    def read(self, source: Source, base: ServedModel | None) -> LoadedModel:
        """Reads a model, or the adapter of a `base`, which shares the weights; raises `SheepOpError`."""
        if base is not None:
            return with_adapters(base.loaded, [source.path], merge=False)
        device, dtype = resolve_device(self.device), dtype_named(self.dtype)
        if self.config.tensor_parallel == 1:
            return load_model(source.path, device, dtype)
        if self._followers is None:
            # It loads torch's compiler, which takes a second and which one process does not need.
            from sheepop.generate.split_model import Followers

            self._followers = Followers(self.config.tensor_parallel, device)
        return self._followers.load(source.path, dtype)

    def serve(self, name: str, loaded: LoadedModel, base: ServedModel | None, cache_bytes: int) -> ServedModel:
        """Serves what was read, an adapter on the engine of its `base`; raises `UsageError`."""
        return ServedModel(name, loaded, self.config, base=base, cache_bytes=cache_bytes)
