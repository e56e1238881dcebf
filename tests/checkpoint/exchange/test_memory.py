"""A model larger than the memory that is left passes through in both directions, one tensor at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.safetensors_file import write_safetensors
from sheepop.tokenizer import CharTokenizer

D, F, LAYERS = 128, 1024, 30
# Prints how many bytes of memory of its own the process needs at most; mapped files do not count.
PROGRAM = """
import threading
from pathlib import Path
from sheepop.jobs.exchange import export_model, import_model

def anonymous():
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

before, most, done = anonymous(), 0, threading.Event()
def watch():
    global most
    while not done.wait(0.002):
        most = max(most, anonymous())
threading.Thread(target=watch).start()
try:
    import_model("theirs", "ours", max_shard_size="LIMIT")
    export_model("ours", "back", max_shard_size="LIMIT")
finally:
    done.set()
print(most - before)
"""

# Prints the bytes of its own memory, and the bytes read and written, that a process needs to open a model and use it.
OPENING = """
from pathlib import Path
import torch
from sheepop.checkpoint import load_model

def counted():
    status, io = (Path(f"/proc/self/{name}").read_text() for name in ("status", "io"))
    own = 1024 * int(status.split("RssAnon:")[1].split()[0])
    return [own, *(int(io.split(f"{name}: ")[1].split()[0]) for name in ("rchar", "wchar"))]

load_model("small").model(torch.zeros(1, 8, dtype=torch.long))  # loads all code
before = counted()
loaded = load_model("theirs")
loaded.model(torch.zeros(1, 8, dtype=torch.long))
print(*(after - first for after, first in zip(counted(), before)))
"""


def write_llama(directory: Path, layers: int = LAYERS) -> int:
    """Writes a Llama in shards of a layer each and returns the bytes of its weights."""
    shapes = {"model.embed_tokens.weight": (128, D), "model.norm.weight": (D,)}
    shapes |= {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(layers)
        for name, shape in {
            **{f"self_attn.{letter}_proj": (D, D) for letter in "qkvo"},
            **{f"mlp.{name}_proj": (F, D) for name in ("gate", "up")},
            "mlp.down_proj": (D, F),
            **{f"{name}_layernorm": (D,) for name in ("input", "post_attention")},
        }.items()
    }
    directory.mkdir()
    places = {name: f"model-{name.split('.')[2] if '.layers.' in name else 'rest'}.safetensors" for name in shapes}
    for file in set(places.values()):
        shard = {
            name: LazyTensor(shape, torch.float32, lambda shape=shape: torch.full(shape, 0.5))
            for name, shape in shapes.items()
            if places[name] == file
        }
        write_safetensors(directory / file, shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {
        "model_type": "llama", "vocab_size": 128, "hidden_size": D, "intermediate_size": F, "num_attention_heads": 4,
        "num_hidden_layers": layers, "max_position_embeddings": 32, "tie_word_embeddings": True,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    CharTokenizer().save(directory)
    return sum(4 * torch.Size(shape).numel() for shape in shapes.values())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc, which Linux has")
@pytest.mark.parametrize("limit", ["1GB", "10MB"])
def test_neither_direction_needs_the_memory_of_the_model_in_one_file_or_several(tmp_path: Path, limit: str):
    size = write_llama(tmp_path / "theirs")
    program = PROGRAM.replace("LIMIT", limit)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("ours", "back"):
        assert (len(list((tmp_path / name).glob("*.safetensors"))) > 1) == (limit == "10MB")
    needed = int(done.stdout)
    assert needed < size / 6, f"{needed / 1e6:.0f} MB of memory for a model of {size / 1e6:.0f} MB"


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="bytes are counted by /proc, which Linux has")
def test_a_model_is_opened_without_a_copy_in_memory_or_on_the_disk(tmp_path: Path):
    size = write_llama(tmp_path / "theirs")
    write_llama(tmp_path / "small", layers=1)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # each thread has memory of its own
    done = subprocess.run(
        [sys.executable, "-c", OPENING], capture_output=True, text=True, check=False, cwd=tmp_path, env=one_thread
    )
    assert done.returncode == 0, done.stderr
    memory, read, written = map(int, done.stdout.split())
    assert memory < size / 5 and read < size / 20 and written < size / 20, (size, memory, read, written)
