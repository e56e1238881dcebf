"""A follower process: it has one part of a split model and does what the leader sends."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

from sheepop.core.errors import SheepOpError
from sheepop.generate.paged_cache import PagedCache
from sheepop.generate.runner import PagedRunner
from sheepop.generate.split_model import broadcast, from_record, hidden_states, join, load_part
from sheepop.model import Transformer
from sheepop.parallel.ranks import loss_of_ranks


def follow(rank: int, size: int, port: int, device: str) -> None:
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
            with contextlib.suppress(SheepOpError):
                models[message["load"]] = load_part(Path(message["path"]), dtype, device).model
        elif "runner" in message:
            model = models[message["model"]]
            runners[message["runner"]] = PagedRunner(model, PagedCache(model, **message["cache"]))
        elif "whole" in message:
            with torch.inference_mode(), torch.autocast(device, enabled=False):
                hidden_states(models[message["whole"]], message["token_ids"])
        else:
            with torch.inference_mode(), torch.autocast(device, enabled=False):
                runners[message["read"]].read(from_record(message))


if __name__ == "__main__":
    try:
        own_rank, num_processes, store_port = map(int, sys.argv[1:4])
        follow(own_rank, num_processes, store_port, sys.argv[4])
    except RuntimeError as error:
        if loss_of_ranks(error) is None:
            raise
