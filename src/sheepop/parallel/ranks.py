"""The processes of one run: who is there, what they say to each other, and that an error is said once."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sheepop.core.errors import ConfigError, DeviceError, EndedWithOthers, RanksError, SheepOpError, first_few
from sheepop.parallel.rendezvous import ARRIVAL, arrival, has_agent, met, unfound, variable

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

_PATIENCE = timedelta(hours=2)
_POLL_SECONDS = 0.02
_LINGER = timedelta(seconds=3)
_FAILED = "failed"


class Ranks:
    """This process as number `rank` of `size` that run the same command; `restarts` counts how often all began anew.

    Words go through a store that the launcher keeps, from any thread and as slowly as may be; tensors through the
    process group, once `connect` has made it.
    """

    def __init__(self, rank: int = 0, size: int = 1, restarts: int = 0, store: Store | None = None) -> None:
        self.rank, self.size, self.restarts = rank, size, restarts
        self._store = store
        self._turns = 0
        self._gathered: Board | None = None

    @property
    def are_several(self) -> bool:
        """Whether there is anybody else."""
        return self.size > 1

    @property
    def is_first(self) -> bool:
        """Whether this one speaks and writes for all of them."""
        return self.rank == 0

    @classmethod
    @contextmanager
    def joined(cls) -> Iterator[Ranks]:
        """The ranks that torchrun started this process with, until the block ends; alone without torchrun.

        Of the errors and signals that end several of them one is said, by the first that met one; the others end in
        silence. They wait for each other for as many seconds as the environment's ``SHEEPOP_ARRIVAL`` says, or five
        minutes. Raises `ConfigError` for an environment that has only some of torchrun's variables, and `DeviceError`
        where the others are not found.
        """
        restarts = variable("TORCHELASTIC_RESTART_COUNT", 0)
        if variable("WORLD_SIZE", 1) == 1:
            yield cls(restarts=restarts)
            return
        from torch import distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        rank, size, _ = (variable(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        within = arrival()
        # The store of the launcher outlives a restart, and with it what was said before.
        ranks = cls(rank, size, restarts, PrefixStore(f"attempt-{restarts}", met(rank, size, within)))
        try:
            with ranks._speaking_once():
                ranks._await_arrival(within)
                yield ranks
                board = ranks.board("end")
                board.arrive()
                if ranks.is_first and not has_agent():
                    board.await_all(size, within=_LINGER)  # who still reads: the store ends with this process
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
                f"({ARRIVAL}). See that all of them were started, and what those said."
            )

    def connect(self, device: str) -> None:
        """Makes the process group, in which a GPU belongs to one rank, by its number on the machine.

        Raises `DeviceError` for more ranks than GPUs, or a rank that never comes.
        """
        if not self.are_several:
            return
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
        # What hosts say goes through gloo, a GPU's tensors through NCCL.
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=_PATIENCE)
        except (RuntimeError, ValueError) as error:
            raise DeviceError(unfound(error)) from None

    def told(self, value: Any) -> Any:
        """What the first rank gives here, as JSON, on all of them, however long it takes."""
        if self._store is None:
            return value
        board = self.board(f"told-{self._turn()}")
        if self.is_first:
            board.tell("value", json.dumps(value))
        return json.loads(board.hear("value"))

    def gathered(self, value: Any) -> list[Any]:
        """What every rank gives here, as JSON, on all of them."""
        if self._store is None:
            return [value]
        board = self.board(f"gathered-{self._turn()}")
        board.tell(str(self.rank), json.dumps(value))
        found = [json.loads(board.hear(str(rank))) for rank in range(self.size)]
        if self._gathered is not None:  # which all have read, since they have told this
            self._gathered.forget(str(self.rank))
        self._gathered = board
        return found

    def shared(self, count: int, compute: Callable[[range], Sequence[Any]]) -> list[Any]:
        """What `count` pieces of work give, in their order, on all ranks, each of which computes some in a row.

        `compute` gives what the pieces with the numbers that it hears give, as JSON.
        """
        here = range(count * self.rank // self.size, count * (self.rank + 1) // self.size)
        own = compute(here)
        if len(own) != len(here):
            raise ValueError(f"{len(here)} pieces of work gave {len(own)} results")
        return [each for told in self.gathered(list(own)) for each in told]

    @contextmanager
    def first_ahead(self) -> Iterator[None]:
        """A block that the first rank goes through before the others, who find what it has stored."""
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
        """A block that all ranks get through before any goes on."""
        yield
        if self._store is not None:
            board = self.board(f"together-{self._turn()}")
            board.arrive()
            board.await_all(self.size)

    def board(self, name: str) -> Board:
        """Where ranks leave word for each other about one piece of work, beside what else they do."""
        from torch._C._distributed_c10d import HashStore

        return Board(self._store or HashStore(), name)

    def greatest(self, value: float) -> float:
        """The greatest of what all ranks give."""
        if not self.are_several:
            return value
        import torch
        import torch.distributed as dist

        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of the tensors of all ranks, the same bits on each."""
        if not self.are_several:
            return tensor
        import torch.distributed as dist

        found = tensor.clone()
        dist.all_reduce(found)
        return found

    def require_same(self, what: str, fingerprint: str) -> None:
        """Raises `ConfigError` on a rank whose `fingerprint` is not that of the first one."""
        if self.told(fingerprint) != fingerprint:
            raise ConfigError(
                f"{what} not those of the first rank. Start all ranks with the same command and the same files."
            )

    def _turn(self) -> int:
        self._turns += 1
        return self._turns

    @contextmanager
    def _speaking_once(self) -> Iterator[None]:
        assert self._store is not None
        board = self.board("errors")
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            # A launcher ends the others when one has ended, and then that one has said why.
            if isinstance(error, SystemExit) and (code := self._code_of(board)) is not None:
                raise EndedWithOthers(code) from None
            found = loss_of_ranks(error) or error
            try:
                speaks = board.arrive() == 1
                board.fail(found)
                if self.is_first and not has_agent():
                    board.await_all(self.size, within=_LINGER, heeds_failures=False)  # the store ends with this process
            except RuntimeError:  # it has gone with the first rank, and nobody knows whether that said why
                speaks = self.rank == 1
            if not speaks:
                _linger()
                raise EndedWithOthers(_exit_code(found)) from None
            if isinstance(found, SheepOpError) and not self.is_first:
                found.args = (f"Rank {self.rank} of {self.size}, on {socket.gethostname()}: {found}",)
            raise found from (None if found is not error else error.__cause__)

    def _code_of(self, board: Board) -> int | None:
        try:
            code = board.failed()
            if code is not None:
                board.arrive()
        except RuntimeError:
            return None
        return code


