"""A model split over processes by tensor parallelism: this process leads, and the others run this module.

Only the leader has requests, block tables and a sampler. It sends the followers the tokens and cache blocks of each
pass, and every process computes its heads, features and logits (`sheepop.parallel.tensor`). If the leader reads hidden
states apart from a pass, it sends them too. A message is a row of integers: its kind, the number of the model or
runner, the numbers that the followers can free, and what to do.
"""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from sheepop.checkpoint import LoadedModel, load_model
from sheepop.core.errors import DeviceError, RanksError, SheepOpError, UsageError
from sheepop.generate.blocks import BlockTable, Chunk, Copy
from sheepop.generate.paged_cache import PagedCache
from sheepop.generate.runner import PagedRunner, Reading, hidden_states
from sheepop.model import Transformer
from sheepop.parallel.parts import SharingRanks, give_part
from sheepop.parallel.ranks import loss_of_ranks
from sheepop.parallel.tensor import split_to_write

_EVER = timedelta(days=365)  # a server may be idle for a long time
_ARRIVAL = timedelta(minutes=5)
_ADDRESS = "127.0.0.1"
_ROOM = 8192  # integers of a message that all processes expect; the rest of a longer one follows
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # that hidden states may have


class _Kind(IntEnum):
    """What the followers do with a message."""

    LOAD = 0
    PREPARE = 1
    READ = 2
    STATES = 3
    WHOLE = 4
    LOGITS = 5
    CAPTURE = 6


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
        self._computing: int | None = None
        self._numbers, self._forgotten = itertools.count(), list[int]()
        join(0, size, port, device)

    def load(self, path: Path, dtype: torch.dtype | None) -> LoadedModel:
        """Loads a part of the model in every process; raises `ConfigError` for a model that cannot be split."""
        led, name = _Led(self), None if dtype is None else str(dtype).removeprefix("torch.")
        with self.together(_Kind.LOAD, led.number, _letters({"path": str(path), "dtype": name})):
            loaded = load_part(path, dtype, self.device)
        loaded.model.led = led  # type: ignore[assignment]
        head = loaded.model.lm_head
        head.led = led  # type: ignore[assignment]
        give_part(head, _LeadingHead, head.ranks, {})  # type: ignore[arg-type]
        return loaded

    def number(self, owner: object) -> int:
        """Returns a new number of a model or runner, which the followers free with `owner`."""
        number = next(self._numbers)
        weakref.finalize(owner, self._forgotten.append, number)
        return number

    @property
    def are_computing(self) -> bool:
        """Whether this thread is in a block of `together`."""
        return self._computing == threading.get_ident()

    @contextmanager
    def together(self, kind: _Kind, number: int, content: Sequence[int]) -> Iterator[None]:
        """Sends a message to all followers; within the block this process takes its part in what they then compute.

        Raises `RanksError` if a process is lost, or if this one fails within the block. Both end all followers.
        """
        with self._lock:
            if not self.close.alive:
                raise RanksError("The processes with parts of the model have ended. Load the model in a new process.")
            try:
                forgotten = [self._forgotten.pop() for _ in range(len(self._forgotten))]
                broadcast([kind, number, len(forgotten), *forgotten, *content])
                self._computing = threading.get_ident()  # of all threads only this one has the lock
                yield
            except BaseException as error:
                if kind == _Kind.LOAD and isinstance(error, SheepOpError):
                    raise  # all processes refuse the model before they exchange anything
                # The followers may wait for a part of the pass that this process will never compute.
                self.close()
                if not isinstance(error, Exception):
                    raise
                if (lost := loss_of_ranks(error)) is not None:
                    raise RanksError(f"A process with a part of the model was lost. {lost}") from None
                raise RanksError(
                    f"A pass of the split model failed in the leading process: {type(error).__name__}: {error}"
                ) from error
            finally:
                self._computing = None


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
        return self.followers.together(_Kind.WHOLE, self.number, token_ids)


