"""What a server has to serve: models on disk, and adapters for one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sheepop.checkpoint import LoadedModel, load_model, with_adapters
from sheepop.checkpoint.exchange import dtype_named
from sheepop.core.device import resolve_device
from sheepop.core.errors import UsageError
from sheepop.generate.split_model import Followers
from sheepop.serve.config import ServerConfig
from sheepop.serve.served_model import ServedModel


@dataclass
class Stock:
    """Models by name in `places`; `adapters` are served as models of their own, over the weights of the first."""

    places: dict[str, Path]
    adapters: dict[str, Path]
    config: ServerConfig
    device: str = "auto"
    dtype: str | None = None
    _base: LoadedModel | None = field(default=None, init=False)
    _followers: Followers | None = field(default=None, init=False)

    @property
    def names(self) -> list[str]:
        """Models first: what is loaded in this order finds the weights that it shares."""
        return [*self.places, *self.adapters]

    def load(self, name: str) -> ServedModel:
        """Reads a model anew; one with an adapter shares the weights of the base as it was read last."""
        if name in self.places:
            loaded = self._read(self.places[name])
            if self.adapters and name == next(iter(self.places)):
                self._base = loaded
            return ServedModel(name, loaded, self.config)
        assert self._base is not None
        return ServedModel(name, with_adapters(self._base, [self.adapters[name]], merge=False), self.config)

    def _read(self, place: Path) -> LoadedModel:
        device, dtype = resolve_device(self.device), dtype_named(self.dtype)
        if self.config.tensor_parallel == 1:
            return load_model(place, device, dtype)
        if self.adapters:
            raise UsageError("Models with adapters are not split over processes. Leave server.tensor_parallel out.")
        if self._followers is None:
            self._followers = Followers(self.config.tensor_parallel, device)
        return self._followers.load(place, dtype)