ALONE = Ranks()


class Board:
    """Words about one piece of work, in the store of the ranks. Waiting takes no part in what the group computes.

    Whoever waits is ended by `SystemExit` as soon as some rank has failed at anything.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self.is_given_up = False

    def tell(self, key: str, text: str) -> None:
        """Leaves `text` there."""
        self._store.set(f"{self._name}/{key}", text)

    def hear(self, key: str) -> str:
        """Waits for what another rank leaves there."""
        self._wait(lambda: self.has(key))
        return bytes(self._store.get(f"{self._name}/{key}")).decode()

    def has(self, key: str) -> bool:
        """Whether something was left there."""
        return bool(self._store.check([f"{self._name}/{key}"]))

    def forget(self, key: str) -> None:
        """Takes away what this rank has left there."""
        self._store.delete_key(f"{self._name}/{key}")

    def arrive(self) -> int:
        """Says that this rank has done its part; how many have."""
        return int(self._store.add(f"{self._name}/arrived", 1))

    def count(self) -> int:
        """How many have arrived."""
        return int(self._store.add(f"{self._name}/arrived", 0))

    def await_all(self, count: int, *, within: timedelta | None = None, heeds_failures: bool = True) -> bool:
        """Waits until `count` ranks have arrived, for a time if one is given; whether they have."""
        return self._wait(lambda: self.count() >= count, within, heeds_failures=heeds_failures)

    def fail(self, error: BaseException) -> None:
        """Says that this rank has failed, so that nobody waits for it."""
        self._store.set(_FAILED, str(_exit_code(error)))

    def failed(self) -> int | None:
        """The exit code of a rank that has failed, if one has."""
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


def _linger() -> None:
    """Waits to be ended: the launcher ends all ranks when one has, which should be the one that speaks."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # without a word
    time.sleep(_LINGER.total_seconds())


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SheepOpError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def loss_of_ranks(error: BaseException) -> RanksError | None:
    """What to say of an error of messages between ranks, and None of any other; gloo raises no kind of its own."""
    import torch.distributed as dist

    text = str(error)
    is_of_gloo = isinstance(error, RuntimeError) and ("gloo" in text or "Connection closed by peer" in text)
    if not isinstance(error, dist.DistError) and not is_of_gloo:
        return None
    return RanksError(
        f"The other ranks were lost ({_reason(error)}). One of them was ended, or the network between them failed."
    )


def _reason(error: BaseException) -> str:
    """What happened, of a message that begins with a place in gloo's source and goes on with advice."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).partition(". ")[0]
