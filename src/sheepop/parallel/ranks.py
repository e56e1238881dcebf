"""The processes of one run: who is there, and what they say to each other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sheepop.core.errors import ConfigError, DeviceError
from sheepop.parallel.config import ParallelConfig

_PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Ranks:
    """This process as number `rank` of `size` that run the same command; `restarts` counts how often all began anew."""

    rank: int = 0
    size: int = 1
    restarts: int = 0

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
    def joined(cls, device: str) -> Iterator[Ranks]:
        """The ranks that torchrun started this process with, connected until the block ends; alone without torchrun.

        A GPU belongs to one rank, by its number on the machine. Raises `ConfigError` for an environment that only
        some of torchrun's variables are in, and `DeviceError` for more ranks than GPUs, or a rank that never comes.
        """
        size = _variable("WORLD_SIZE", 1)
        if size == 1:
            yield cls(restarts=_variable("TORCHELASTIC_RESTART_COUNT", 0))
            return
        local = _variable("LOCAL_RANK")
        if device == "cuda":
            if local >= torch.cuda.device_count():
                raise DeviceError(
                    f"Rank {local} of this machine has no GPU: it has {torch.cuda.device_count()}. Start as many "
                    "processes as there are GPUs."
                )
            torch.cuda.set_device(local)
        elif device != "cpu":
            raise DeviceError(f"Several ranks compute on cpu or cuda, not on {device}.")
        try:
            # Messages between hosts go through gloo; a GPU's tensors through NCCL.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=_PATIENCE)
        except (RuntimeError, ValueError) as error:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise DeviceError(
                f"The {size} ranks did not find each other at {place}: {error}. See that all of them were started, and "
                "that no other program uses the port."
            ) from None
        try:
            yield cls(_variable("RANK"), size, _variable("TORCHELASTIC_RESTART_COUNT", 0))
        finally:
            dist.destroy_process_group()

    def check(self, config: ParallelConfig) -> None:
        """Raises `ConfigError` when a layout asks for other ranks than there are."""
        if config.data is not None and config.data != self.size:
            raise ConfigError(
                f"parallel.data = {config.data} asks for as many processes, and there are {self.size}. Start the "
                f"command with: torchrun --nproc-per-node {config.data} -m sheepop ..."
            )
        if config.shard is not None and self.size % config.shard:
            raise ConfigError(
                f"parallel.shard = {config.shard} does not divide the {self.size} ranks into whole groups. Use a "
                f"divisor of {self.size}."
            )

    def told(self, value: Any) -> Any:
        """What the first rank gives here, as JSON, on all of them."""
        if not self.are_several:
            return value
        text = json.dumps(value).encode() if self.is_first else b""
        length = torch.tensor(len(text))
        dist.broadcast(length, 0)
        content = torch.empty(int(length), dtype=torch.uint8)
        if self.is_first and text:
            content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(content, 0)
        return json.loads(bytes(content.tolist()))

    def greatest(self, value: float) -> float:
        """The greatest of what all ranks give."""
        if not self.are_several:
            return value
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the tensors of all ranks, the same bits on each."""
        if not self.are_several:
            return tensor
        found = tensor.clone()
        dist.all_reduce(found)
        return found

    def disagreeing(self, fingerprint: str) -> list[int]:
        """The ranks whose `fingerprint`, 64 hexadecimal digits, is not that of the first."""
        if not self.are_several:
            return []
        mine = torch.tensor(list(bytes.fromhex(fingerprint)), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine)
        return [rank for rank, other in enumerate(found) if not torch.equal(other, found[0])]


def _variable(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            f"The environment has WORLD_SIZE = {os.environ.get('WORLD_SIZE')}, but {name} = {text}. Start ranks with "
            "torchrun, which sets both."
        ) from None
