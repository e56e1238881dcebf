"""The models on disk that a server serves, and adapters for one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sheepop.checkpoint import LoadedModel, load_model, with_adapters
from sheepop.checkpoint.exchange.passage import dtype_named
from sheepop.core.device import resolve_device
from sheepop.core.errors import UsageError
from sheepop.generate.split_model import Followers
from sheepop.serve.config import ServerConfig
from sheepop.serve.served_model import ServedModel


@dataclass
class Stock:
    """The `paths` of models by name; `adapters` are served as separate models over the weights of the first."""

    paths: dict[str, Path]
    adapters: dict[str, Path]
    config: ServerConfig
    device: str = "auto"
    dtype: str | None = None
    _base: LoadedModel | None = field(default=None, init=False)
    _followers: Followers | None = field(default=None, init=False)

    @property
    def names(self) -> list[str]:
        """The names in loading order: models before adapters, which share their weights."""
        return [*self.paths, *self.adapters]

    def load(self, name: str) -> ServedModel:
        """Loads a model from disk; an adapter shares the weights of the base model that was loaded last."""
        if name in self.paths:
            loaded = self._read(self.paths[name])
            if self.adapters and name == next(iter(self.paths)):
                self._base = loaded
            return ServedModel(name, loaded, self.config)
        assert self._base is not None
        return ServedModel(name, with_adapters(self._base, [self.adapters[name]], merge=False), self.config)

    def _read(self, path: Path) -> LoadedModel:
        device, dtype = resolve_device(self.device), dtype_named(self.dtype)
        if self.config.tensor_parallel == 1:
            return load_model(path, device, dtype)
        if self.adapters:
            raise UsageError("Models with adapters cannot be split over processes. Leave server.tensor_parallel out.")
        if self._followers is None:
            self._followers = Followers(self.config.tensor_parallel, device)
        return self._followers.load(path, dtype)
