"""A model that is split over processes: this one leads, and the others read with their parts what it reads.

Requests, blocks and samples are the leader's affair. The followers hear which tokens a pass reads and which blocks of
the cache they go to, and compute their heads and features of it (`sheepop.parallel.tensor`).
"""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from sheepop.checkpoint import LoadedModel, load_model
from sheepop.core.errors import DeviceError, RanksError, UsageError
from sheepop.generate.blocks import BlockTable, Chunk, Copy
from sheepop.generate.paged_cache import PagedCache
from sheepop.generate.runner import PagedRunner, Reading
from sheepop.model import Transformer
from sheepop.parallel.parts import SharingRanks
from sheepop.parallel.ranks import loss_of_ranks
from sheepop.parallel.tensor import split_to_write

_EVER = timedelta(days=365)  # a server may have nothing to do for long
_ARRIVAL = timedelta(minutes=5)
_ADDRESS = "127.0.0.1"


class Followers:
    """The other processes, on this machine; they end with this one, or when this is closed.

    Raises `DeviceError` for more processes than GPUs.
    """

    def __init__(self, size: int, device: str) -> None:
        if device not in ("cpu", "cuda"):
            raise DeviceError(f"A model is split on cpu or cuda, not on {device}.")
        if device == "cuda" and torch.cuda.device_count() < size:
            raise DeviceError(f"{size} processes need as many GPUs, and this machine has {torch.cuda.device_count()}.")
        if dist.is_initialized():
            raise UsageError("This process already has others that compute with it.")
        self.size, self.device = size, device
        with socket.create_server((_ADDRESS, 0)) as server:
            port = server.getsockname()[1]
        command = [sys.executable, "-m", "sheepop.generate.split_child"]
        # In sessions of their own: Ctrl-C is for the leader, and ends a text, not the processes.
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(size), str(port), device], stdin=subprocess.DEVNULL, start_new_session=True
            )
            for rank in range(1, size)
        ]
        self.close = weakref.finalize(self, _end, self.processes)
        # Of threads that let all of them compute, one does so at a time, from the word to the end of the pass.
        self.turn = threading.RLock()
        self._numbers, self._forgotten = itertools.count(), list[int]()
        join(0, size, port, device)

    def load(self, place: Path, dtype: torch.dtype | None) -> LoadedModel:
        """A model of which every process has a part; raises `ConfigError` for one that cannot be split."""
        number = self._numbered()
        self.tell(load=number, place=str(place), dtype=None if dtype is None else str(dtype).removeprefix("torch."))
        loaded = load_part(place, dtype, self.device)
        loaded.model.led = _Led(self, number)  # type: ignore[assignment]
        weakref.finalize(loaded.model.led, self._forgotten.append, number)
        return loaded

    def runner(self, model: int, owner: object, **cache: Any) -> int:
        """The number of a runner of that model, which the others have too, each with a cache of its own."""
        number = self._numbered()
        weakref.finalize(owner, self._forgotten.append, number)
        self.tell(runner=number, model=model, cache=cache)
        return number

    def tell(self, **message: Any) -> None:
        """Says to all what comes next."""
        with self.turn, _naming_losses():
            broadcast({**message, "forget": [self._forgotten.pop() for _ in range(len(self._forgotten))]})

    def _numbered(self) -> int:
        return next(self._numbers)


class _Led:
    """What a model that is split knows of the other processes; the copies of the model share it."""

    def __init__(self, followers: Followers, number: int) -> None:
        self.followers, self.number = followers, number

    def __deepcopy__(self, memory: dict[int, Any]) -> _Led:
        return self


def is_led(model: Transformer) -> bool:
    """Whether other processes compute with parts of `model`."""
    return isinstance(getattr(model, "led", None), _Led)


class LeadingRunner(PagedRunner):
    """Reads with this process's part of a model, after it has told the others to do so with theirs.

    `settings` are those of `cache`, for theirs.
    """

    def __init__(self, model: Transformer, cache: PagedCache, settings: dict[str, Any]) -> None:
        super().__init__(model, cache)
        led = model.led
        assert isinstance(led, _Led)
        self._followers = led.followers
        self._number = led.followers.runner(led.number, self, **settings)

    def read(self, reading: Reading, sources: Sequence[Sequence[int] | None] | None = None) -> Tensor:
        """The logits of one pass of all."""
        with self._followers.turn, _naming_losses():
            self._followers.tell(read=self._number, **to_record(reading))
            return super().read(reading, sources)


def paged_runner(model: Transformer, **settings: Any) -> PagedRunner:
    """What reads with `model`, by all processes that have a part of it; `settings` are those of its cache."""
    cache = PagedCache(model, **settings)
    return LeadingRunner(model, cache, settings) if is_led(model) else PagedRunner(model, cache)


def hidden_states(model: Transformer, token_ids: Sequence[int]) -> Tensor:
    """The hidden states (T, D) of one text, read without a cache, by all processes that have a part of `model`."""
    input_ids = torch.tensor([list(token_ids)], device=model.device)
    if not is_led(model):
        return model.hidden_states(input_ids)[0]
    led = model.led
    assert isinstance(led, _Led)
    with led.followers.turn, _naming_losses():
        led.followers.tell(whole=led.number, token_ids=list(token_ids))
        return model.hidden_states(input_ids)[0]


@contextmanager
def _naming_losses() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if (lost := loss_of_ranks(error)) is None:
            raise
        raise RanksError(f"A process with a part of the model was lost. {lost}") from None


def to_record(reading: Reading) -> dict[str, Any]:
    """What a pass reads, as JSON has it."""
    return {
        "copies": [list(copy) for copy in reading.copies],
        "chunks": [[chunk.table.blocks, chunk.start, chunk.count] for chunk in reading.chunks],
        "token_ids": list(reading.token_ids),
        "predicting": list(reading.predicting),
    }


def from_record(record: Mapping[str, Any]) -> Reading:
    """The same read back."""
    chunks = [Chunk(BlockTable("", blocks), start, count) for blocks, start, count in record["chunks"]]
    copies = [Copy(*numbers) for numbers in record["copies"]]
    return Reading(copies, chunks, record["token_ids"], record["predicting"])


def join(rank: int, size: int, port: int, device: str) -> None:
    """Connects this process with the others; raises `DeviceError` when one of them does not come."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    try:
        store = TCPStore(_ADDRESS, port, size, rank == 0, timeout=_ARRIVAL)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_EVER)
    except RuntimeError as error:
        raise DeviceError(f"The {size} processes with parts of the model did not find each other: {error}.") from None


def load_part(place: Path, dtype: torch.dtype | None, device: str) -> LoadedModel:
    """The model in `place` with this process's part of its matrices, on its device."""
    loaded = load_model(place, "cpu", dtype)
    group = dist.group.WORLD
    assert group is not None
    split_to_write(loaded.model, SharingRanks(group, dist.get_rank(), dist.get_world_size()))
    return replace(loaded, model=loaded.model.to(device))


def broadcast(message: dict[str, Any] | None) -> dict[str, Any]:
    """The message of the leader, on all."""
    text = b"" if message is None else json.dumps(message).encode()
    length = torch.tensor(len(text))
    dist.broadcast(length, 0)
    content = torch.empty(int(length), dtype=torch.uint8)
    if message is not None:
        content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(content, 0)
    found: dict[str, Any] = json.loads(content.numpy().tobytes())
    return found


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    if dist.is_initialized():
        dist.destroy_process_group()
    for process in processes:
        process.wait()
