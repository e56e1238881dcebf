"""Writes model directories in the format of Hugging Face's transformers, and reads them back to verify them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from sheepop.checkpoint.card_text import model_card
from sheepop.checkpoint.exchange.choice import differences
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.reader import read_hugging_face, same_values
from sheepop.checkpoint.exchange.tensor_rules import to_theirs
from sheepop.checkpoint.generation_settings import GENERATION, end_ids
from sheepop.checkpoint.lazy_tensor import ForeignModel, LazyTensor, reported
from sheepop.checkpoint.run_directory import CARD
from sheepop.checkpoint.source_directory import CONFIG
from sheepop.checkpoint.weight_files import write_weights
from sheepop.core.errors import CheckpointError
from sheepop.core.files import write_atomic, write_json


def write_hugging_face(
    directory: Path,
    model: ForeignModel,
    family: Family,
    max_shard_bytes: int,
    advance: Callable[[float], None] = lambda _: None,
) -> None:
    """Writes `model` into `directory`, which the caller makes durable; `family` must fit its configuration.

    Weights larger than `max_shard_bytes` are split into several files. Everything is read back from the disk and
    compared bit for bit; raises `CheckpointError` if something differs or the format cannot express it. `advance` is
    called with the number of bytes written or compared, in total twice those of the model.
    """
    tensors = to_theirs(family.tensor_groups(model.config), model.tensors, model.config)
    write_weights(directory, reported(tensors, advance), max_shard_bytes)
    special = _special_ids(model)
    keys = family.write_config(model.config) | special | {"torch_dtype": _main_dtype(tensors)}
    write_json(directory / CONFIG, keys)
    ends = {name: token_id for name, token_id in special.items() if token_id is not None}
    write_json(directory / GENERATION, {**model.generation, **ends})
    model.tokenizer.save(directory, model_max_length=model.config.max_seq_len, tables=False)
    write_atomic(directory / CARD, model_card(model.config, model.tokenizer, model.source, library="transformers"))
    _compare(directory, model, advance)


def _special_ids(model: ForeignModel) -> dict[str, Any]:
    """Returns the ids of special tokens; missing ones are null, because transformers would assume a default id."""
    tokenizer = model.tokenizer
    own = tokenizer.special_id("eos")
    ends = [*end_ids(model.generation, model.config.vocabulary, GENERATION), *([] if own is None else [own])]
    ends = list(dict.fromkeys(ends))
    return {
        "bos_token_id": tokenizer.special_id("bos"),
        "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None,
        "pad_token_id": tokenizer.special_id("pad"),
    }


def _main_dtype(tensors: Mapping[str, LazyTensor]) -> str:
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.num_bytes
    return str(sizes.most_common(1)[0][0]).removeprefix("torch.")


def _compare(directory: Path, model: ForeignModel, advance: Callable[[float], None]) -> None:
    """Raises `CheckpointError` unless `directory` reads back as `model`."""
    try:
        back = read_hugging_face(directory)
    except CheckpointError as error:
        raise CheckpointError(f"The export cannot be read back and was not kept: {error}") from None
    lost = [*differences(model.config, back.config)]
    for name, tensor in model.tensors.items():
        if not same_values(tensor, back.tensors[name]):
            lost.append(name)
        advance(tensor.num_bytes)
    if back.tokenizer.fingerprint() != model.tokenizer.fingerprint():
        lost.append("the tokenizer")
    if lost:
        raise CheckpointError(
            f"The export was read back with other values in {', '.join(lost[:20])} and was not kept. The disk may "
            "be failing, or SheepOp has a bug; please report it."
        )
