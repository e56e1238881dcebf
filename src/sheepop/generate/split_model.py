"""A model split over processes by tensor parallelism: this process leads, and the others run this module.

Only the leader has requests, block tables and a sampler. It sends the followers the tokens and cache blocks of each
pass, and every process computes its heads and features (`sheepop.parallel.tensor`).
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
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from sheepop.checkpoint import LoadedModel, load_model
from sheepop.core.errors import DeviceError, RanksError, SheepOpError, UsageError
from sheepop.generate.blocks import BlockTable, Chunk, Copy
from sheepop.generate.paged_cache import PagedCache
from sheepop.generate.runner import PagedRunner, Reading, hidden_states, paged_runner
from sheepop.model import Transformer
from sheepop.parallel.parts import SharingRanks
from sheepop.parallel.ranks import loss_of_ranks
from sheepop.parallel.tensor import split_to_write

_EVER = timedelta(days=365)  # a server may be idle for a long time
_ARRIVAL = timedelta(minutes=5)
_ADDRESS = "127.0.0.1"


class Followers:
    """The follower processes, until `close` or the end of this one; raises `DeviceError` for too few GPUs."""

    def __init__(self, size: int, device: str) -> None:
        if device not in ("cpu", "cuda"):
            raise DeviceError(f"A model is split on cpu or cuda, not on {device}.")
        if device == "cuda" and torch.cuda.device_count() < size:
            raise DeviceError(f"{size} processes need as many GPUs, and this machine has {torch.cuda.device_count()}.")
        if dist.is_initialized():
            raise UsageError("This process already belongs to a process group.")
        self.size, self.device = size, device
        with socket.create_server((_ADDRESS, 0)) as server:
            port = server.getsockname()[1]
        command = [sys.executable, "-m", "sheepop.generate.split_model"]
        # They have their own sessions, so that Ctrl-C reaches only the leader.
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(size), str(port), device], stdin=subprocess.DEVNULL, start_new_session=True
            )
            for rank in range(1, size)
        ]
        self.close = weakref.finalize(self, _end, self.processes)
        # A thread keeps this lock from the message to the end of the pass, so that passes never interleave.
        self._lock = threading.RLock()
        self._numbers, self._forgotten = itertools.count(), list[int]()
        join(0, size, port, device)

    def load(self, path: Path, dtype: torch.dtype | None) -> LoadedModel:
        """Loads a part of the model in every process; raises `ConfigError` for a model that cannot be split."""
        led, name = _Led(self), None if dtype is None else str(dtype).removeprefix("torch.")
        with self.together(load=led.number, path=str(path), dtype=name):
            loaded = load_part(path, dtype, self.device)
        loaded.model.led = led  # type: ignore[assignment]
        return loaded

    def number(self, owner: object) -> int:
        """Returns a new number of a model or runner, which the followers free with `owner`."""
        number = next(self._numbers)
        weakref.finalize(owner, self._forgotten.append, number)
        return number

    @contextmanager
    def together(self, **message: Any) -> Iterator[None]:
        """Sends a message to all followers; within the block this process takes its part in what they then compute.

        Adds the numbers of models and runners that they can free. Raises `RanksError` if a process is lost.
        """
        with self._lock:
            try:
                broadcast({**message, "forget": [self._forgotten.pop() for _ in range(len(self._forgotten))]})
                yield
            except RuntimeError as error:
                if (lost := loss_of_ranks(error)) is None:
                    raise
                raise RanksError(f"A process with a part of the model was lost. {lost}") from None


class _Led:
    """The followers of a split model, and its number there; copies of the model share this object."""

    def __init__(self, followers: Followers) -> None:
        self.followers, self.number = followers, followers.number(self)

    def __deepcopy__(self, memory: dict[int, Any]) -> _Led:
        return self

    def runner(self, model: Transformer, cache: PagedCache, settings: dict[str, Any]) -> PagedRunner:
        return _LeadingRunner(model, cache, self, settings)

    def whole(self, token_ids: Sequence[int]) -> AbstractContextManager[None]:
        """Within the block the followers compute the hidden states of one text."""
        return self.followers.together(whole=self.number, token_ids=list(token_ids))


class _LeadingRunner(PagedRunner):
    """Runs a split model: sends each pass to the followers, whose caches have `settings`, and computes its own part."""

    def __init__(self, model: Transformer, cache: PagedCache, led: _Led, settings: dict[str, Any]) -> None:
        super().__init__(model, cache)
        self._followers, self._number = led.followers, led.followers.number(self)
        with self._followers.together(runner=self._number, model=led.number, cache=settings):
            pass

    def read(self, reading: Reading, sources: Any = None) -> Tensor:
        with self._followers.together(read=self._number, **to_record(reading)):
            return super().read(reading, sources)

    def states(self, reading: Reading) -> Tensor:
        with self._followers.together(states=self._number, **to_record(reading)):
            return super().states(reading)


def to_record(reading: Reading) -> dict[str, Any]:
    """Converts the input of a pass to JSON."""
    return {
        "copies": [list(copy) for copy in reading.copies],
        "chunks": [[chunk.table.blocks, chunk.start, chunk.count] for chunk in reading.chunks],
        "token_ids": list(reading.token_ids),
        "predicting": list(reading.predicting),
    }


def from_record(record: Mapping[str, Any]) -> Reading:
    """Restores the input of a pass from `to_record`."""
    chunks = [Chunk(BlockTable("", blocks), start, count) for blocks, start, count in record["chunks"]]
    copies = [Copy(*numbers) for numbers in record["copies"]]
    return Reading(copies, chunks, record["token_ids"], record["predicting"])


def join(rank: int, size: int, port: int, device: str) -> None:
    """Connects this process with the others; raises `DeviceError` if one of them does not connect in time."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    try:
        store = TCPStore(_ADDRESS, port, size, rank == 0, timeout=_ARRIVAL)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_EVER)
    except RuntimeError as error:
        raise DeviceError(f"The {size} processes with parts of the model did not find each other: {error}.") from None


