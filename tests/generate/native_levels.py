"""Writes texts with the native kernels of one level, in 1 and in 2 threads, and compares them with the slow reference.

The level is the one that ``SHEEPOP_NATIVE`` names, and a process has only one, so that
``test_native_levels.py`` starts this program once for each. The reference computes in float64 with the weights that are
stored, in PyTorch, and reads every whole text for every token. Where the cache has 16 bits, it rounds keys and values
to them.

Rounding decides between two tokens that are nearly tied, and float32 rounds otherwise than float64; beside rows of int8
inputs have 16 bits, and in a cache of 16 bits a key may become the neighbour of what it becomes in the reference. So
texts are not compared in which a token of the reference won by less than the bound of its weights, as a part of the
largest score; nearly all must be compared. Threads change nothing at all.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor, nn

from sheepop.adapt.quantization import dequantized, quantized
from sheepop.adapt.stored_weight import StoredWeight, kernels_here
from sheepop.adapt.tiles import GROUP
from sheepop.generate import Completion, GenerationConfig, Generator
from sheepop.generate.native_block import NativeBlock
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.probe import watch
from sheepop.tokenizer import CharTokenizer

from .recomputing import RecomputingGenerator

# The products and blocks are large enough for two threads; the rows of the last matrix do not fill its tiles.
SIZES = {"vocab_size": 270, "d_model": 128, "num_layers": 2, "num_heads": 4, "d_ff": 288, "max_seq_len": 64}
ATTENTION: dict[str, dict[str, object]] = {
    "plain": {"position_encoding": "learned", "norm": "layernorm", "activation": "gelu_tanh", "bias": True},
    "grouped queries": {"num_kv_heads": 2, "qk_norm": "head"},
    "sliding windows": {"sliding_window": 6, "sliding_layers": [0]},
    "soft caps": {"attention_soft_cap": 4.0, "logit_soft_cap": 20.0},
    "sinks": {"attention_sinks": True},
    "slopes": {"position_encoding": "alibi"},
    "n-grams": {"ngrams": {"orders": [2, 3], "rows": 64}},
}
COMMON = {"position_encoding": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "tie_weights": False}
PROMPTS = [list(range(20, 51)), [7, 9, 4], list(range(90, 101)), [5], list(range(60, 77))]
CONFIGS = [
    GenerationConfig(max_new_tokens=count, min_new_tokens=count, max_batch_size=3, seed=count, **how)
    for count, how in (
        (8, {"temperature": 0}),
        (3, {"top_p": 0.9}),
        (6, {"top_k": 20}),
        (7, {"temperature": 0}),
        (5, {}),
    )
]
# Bounds of near ties; those of weights that are not named have sums in float32.
BOUND, BOUNDS = 2e-5, {"int8 rows": 1e-3, "float16": 2e-3, "bfloat16": 1e-2}


def in_groups(weight: Tensor, group: int, *, bits: int) -> StoredWeight:
    """A matrix (N, K) whose groups of neighbours have scales and no offsets."""
    largest = 2 ** (bits - 1) - 1
    groups = weight.detach().unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1, keepdim=True) / largest
    codes = (groups / scales).round().to(torch.int8)
    if bits == 8:
        return StoredWeight("int8", codes.flatten(-2), scales[..., 0], torch.float32)
    low, high = codes.view(torch.uint8).chunk(2, -1)
    return StoredWeight("int4", (low & 15 | high << 4).flatten(-2), scales[..., 0], torch.float32)


FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INTEGERS: dict[str, Callable[[Tensor], StoredWeight]] = {
    "int8 rows": lambda weight: quantized(weight, "int8"),
    "int8 in 16s": lambda weight: in_groups(weight, 16, bits=8),
    "int8 in 32s": lambda weight: in_groups(weight, 32, bits=8),
    "int4 in 32s": lambda weight: in_groups(weight, GROUP, bits=4),
    "int4 in 32s with offsets": lambda weight: quantized(weight, "int4"),
}


def network(attention: str, weights: str) -> Transformer:
    """A network whose distribution is far from uniform."""
    model = build_model(ModelConfig(**{**SIZES, **COMMON, **ATTENTION[attention]}), 0).eval().requires_grad_(False)
    draws = torch.Generator().manual_seed(len(attention))
    for parameter in model.parameters():
        parameter += torch.randn(parameter.shape, generator=draws) * (0.15 if parameter.ndim >= 2 else 0.1)
    if weights in FLOATS:
        return model.to(FLOATS[weights])
    matrices = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear | nn.Embedding)]
    made = {weight: nn.Parameter(INTEGERS[weights](weight), requires_grad=False) for weight in matrices}
    return model.sharing_copy(made)


def expected(model: Transformer, tokenizer: CharTokenizer, bound: float) -> list[Completion]:
    """The texts of the reference, with the number of tokens that won by less than `bound`."""
    exact, stored = copy.deepcopy(dequantized(model)).double(), model.dtype
    rounding: AbstractContextManager[None] = nullcontext()
    if stored != torch.float32:
        names = ("rotated_k", "v")
        rounding = watch(exact, {f"blocks.*.attention.{name}": lambda x: x.to(stored).double() for name in names})
    with rounding, patch("sheepop.generate.sampler._NEAR", bound / torch.finfo(torch.float64).eps):
        return RecomputingGenerator(exact, tokenizer).generate(PROMPTS, CONFIGS)


def differences(attention: str, weights: str, tokenizer: CharTokenizer) -> Iterator[str | None]:
    """Yields for each text that is compared what differs, or None."""
    model = network(attention, weights)
    reference = expected(model, tokenizer, BOUNDS.get(weights, BOUND))
    written = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        generator = Generator(model, tokenizer)
        assert all(type(block) is NativeBlock for block in generator.model.layers)
        written.append(generator.generate(PROMPTS, CONFIGS))
    torch.set_num_threads(1)
    for number, (one, two, right) in enumerate(zip(*written, reference, strict=True)):
        place = f"{weights}, {attention}, text {number}"
        if one != two:
            yield f"{place}: {one} in one thread, {two} in two"
        elif not right.near_ties:
            yield None if one.token_ids == right.token_ids else f"{place}: {one.token_ids}, not {right.token_ids}"


def main() -> None:
    print(kernels_here().words.split(",")[0])
    torch.set_num_threads(1)
    tokenizer = CharTokenizer()
    found = [
        difference
        for attention in ATTENTION
        for weights in (*FLOATS, *INTEGERS)
        for difference in differences(attention, weights, tokenizer)
    ]
    print(len(found))
    wrong = [difference for difference in found if difference is not None]
    print(*wrong[:20], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
