"""The models of a server by name: loaded when they are used, kept, and unloaded, within one budget of memory.

One thread loads models, another unloads and closes them. A model that leaves its place, because it is loaded anew or
because another one needs its memory, is closed after the last request that uses it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field

from sheepop.core.errors import CheckpointError, SheepOpError, UsageError
from sheepop.serve.config import ServerConfig, duration
from sheepop.serve.protocol import ApiError, draining
from sheepop.serve.served_model import ServedModel
from sheepop.serve.stock import Card, Description, ModelTooLargeError, Source, Stock
from sheepop.serve.worker import ShutdownError

_LOG = logging.getLogger("sheepop.server")
_KEEPER_SECONDS = 1.0


@dataclass(eq=False)
class _Slot:
    """A name, and the model that it has now; `loading` ends when there is one, or none can be."""

    name: str
    source: Source
    created: int = field(default_factory=lambda: int(time.time()))
    about: Description | None = None
    model: ServedModel | None = None
    loading: Future[None] | None = None
    num_waiting: int = 0
    used: float = 0.0
    keep_alive: float | None = None  # of the last request that said one


class Registry:
    """The models of `stock`, of which those in `later` may not exist yet; loads the first, and its adapters, now.

    Raises `SheepOpError` if one of these cannot be loaded, and `UsageError` for an alias that names no model.
    """

    def __init__(
        self, stock: Stock, *, later: Collection[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stock, self._clock, self._later = stock, clock, frozenset(later)
        config: ServerConfig = stock.config
        self._keep_alive, self._most_waiting = duration(config.keep_alive), config.max_running + config.max_waiting
        self._slots = {name: _Slot(name, source) for name, source in stock.sources.items()}
        self._aliases = dict(config.aliases)
        for alias, name in self._aliases.items():
            if name not in self._slots or alias in self._slots:
                raise UsageError(
                    f"The alias {alias}={name} must be a new name of one of the models {', '.join(self._slots)}."
                )
        self._changed = threading.Condition()  # guards the slots and what follows
        self._uses: Counter[int] = Counter()
        self._bytes: dict[int, int] = {}  # of each model that is not closed
        self._retired: list[ServedModel] = []
        self._num_open = 0
        self.is_draining = self._is_closed = False
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loading")
        self._keeper = threading.Thread(target=self._keep, name="keeping models", daemon=True)
        self._keeper.start()
        try:
            ready = [slot for slot in self._slots.values() if slot.name not in self._later]
            for slot in ready:
                slot.about = self._described(slot)
            for slot in ready:
                if slot is ready[0] or slot.source.base == ready[0].name:
                    self._loader.submit(self._load, slot).result()
        except BaseException:
            self.close()
            raise

    def models(self) -> list[ServedModel]:
        """All loaded models."""
        with self._changed:
            return [slot.model for slot in self._slots.values() if slot.model is not None]

    def cards(self) -> list[Card]:
        """All models that exist, loaded or not, and their aliases."""
        with self._changed:
            names = [(slot.name, slot) for slot in self._slots.values()]
            names += [(alias, self._slots[name]) for alias, name in self._aliases.items()]
            return [self._card(name, slot, slot.about) for name, slot in names if slot.about is not None]

    def card(self, name: str) -> Card:
        """The card of this name; raises `ApiError` 404."""
        with self._changed:
            slot = self._slot(name)
            if slot.about is None:
                raise self._unknown(name)
            return self._card(name, slot, slot.about)

    def _card(self, name: str, slot: _Slot, about: Description) -> Card:
        state = "loaded" if slot.model is not None else "unloaded" if slot.loading is None else "loading"
        left = None if slot.model is None else max(0.0, self._expires(slot) - self._clock())
        return Card(name, about, slot.created, state, slot.name, slot.source.base, left, slot.source.path)

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[ServedModel]:
        """Keeps the model of this name open within the context; raises as `entered`."""
        model = await self.entered(name)
        try:
            yield model
        finally:
            self.leave(model)

    async def entered(self, name: str, keep_alive: float | None = None) -> ServedModel:
        """Opens the model of this name until `leave`; it is loaded first if it is not.

        From then on it is kept `keep_alive` idle seconds, if that is given. Raises `ApiError`: 404 for an unknown name,
        400 for a model that never fits the memory, 503 for one that cannot be loaded, if too many requests wait for it,
        or while draining.
        """
        found = self._enter(name, keep_alive)
        if isinstance(found, Future):
            # Until it is open, so that no other load takes its place before.
            with self._waiting(name):
                while isinstance(found, Future):
                    try:
                        await asyncio.shield(asyncio.wrap_future(found))
                    except SheepOpError as error:
                        raise _refusal(name, error) from None
                    found = self._enter(name, keep_alive)
        return found

    def leave(self, model: ServedModel) -> None:
        """Ends the use of a model."""
        with self._changed:
            self._num_open -= 1
            self._release(model)

    @contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        with self._changed:
            slot = self._slot(name)
            if slot.num_waiting >= self._most_waiting:
                message = f"{self._most_waiting} requests wait until {slot.name} is loaded. Try again later."
                raise ApiError(503, message, kind="server_error", code="overloaded", retry_after=1)
            slot.num_waiting, self._num_open = slot.num_waiting + 1, self._num_open + 1
        try:
            yield
        finally:
            with self._changed:
                slot.num_waiting, self._num_open = slot.num_waiting - 1, self._num_open - 1
                self._changed.notify_all()

    def _enter(self, name: str, keep_alive: float | None) -> ServedModel | Future[None]:
        """Opens a model, or begins to load it."""
        with self._changed:
            if self.is_draining or self._is_closed:
                raise draining()
            slot = self._slot(name)
            if (model := self._retained(slot)) is not None:
                self._num_open += 1
                slot.keep_alive = slot.keep_alive if keep_alive is None else keep_alive
                return model
            if slot.loading is None:
                slot.loading = self._loader.submit(self._load_once, slot)
            return slot.loading

    def keep(self, name: str, keep_alive: float) -> None:
        """Keeps the model so many idle seconds from now on, until another request says so or it is unloaded."""
        with self._changed:
            self._slot(name).keep_alive = keep_alive
            self._changed.notify_all()

    @property
    def num_open(self) -> int:
        """The number of open requests."""
        return self._num_open

    async def add(self, name: str, source: Source) -> None:
        """Adds an adapter or a model and loads it; raises `ApiError` 400 for one that is taken or does not fit."""
        with self._changed:
            if name in self._slots or name in self._aliases:
                kind = "model" if source.base is None else "lora adapter"
                message = f"The {kind} '{name}' has already been loaded, or is the name of another model."
                raise ApiError(400, message, param="lora_name", code="name_taken")
            slot = self._slots[name] = _Slot(name, source)
        try:
            self.leave(await self.entered(name))
        except ApiError as error:
            with self._changed:
                if self._slots.get(name) is slot:
                    del self._slots[name]
            if error.status_code == 503 and error.body["error"]["code"] == "model_not_loaded":
                raise ApiError(400, error.detail, param="lora_path", code="invalid_value") from None
            raise

    def remove(self, name: str) -> None:
        """Removes an adapter; requests that run with it finish. Raises `ApiError` 404."""
        with self._changed:
            slot = self._slots.get(name)
            if slot is None or slot.source.base is None or slot.loading is not None:
                raise ApiError(404, f"The lora adapter '{name}' cannot be found.", param="lora_name", code="not_found")
            self._retire(slot)
            del self._slots[name]
            self._aliases = {alias: of for alias, of in self._aliases.items() if of != name}

    def reload(self) -> None:
        """Loads all loaded models anew, and those that may exist by now; running requests finish with the old ones.

        A model that cannot be read stays as it was, and the others are still reloaded; then raises `CheckpointError`.
        """
        problems = []
        with self._changed:
            loaded = [slot for slot in self._slots.values() if slot.model is not None]
            later = [slot for slot in self._slots.values() if slot.model is None and slot.name in self._later]
        for slot in (*loaded, *later):
            try:
                self._loader.submit(self._load, slot).result()
            except SheepOpError as error:
                if slot in loaded or not isinstance(error, CheckpointError):
                    state = "is not loaded" if slot.model is None else "stays as it was"
                    problems.append(f"{slot.name} {state}: {error}")
        if problems:
            raise CheckpointError(" ".join(problems))

    def close(self) -> None:
        """Closes all models; requests that wait for one are refused."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._loader.shutdown()
        self._keeper.join()
        for model in (*self._retired, *self.models()):
            model.close()

    def tidy(self) -> None:
        """Unloads models that were idle for as long as they are kept, and closes those that nobody uses any more."""
        with self._changed:
            for slot in self._slots.values():
                idle = slot.model is not None and slot.source.base is None and not self._is_wanted(slot)
                if idle and self._expires(slot) <= self._clock():
                    self._unload(slot, "because it was idle")
            over = [model for model in self._retired if not self._uses[id(model)]]
            self._retired = [model for model in self._retired if self._uses[id(model)]]
        for model in over:
            try:
                model.close()
            except Exception as error:
                _LOG.error("%s did not end as it should", model.name, exc_info=error)
        with self._changed:
            for model in over:
                del self._bytes[id(model)], self._uses[id(model)]
            if over:
                self._changed.notify_all()

    def _keep(self) -> None:
        while not self._is_closed:
            self.tidy()
            with self._changed:
                if not (self._is_closed or any(not self._uses[id(model)] for model in self._retired)):
                    self._changed.wait(_KEEPER_SECONDS)

    def _expires(self, slot: _Slot) -> float:
        if slot.source.base is not None:
            slot = self._slots[slot.source.base]
        return slot.used + (self._keep_alive if slot.keep_alive is None else slot.keep_alive)

    def _slot(self, name: str) -> _Slot:
        found = self._slots.get(self._aliases.get(name, name))
        if found is None:
            raise self._unknown(name)
        return found

    def _unknown(self, name: str) -> ApiError:
        known = ", ".join((*self._slots, *self._aliases)) or "none yet"
        return ApiError(404, f"There is no model {name!r}; there is {known}.", param="model", code="model_not_found")

    def _retained(self, slot: _Slot) -> ServedModel | None:
        """Counts a use of a model, and of the base whose engine it uses; None if it is not loaded."""
        with self._changed:
            if (model := slot.model) is not None:
                self._uses.update(id(each) for each in (model, model.base) if each is not None)
            return model

    def _release(self, model: ServedModel) -> None:
        with self._changed:
            self._uses.subtract(id(each) for each in (model, model.base) if each is not None)
            for slot in self._slots.values():
                if slot.model is not None and slot.model in (model, model.base):
                    slot.used = self._clock()
            self._changed.notify_all()

    def _retire(self, slot: _Slot) -> None:
        """Takes a model, and the adapters on its engine, out of their places; they are closed once nobody uses them."""
        for each in self._slots.values():
            if each.model is not None and (each is slot or each.source.base == slot.name):
                self._retired.append(each.model)
                each.model = None
        self._changed.notify_all()

    def _load_once(self, slot: _Slot) -> None:
        """Loads a model that requests wait for; an adapter may have needed it meanwhile."""
        try:
            if slot.model is None:
                self._load(slot)
        except SheepOpError:
            raise
        except Exception as error:
            _LOG.error("%s cannot be loaded", slot.name, exc_info=error)
            raise CheckpointError(f"{type(error).__name__}: {error}") from None
        finally:
            with self._changed:
                slot.loading = None

    def _load(self, slot: _Slot) -> None:
        """Loads a model, anew if it is loaded; runs in the thread that loads."""
        if self._is_closed:
            raise ShutdownError("The server is shutting down.")
        with nullcontext() if slot.source.base is None else self._held(self._slots[slot.source.base]) as base:
            about, old, cache, held = self._described(slot), slot.model, 0, 0
            if base is None:
                models = [each.about for each in self._slots.values() if each.source.base is None]
                cache = self._stock.cache_bytes([each.num_bytes for each in models if each is not None])
            else:
                held = self._bytes[id(base)]
            self._stock.require_room(slot.name, about.num_bytes, cache, held)
            self._make_room(slot, about.num_bytes + cache, base)
            loaded = self._stock.read(slot.source, base)
            if base is None and old is not None and loaded.model.device.type != "cpu":
                # There, no memory can be lent, so the old cache must be gone.
                with self._changed:
                    self._retire(slot)
                    self._changed.wait_for(lambda: id(old) not in self._bytes or self._is_closed)
            model = self._stock.serve(slot.name, loaded, base, cache)
            with self._changed:
                self._retire(slot)
                slot.model, slot.about, slot.used = model, about, self._clock()
                self._bytes[id(model)] = about.num_bytes + cache

    @contextmanager
    def _held(self, slot: _Slot) -> Iterator[ServedModel]:
        """Keeps the base of an adapter open within the context; loads it if it is not."""
        while (base := self._retained(slot)) is None:
            self._load(slot)
        try:
            yield base
        finally:
            self._release(base)

    def _described(self, slot: _Slot) -> Description:
        base = None if slot.source.base is None else self._slots[slot.source.base].about
        return self._stock.describe(slot.source, base)

    def _make_room(self, slot: _Slot, size: int, base: ServedModel | None) -> None:
        """Unloads other models, the least recently used first, until there is room; waits until they are closed.

        What the slot has now counts as gone.
        """
        with self._changed:
            while not self._is_closed:
                held = sum(self._bytes.values())
                kept = [each for each in self._slots.values() if each.model is not None]
                leaving = held - sum(self._bytes[id(each.model)] for each in kept)
                own = 0 if slot.model is None else self._bytes[id(slot.model)]
                missing = held - own + size - self._stock.budget
                if missing <= 0:
                    return
                others = [each for each in kept if each.source.base is None and each.model not in (base, slot.model)]
                if missing > leaving and others:
                    last = min(others, key=lambda each: (self._is_wanted(each), each.used))
                    if last.num_waiting and not self._uses[id(last.model)]:
                        self._changed.wait()  # until the requests that it was loaded for have opened it
                    else:
                        self._unload(last, f"to make room for {slot.name}")
                elif leaving:
                    self._changed.wait()
                else:
                    raise ModelTooLargeError(f"The adapters of this model leave no room for {slot.name}. Drop one.")
        raise ShutdownError("The server is shutting down.")

    def _is_wanted(self, slot: _Slot) -> bool:
        return slot.num_waiting > 0 or self._uses[id(slot.model)] > 0

    def _unload(self, slot: _Slot, why: str) -> None:
        _LOG.info("%s was unloaded %s.", slot.name, why)
        slot.keep_alive = None
        self._retire(slot)


def _refusal(name: str, error: SheepOpError) -> ApiError:
    if isinstance(error, ShutdownError):
        return draining()
    if isinstance(error, ModelTooLargeError):
        return ApiError(400, str(error), param="model", code="model_too_large")
    return ApiError(503, f"{name} cannot be loaded: {error}", kind="server_error", code="model_not_loaded")