def load_part(path: Path, dtype: torch.dtype | None, device: str) -> LoadedModel:
    """Loads the model at `path` with this process's part of its matrices, on its device."""
    loaded = load_model(path, "cpu", dtype)
    group = dist.group.WORLD
    assert group is not None
    split_to_write(loaded.model, SharingRanks(group, dist.get_rank(), dist.get_world_size()))
    return replace(loaded, model=loaded.model.to(device))


def broadcast(message: dict[str, Any] | None) -> dict[str, Any]:
    """Sends the leader's message to all processes; followers pass None. Returns the message."""
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


def _follow(rank: int, size: int, port: int, device: str) -> None:
    """Executes the messages of the leader until the leader is gone."""
    join(rank, size, port, device)
    models: dict[int, Transformer] = {}
    runners: dict[int, PagedRunner] = {}
    while True:
        message = broadcast(None)
        for number in message["forget"]:
            models.pop(number, None)
            runners.pop(number, None)
        if "load" in message:
            dtype = None if message["dtype"] is None else getattr(torch, message["dtype"])
            # The leader raises the same error for a model that cannot be read or split.
            with suppress(SheepOpError):
                models[message["load"]] = load_part(Path(message["path"]), dtype, device).model
        elif "runner" in message:
            runners[message["runner"]] = paged_runner(models[message["model"]], **message["cache"])
        else:
            with torch.inference_mode(), torch.autocast(device, enabled=False):
                if "whole" in message:
                    hidden_states(models[message["whole"]], [message["token_ids"]])
                elif "states" in message:
                    runners[message["states"]].states(from_record(message))
                else:
                    runners[message["read"]].read(from_record(message))


if __name__ == "__main__":
    try:
        own_rank, num_processes, store_port = map(int, sys.argv[1:4])
        _follow(own_rank, num_processes, store_port, sys.argv[4])
    except RuntimeError as error:
        if loss_of_ranks(error) is None:
            raise
