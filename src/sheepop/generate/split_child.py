"""What runs in a process that has a part of a model which another one leads."""

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
    """Does what the leader says, until that is gone."""
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
            # What cannot be read or split is refused by the leader in the same way.
            with contextlib.suppress(SheepOpError):
                models[message["load"]] = load_part(Path(message["place"]), dtype, device).model
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
        number, count, place = map(int, sys.argv[1:4])
        follow(number, count, place, sys.argv[4])
    except RuntimeError as error:
        if loss_of_ranks(error) is None:
            raise
