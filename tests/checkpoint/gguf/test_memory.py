"""A model larger than the memory that is left becomes a GGUF file and comes back, one tensor at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Prints the bytes of the model, and how many of memory of its own the process needs at most; mapped files do not count.
PROGRAM = """
import math
import threading
from pathlib import Path

import torch
from sheepop.checkpoint.expected_tensors import expected_tensors
from sheepop.checkpoint.gguf.reader import read_gguf
from sheepop.checkpoint.gguf.writer import write_gguf
from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.safetensors_file import write_safetensors
from sheepop.model import ModelConfig
from sheepop.tokenizer import CharTokenizer

def anonymous():
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

config = ModelConfig(
    vocab_size=128, d_model=128, num_layers=60, num_heads=4, d_ff=1024, max_seq_len=32, dropout=0.0,
    position_encoding="rope", norm="rmsnorm", activation="swiglu", bias=False,
)
shapes = expected_tensors(config)
tensors = {
    name: LazyTensor(shape, torch.float32, lambda shape=shape: torch.full(shape, 0.5)) for name, shape in shapes.items()
}
torch.ones(8, 8) @ torch.ones(8, 8)
before, most, done = anonymous(), 0, threading.Event()
def watch():
    global most
    while not done.wait(0.005):
        most = max(most, anonymous())
threading.Thread(target=watch).start()
try:
    write_gguf("toy.gguf", config, tensors, CharTokenizer(), dtype="q8_0", name="toy")
    write_safetensors(Path("toy.safetensors"), read_gguf("toy.gguf").tensors)
finally:
    done.set()
print(4 * sum(math.prod(shape) for shape in shapes.values()), most - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc, which Linux has")
def test_neither_direction_needs_the_memory_of_the_model(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    size, needed = map(int, done.stdout.split())
    assert needed < size / 6, f"{needed / 1e6:.0f} MB of memory for a model of {size / 1e6:.0f} MB"
