"""The models of a server: on disk, and loaded, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sheepop.checkpoint import LoadedModel, load_model, with_adapters
from sheepop.checkpoint.lazy_tensor import dtype_named
from sheepop.core.device import resolve_device
from sheepop.core.errors import CheckpointError, SheepOpError, UsageError
from sheepop.serve.config import ServerConfig
from sheepop.serve.protocol import ApiError
from sheepop.serve.served_model import ServedModel

if TYPE_CHECKING:
    from sheepop.generate.split_model import Followers


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
            # It loads torch's compiler, which takes a second and which one process does not need.
            from sheepop.generate.split_model import Followers

            self._followers = Followers(self.config.tensor_parallel, device)
        return self._followers.load(path, dtype)


def draining() -> ApiError:
    """The error for new requests while the server finishes the open ones."""
    return ApiError(503, "The server is shutting down.", kind="server_error", code="draining", retry_after=1)


class Registry:
    """Keeps models by name. A replaced model is closed after the last request that uses it.

    Models in `later` may not exist yet: they are runs without a checkpoint so far.
    """

    def __init__(self, load: Callable[[str], ServedModel], names: list[str], *, later: Collection[str] = ()) -> None:
        self._load, self._lock, self._later = load, threading.Lock(), later
        self._models = {name: load(name) for name in names}
        self._uses: dict[int, int] = {}
        self._retired: list[ServedModel] = []
        self.is_draining = False

    def models(self) -> list[ServedModel]:
        """All current models."""
        return list(self._models.values())

    def model(self, name: str) -> ServedModel:
        """The model of this name; raises `ApiError` 404."""
        if name not in self._models:
            known = ", ".join(self._models) or "none yet"
            raise ApiError(404, f"There is no model {name!r}; there is {known}.", param="model", code="model_not_found")
        return self._models[name]

    @contextmanager
    def using(self, name: str) -> Iterator[ServedModel]:
        """Keeps the model of this name open within the context; raises `ApiError` 404, or 503 while draining."""
        if self.is_draining:
            raise draining()
        with self._lock:
            model = self.model(name)
            self._uses[id(model)] = self._uses.get(id(model), 0) + 1
        try:
            yield model
        finally:
            with self._lock:
                self._uses[id(model)] -= 1
            self._end_unused()

    @property
    def num_open(self) -> int:
        """The number of open requests."""
        with self._lock:
            return sum(self._uses.values())

    def reload(self) -> None:
        """Reloads all models from disk; running requests finish with the old ones.

        A model that cannot be read stays as it was, and the others are still reloaded; then raises `CheckpointError`.
        """
        problems = []
        for name in dict.fromkeys((*self._models, *self._later)):
            try:
                fresh = self._load(name)
            except SheepOpError as error:
                if name in self._models or not isinstance(error, CheckpointError):
                    problems.append(f"{name} stays as it was: {error}")
                continue
            with self._lock:
                if name in self._models:
                    self._retired.append(self._models[name])
                self._models[name] = fresh
        self._end_unused()
        if problems:
            raise CheckpointError(" ".join(problems))

    def close(self) -> None:
        """Closes all models."""
        for model in (*self._models.values(), *self._retired):
            model.close()

    def _end_unused(self) -> None:
        with self._lock:
            over = [model for model in self._retired if not self._uses.get(id(model))]
            self._retired = [model for model in self._retired if model not in over]
        for model in over:
            self._uses.pop(id(model), None)
            model.close()