class _LeadingHead(nn.Module):
    """The leader's part of the output head; for hidden states that the followers lack, it sends them first."""

    led: _Led

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the logits of the whole vocabulary."""
        followers = self.led.followers
        if followers.are_computing:  # a pass, in which every process has the hidden states
            return cast(Tensor, super().forward(hidden))
        about = [_DTYPES.index(hidden.dtype), *hidden.shape]
        with followers.together(_Kind.LOGITS, self.led.number, about):
            hidden = hidden.contiguous()
            dist.broadcast(hidden, 0)
            return cast(Tensor, super().forward(hidden))


class _LeadingRunner(PagedRunner):
    """Runs a split model: sends each pass to the followers, whose caches have `settings`, and computes its own part."""

    def __init__(self, model: Transformer, cache: PagedCache, led: _Led, settings: dict[str, Any]) -> None:
        super().__init__(model, cache)
        self._followers, self._number = led.followers, led.followers.number(self)
        with self._followers.together(_Kind.PREPARE, self._number, [led.number, *_letters(settings)]):
            pass

    def prepare(self, most: int) -> None:
        with self._followers.together(_Kind.CAPTURE, self._number, [most]):
            super().prepare(most)

    def read(self, reading: Reading, sampled: Tensor | None = None) -> Tensor:
        num_sampled = 0 if sampled is None else len(sampled)
        with self._followers.together(_Kind.READ, self._number, [num_sampled, *packed(reading)]):
            if sampled is not None:
                dist.broadcast(sampled, 0)
            return super().read(reading, sampled)

    def states(self, reading: Reading) -> Tensor:
        with self._followers.together(_Kind.STATES, self._number, packed(reading)):
            return super().states(reading)


def packed(reading: Reading) -> list[int]:
    """Converts the input of a pass to integers."""
    copies, chunks, token_ids, predicting = reading.copies, reading.chunks, reading.token_ids, reading.predicting
    numbers = [len(copies), len(chunks), len(chunks[0].table.blocks), len(token_ids)]
    for copy in copies:
        numbers += copy
    for table, start, count in chunks:
        numbers += start, count
        for blocks in table.blocks:
            numbers.append(len(blocks))
            numbers += [-1 if block is None else block for block in blocks]
    return [*numbers, *token_ids, *predicting]


def unpacked(numbers: Sequence[int]) -> Reading:
    """Restores the input of a pass from `packed`."""
    rest = iter(numbers)
    num_copies, num_chunks, num_kinds, num_tokens = islice(rest, 4)
    copies = [Copy(*islice(rest, 3)) for _ in range(num_copies)]
    chunks = []
    for _ in range(num_chunks):
        start, count = islice(rest, 2)
        lists = [list(islice(rest, next(rest))) for _ in range(num_kinds)]
        table = BlockTable("", [[None if block < 0 else block for block in blocks] for blocks in lists])
        chunks.append(Chunk(table, start, count))
    return Reading(copies, chunks, list(islice(rest, num_tokens)), list(rest))


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


def broadcast(numbers: Sequence[int] | None) -> list[int]:
    """Sends the leader's integers to all processes; followers pass None. Returns them."""
    room = torch.zeros(_ROOM, dtype=torch.long)
    if numbers is not None:
        room[: len(numbers) + 1] = torch.tensor([len(numbers), *numbers[: _ROOM - 1]])
    dist.broadcast(room, 0)
    count, *found = room[: int(room[0]) + 1].tolist()
    if count > len(found):
        more = torch.empty(count - len(found), dtype=torch.long)
        if numbers is not None:
            more.copy_(torch.tensor(numbers[len(found) :]))
        dist.broadcast(more, 0)
        found += more.tolist()
    return found


def _letters(record: dict[str, Any]) -> list[int]:
    """A record as the bytes of its JSON."""
    return list(json.dumps(record).encode())


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
        kind, number, num_forgotten, *content = broadcast(None)
        for forgotten in content[:num_forgotten]:
            models.pop(forgotten, None)
            runners.pop(forgotten, None)
        del content[:num_forgotten]
        if kind == _Kind.LOAD:
            given = json.loads(bytes(content))
            dtype = None if given["dtype"] is None else getattr(torch, given["dtype"])
            # The leader raises the same error for a model that cannot be read or split.
            with suppress(SheepOpError):
                models[number] = load_part(Path(given["path"]), dtype, device).model
        elif kind == _Kind.PREPARE:
            model, *letters = content
            runners[number] = PagedRunner(models[model], PagedCache(models[model], **json.loads(bytes(letters))))
        else:
            with torch.inference_mode(), torch.autocast(device, enabled=False):
                if kind == _Kind.WHOLE:
                    hidden_states(models[number], [content])
                elif kind == _Kind.LOGITS:
                    hidden = torch.empty(content[1:], dtype=_DTYPES[content[0]], device=device)
                    dist.broadcast(hidden, 0)
                    models[number].lm_head(hidden)
                elif kind == _Kind.STATES:
                    runners[number].states(unpacked(content))
                elif kind == _Kind.CAPTURE:
                    runners[number].prepare(*content)
                else:
                    num_sampled, *rest = content
                    sampled = torch.empty(num_sampled, dtype=torch.long, device=device) if num_sampled else None
                    if sampled is not None:
                        dist.broadcast(sampled, 0)
                    runners[number].read(unpacked(rest), sampled)


if __name__ == "__main__":
    try:
        own_rank, num_processes, store_port = map(int, sys.argv[1:4])
        _follow(own_rank, num_processes, store_port, sys.argv[4])
    except RuntimeError as error:
        if loss_of_ranks(error) is None:
            raise
