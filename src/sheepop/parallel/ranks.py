"""The processes of one run: how they join, exchange words and tensors, and report an error once."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from sheepop import __version__
from sheepop.core.device import resolve_device
from sheepop.core.errors import (
    ENDING_SIGNALS,
    ConfigError,
    DeviceError,
    EndedWithOthers,
    Interrupted,
    RanksError,
    SheepOpError,
    first_few,
)
from sheepop.parallel.rendezvous import ARRIVAL, arrival, has_agent, met, unfound, variable

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

_PATIENCE = timedelta(hours=2)
_POLL_SECONDS = 0.02
_LINGER = timedelta(seconds=3)
_FAILED = "failed"


class Ranks:
    """This process as number `rank` of `size` that run the same command, after `restarts` restarts of all of them.

    Words go through a store, from any thread and without a time limit; tensors go through the process group that
    `connect` makes.
    """

    def __init__(self, rank: int = 0, size: int = 1, restarts: int = 0, store: Store | None = None) -> None:
        self.rank, self.size, self.restarts = rank, size, restarts
        self._store = store
        self._turns = 0
        self._gathered: Board | None = None

    @property
    def are_several(self) -> bool:
        """Whether there is more than one rank."""
        return self.size > 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes for all."""
        return self.rank == 0

    @classmethod
    @contextmanager
    def joined(cls) -> Iterator[Ranks]:
        """Joins the ranks that torchrun started, until the block ends; without torchrun this process is alone.

        If several ranks end by errors or signals, only the first to fail reports its own. They wait for each other at
        the start for the seconds in the environment's ``SHEEPOP_ARRIVAL``, or five minutes. Raises `ConfigError` if
        some of torchrun's variables are missing, and `DeviceError` if the ranks do not find each other.
        """
        restarts = variable("TORCHELASTIC_RESTART_COUNT", 0)
        if variable("WORLD_SIZE", 1) == 1:
            yield cls(restarts=restarts)
            return
        from torch import distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        rank, size, _ = (variable(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        within = arrival()
        # The launcher's store outlives a restart, with the words of earlier attempts.
        ranks = cls(rank, size, restarts, PrefixStore(f"attempt-{restarts}", met(rank, size, within)))
        try:
            with ranks._speaking_once():
                ranks._await_arrival(within)
                yield ranks
                board = ranks.board("end")
                board.arrive()
                if ranks.is_first and not has_agent():
                    board.await_all(size, within=_LINGER)  # others may still read; the store ends with this process
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _await_arrival(self, within: timedelta) -> None:
        board = self.board("arrival")
        board.tell(str(self.rank), "")
        board.arrive()
        if not board.await_all(self.size, within=within):
            missing = [f"rank {rank}" for rank in range(self.size) if not board.has(str(rank))]
            raise DeviceError(
                f"Of {self.size} ranks {first_few(missing, 3)} did not come within {within.total_seconds():g} seconds "
                f"({ARRIVAL}). Check that all of them were started, and read their output."
            )

    def connect(self, name: str) -> str:
        """Makes the process group, and returns the device `name`; of several GPUs each rank uses its local number's.

        Raises `DeviceError` if there is no such device, if there are fewer GPUs than ranks, or if a rank never comes.
        """
        device = resolve_device(name)  # which sets what cuBLAS needs for determinism, before CUDA starts
        if not self.are_several:
            return device
        import torch
        import torch.distributed as dist

        local = variable("LOCAL_RANK")
        if device == "cuda":
            if local >= torch.cuda.device_count():
                raise DeviceError(
                    f"Rank {local} of this machine has no GPU: it has {torch.cuda.device_count()}. Start as many "
                    "processes as there are GPUs."
                )
            torch.cuda.set_device(local)
        elif device != "cpu":
            raise DeviceError(f"Several ranks compute on cpu or cuda, not on {device}.")
        # Gloo exchanges tensors in host memory, NCCL those on GPUs.
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=_PATIENCE)
        except (RuntimeError, ValueError) as error:
            raise DeviceError(unfound(error)) from None
        return device

    def told(self, value: Any) -> Any:
        """Returns the first rank's `value`, a JSON value, on all ranks; waits without a time limit."""
        if self._store is None:
            return value
        board = self.board(f"told-{self._turn()}")
        if self.is_first:
            board.tell("value", json.dumps(value))
        return json.loads(board.hear("value"))

    def gathered(self, value: Any) -> list[Any]:
        """Returns the `value`, a JSON value, of every rank, on all ranks."""
        if self._store is None:
            return [value]
        board = self.board(f"gathered-{self._turn()}")
        board.tell(str(self.rank), json.dumps(value))
        found = [json.loads(board.hear(str(rank))) for rank in range(self.size)]
        if self._gathered is not None:  # all ranks have read the previous values, since they have given these
            self._gathered.forget(str(self.rank))
        self._gathered = board
        return found

    def shared(self, count: int, compute: Callable[[range], Sequence[Any]]) -> list[Any]:
        """Divides `count` pieces of work among the ranks; returns all results, in order, on all ranks.

        `compute` takes the numbers of some pieces and returns their results as JSON values.
        """
        here = range(count * self.rank // self.size, count * (self.rank + 1) // self.size)
        own = compute(here)
        if len(own) != len(here):
            raise ValueError(f"{len(here)} pieces of work gave {len(own)} results")
        return [each for results in self.gathered(list(own)) for each in results]

    @contextmanager
    def first_ahead(self) -> Iterator[None]:
        """Runs the block on the first rank before the others, so that they find the files it has written."""
        if self._store is None:
            yield
            return
        board = self.board(f"ahead-{self._turn()}")
        if not self.is_first:
            board.hear("done")
        yield
        if self.is_first:
            board.tell("done", "")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Waits at the end of the block until all ranks have come to it."""
        yield
        if self._store is not None:
            board = self.board(f"together-{self._turn()}")
            board.arrive()
            board.await_all(self.size)

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """Lets all ranks end after a signal to one of them; the same signal may come to the others late, once more."""
        try:
            yield
        except Interrupted:
            if self.are_several and threading.current_thread() is threading.main_thread():
                for number in ENDING_SIGNALS:
                    signal.signal(number, partial(_swallow_once, before=signal.getsignal(number)))
            raise

    def board(self, name: str) -> Board:
        """Returns the board with this name, the same on all ranks, which any thread may use."""
        from torch._C._distributed_c10d import HashStore

        return Board(self._store or HashStore(), name)

    def greatest(self, value: float) -> float:
        """Returns the greatest `value` of all ranks."""
        if not self.are_several:
            return value
        import torch
        import torch.distributed as dist

        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def total(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the tensors of all ranks, with the same bits on each."""
        if not self.are_several:
            return tensor
        import torch.distributed as dist

        found = tensor.clone()
        dist.all_reduce(found)
        return found

    def require_agreement(self, settings: Mapping[str, Any]) -> None:
        """Raises `ConfigError` on a rank whose code or settings differ from those of the first rank."""
        if not self.are_several:
            return
        given = json.dumps(settings, sort_keys=True, default=str)
        for what, here in (("The files of SheepOp here are", _code()), ("The settings given here are", given)):
            if self.told(here) != here:
                raise ConfigError(
                    f"{what} not those of the first rank. Start all ranks with the same command and the same files."
                )

    def _turn(self) -> int:
        self._turns += 1
        return self._turns

    @contextmanager
    def _speaking_once(self) -> Iterator[None]:
        board = self.board("errors")
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            # A launcher ends the other ranks when one has ended; that one has reported the error.
            if isinstance(error, SystemExit) and (code := self._code_of(board)) is not None:
                raise EndedWithOthers(code) from None
            found = loss_of_ranks(error) or error
            try:
                speaks = board.arrive() == 1
                board.fail(found)
                if self.is_first and not has_agent():
                    board.await_all(self.size, within=_LINGER, heeds_failures=False)  # the store ends with this process
            except RuntimeError:  # the store has ended with the first rank, which may not have reported the error
                speaks = self.rank == 1
            if not speaks:
                _linger()
                raise EndedWithOthers(_exit_code(found)) from None
            if isinstance(found, SheepOpError) and not self.is_first:
                found.args = (f"Rank {self.rank} of {self.size}, on {socket.gethostname()}: {found}",)
            raise found from (None if found is not error else error.__cause__)

    def _code_of(self, board: Board) -> int | None:
        try:
            if (code := board.failed()) is not None:
                board.arrive()
        except RuntimeError:
            return None
        return code


ALONE = Ranks()


class Board:
    """Words of ranks about one piece of work, in their store; no collective of the process group takes part.

    Waiting raises `SystemExit` as soon as some rank has failed at anything.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self.is_given_up = False

    def tell(self, key: str, text: str) -> None:
        """Stores `text` under `key`."""
        self._store.set(f"{self._name}/{key}", text)

    def hear(self, key: str) -> str:
        """Waits for the text under `key` and returns it."""
        self._wait(lambda: self.has(key))
        return bytes(self._store.get(f"{self._name}/{key}")).decode()

    def has(self, key: str) -> bool:
        """Whether there is a text under `key`."""
        return bool(self._store.check([f"{self._name}/{key}"]))

    def forget(self, key: str) -> None:
        """Deletes the text under `key`."""
        self._store.delete_key(f"{self._name}/{key}")

    def arrive(self) -> int:
        """Counts this rank as arrived, and returns how many have arrived."""
        return int(self._store.add(f"{self._name}/arrived", 1))

    def count(self) -> int:
        """Returns how many ranks have arrived."""
        return int(self._store.add(f"{self._name}/arrived", 0))

    def await_all(self, count: int, *, within: timedelta | None = None, heeds_failures: bool = True) -> bool:
        """Waits until `count` ranks have arrived, or for the time `within`; returns whether they have."""
        return self._wait(lambda: self.count() >= count, within, heeds_failures=heeds_failures)

    def fail(self, error: BaseException) -> None:
        """Stores that this rank has failed, which ends every rank that waits."""
        self._store.set(_FAILED, str(_exit_code(error)))

    def failed(self) -> int | None:
        """Returns the exit code of a rank that has failed; None if all are well."""
        return int(bytes(self._store.get(_FAILED))) if self._store.check([_FAILED]) else None

    def _wait(
        self, is_there: Callable[[], bool], within: timedelta | None = None, *, heeds_failures: bool = True
    ) -> bool:
        started = time.monotonic()
        while not is_there():
            if heeds_failures and (code := self.failed()) is not None:
                raise SystemExit(code)
            if self.is_given_up:
                raise RanksError("Another rank was lost, so its part was not waited for.")
            if within is not None and time.monotonic() - started > within.total_seconds():
                return False
            time.sleep(_POLL_SECONDS)
        return True


def _code() -> str:
    """A checksum of the program: its version and every source file of the package."""
    import torch

    found = hashlib.blake2b(f"{__version__} {torch.__version__}".encode(), digest_size=16)
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def _swallow_once(number: int, frame: FrameType | None, *, before: Any) -> None:
    """Swallows one late copy of the signal, then restores the handler."""
    signal.signal(number, before)


def _linger() -> None:
    """Waits for the launcher to end this rank, so that the rank with the error is the first to end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends the process without a message
    time.sleep(_LINGER.total_seconds())


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SheepOpError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def loss_of_ranks(error: BaseException) -> RanksError | None:
    """Returns an error that reports lost ranks if `error` is a failed exchange, else None; gloo has no class for it."""
    import torch.distributed as dist

    text = str(error)
    is_of_gloo = isinstance(error, RuntimeError) and ("gloo" in text or "Connection closed by peer" in text)
    if not isinstance(error, dist.DistError) and not is_of_gloo:
        return None
    # The text may start with a place in gloo's source, and go on with advice.
    reason = re.sub(r"^\[[^]]*\] ", "", text.splitlines()[0]).partition(". ")[0]
    return RanksError(f"The other ranks were lost ({reason}). One of them was ended, or the network failed.")
