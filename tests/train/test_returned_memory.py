"""Memory between the micro-batches of a step on a CPU, as the system counts the pages that a process has in use."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")

# Each of two micro-batches frees 100 MB below a piece that stays; the growth that the second one finds, for a model
# whose vocabulary does not count as large and for one whose does.
PROGRAM = """
import torch
from sheepop.core.device import keep_freed_memory
from sheepop.model import ModelConfig, build_model, logits
from sheepop.train.placement import OneDevice

assert keep_freed_memory("cpu")
model = build_model(ModelConfig(vocab_size=64, d_model=16, num_layers=1, num_heads=2, d_ff=16, max_seq_len=8), seed=0)
kept = []


class Loss:
    def back(self):
        return None


for large in (2**28, 1):
    logits._LARGE, resident = large, []

    def pass_of(number, batch, network):
        resident.append(int(open("/proc/self/statm").read().split()[1]) * 4096)
        freed = torch.ones(25_000_000)
        kept.append(torch.ones(1000))
        return Loss()

    OneDevice(model, precision="fp32", device="cpu").compute([None, None], pass_of)
    print(resident[1] - resident[0])

logits._LARGE = 1
for is_trained in (True, False):
    placement = OneDevice(model.requires_grad_(is_trained), precision="fp32", device="cpu")
    freed = torch.ones(25_000_000)
    kept.append(torch.ones(1000))
    del freed
    before = int(open("/proc/self/statm").read().split()[1]) * 4096
    placement.zero_gradients()
    print(before - int(open("/proc/self/statm").read().split()[1]) * 4096)
"""


def test_a_model_with_a_large_vocabulary_keeps_no_freed_memory_between_micro_batches() -> None:
    kept = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=kept, capture_output=True, text=True, check=True)
    small, large, of_trained, of_frozen = map(int, done.stdout.split())
    assert large < 10_000_000 and small > 90_000_000
    # And none after a step, if it does not train the output projection.
    assert of_trained < 10_000_000 and of_frozen > 90_000_000
