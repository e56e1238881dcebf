"""Kernels, bytes, operations and waits of a training step and of a decoded token on a GPU, counted without one.

The step runs on tensors that have shapes and no contents: every operator that reaches the device is a kernel, which
reads its inputs and writes its outputs. Attention and the norm are counted as the fused kernels that CUDA has for them.
``eager`` is that count. ``compiled`` joins what stands between two products into one kernel that reads what comes in
and writes what is used later, as a compiler at its best does within a block.

From both follows a time per token: a product takes its operations at a share of the nominal peak (`--products`,
`--attention`), everything else its bytes at the nominal bandwidth. No launch is counted, no overlap either.

python bench/gpu_counts.py --json bench/results/gpu_counts.json
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter as Counts
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from record import add_json_option, write_record
from sheepop.generate import GenerationConfig, paged_attention, paged_kernels, sampling_kernels
from sheepop.generate import sampler as sampling
from sheepop.generate.blocks import BlockManager, Chunk
from sheepop.generate.paged_cache import PagedCache, reaches_of
from sheepop.generate.runner import with_sampled
from sheepop.model import LossTerms, ModelConfig, Transformer, blank_model, positions
from sheepop.model import fused as fusing
from sheepop.model import logits as chunked
from sheepop.model import loss as losses
from sheepop.model.accounting.cost import num_parameters, training_flops_per_token
from sheepop.model.attention.projections import PackedProjections
from sheepop.train import TrainingConfig
from sheepop.train.optimizers import build
from sheepop.train.optimizers.build import build_optimizers
from sheepop.train.placement import OneDevice
from train_large import shape

PEAK, BANDWIDTH = 989.4e12, 3.35e12  # of an H100 SXM, by its data sheet
MEMORY = 80 << 30
_TRITON = (
    *("attend", "combine", "store", "choose"),
    *("rotate_heads", "multiply_by_silu", "add_and_normalise"),
)
_VIEWS = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "split", "split_with_sizes"}
_VIEWS |= {"unsqueeze", "squeeze", "detach", "alias", "as_strided", "unbind", "chunk", "narrow", "device", "lift_fresh"}
_VIEWS |= {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "is_pinned",
    "sym_size",
    "unflatten",
}


@dataclass(frozen=True)
class Kernel:
    """One launch: what it reads and writes, as (memory, bytes), its operations, and whether it is a product."""

    name: str
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    flops: int = 0
    kind: str = "other"  # or product, or attention

    @property
    def bytes(self) -> int:
        """All that it moves."""
        return sum(size for _, size in (*self.reads, *self.writes))


@dataclass
class Phase:
    """What one part of a step launched, and how often the host waited for the device."""

    kernels: list[Kernel] = field(default_factory=list)
    waits: int = 0


class Counter(TorchDispatchMode):
    """Records the kernels of the phase that is entered by `phase`."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, Phase] = {}
        self._alive: list[Any] = []  # memory that is gone could give its address to other memory
        self._current = Phase()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts what runs inside under `name`."""
        before, self._current = self._current, self.phases.setdefault(name, Phase())
        try:
            with self:
                yield
        finally:
            self._current = before

    def launch(self, name: str, reads: Any, writes: Any, flops: int = 0, kind: str = "other") -> None:
        """Notes a kernel."""
        self._current.kernels.append(Kernel(name, self._memory(reads), self._memory(writes), int(flops), kind))

    def wait(self) -> None:
        """Notes that the host waits."""
        self._current.waits += 1

    def _memory(self, tensors: Any) -> tuple[tuple[int, int], ...]:
        found = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
        self._alive.extend(found)
        sizes = [min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in found]
        return tuple((t.untyped_storage()._cdata, size) for t, size in zip(found, sizes, strict=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator on shapes alone and notes what it would launch."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero"):
            self.wait()
        # No kernel for pretended tensors adds a product of half precision to one in float32.
        adds_exactly = name == "addmm" and "dtype" in func._overloadname
        result = kwargs["out"] if adds_exactly else func(*args, **kwargs)
        if name not in _VIEWS:
            flops = _product_flops(name, args)
            reads = _reads(name, args, kwargs, result)
            self.launch(name, reads, _writes(name, args, result), flops, "product" if flops else "other")
        return result


def _product_flops(name: str, args: Any) -> int:
    if name not in ("mm", "bmm", "addmm", "addmm_"):
        return 0
    left, right = args[-2:] if name in ("mm", "bmm") else args[1:3]
    return 2 * left.numel() * right.shape[-1]


def _reads(name: str, args: Any, kwargs: Any, result: Any) -> Any:
    """Which of an operator's tensors it reads."""
    if name in ("copy_", "_foreach_copy_") or (name in ("addmm", "addmm_") and kwargs.get("beta") == 0):
        return args[1:]
    if name == "embedding":
        return args[1], result  # the rows that are looked up
    if name in ("zeros", "ones", "fill_", "zero_", "zeros_like", "ones_like", "new_zeros", "full", "arange"):
        return ()
    return args


def _writes(name: str, args: Any, result: Any) -> Any:
    """What an operator writes, where it says so or not."""
    if name == "_fused_adamw_":
        return args[0], args[2], args[3]  # weights and both moments
    return args[0] if name.endswith("_") else result


def fused_operations(counter: Counter, *, fused: bool) -> dict[Any, dict[str, Any]]:
    """What CUDA has kernels for, in the place of functions that are taken apart elsewhere; Triton's with `fused`."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            ctx.save_for_backward(q, k, v)
            out = q.new_empty(*q.shape[:-1], v.shape[-1])
            pairs = q.shape[2] * (q.shape[2] + 1) // 2 if causal else q.shape[2] * k.shape[2]
            ctx.flops = 2 * q.shape[0] * q.shape[1] * pairs * (q.shape[3] + v.shape[3])
            ctx.out = out
            counter.launch("attention", (q, k, v), out, ctx.flops, "attention")
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            inputs = ctx.saved_tensors
            found = tuple(torch.empty_like(x) for x in inputs)
            counter.launch("attention_backward_delta", (ctx.out, grad), ())
            counter.launch("attention_backward", (*inputs, grad), found, 2.5 * ctx.flops, "attention")
            return (*found, None)

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            out = torch.empty_like(x)
            counter.launch("rms_norm", (x, weight), out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            found = torch.empty_like(x), torch.empty_like(weight)
            counter.launch("rms_norm_backward", (x, weight, grad), found[0])
            counter.launch("rms_norm_weight_sum", (x, grad), found[1])
            return found

    class Rotation(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            ctx.save_for_backward(cos, sin)
            out = torch.empty_like(x)
            counter.launch("rotation", (x, cos, sin), out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            found = torch.empty_like(grad)
            counter.launch("rotation_backward", (grad, *ctx.saved_tensors), found)
            return found, None, None

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, is_causal: bool = False, **__: Any) -> Tensor:
        return Attention.apply(q, k, v, is_causal)

    def norm(x: Tensor, _: Any, weight: Tensor, __: Any = None) -> Tensor:
        return Norm.apply(x, weight)

    replaced: dict[Any, dict[str, Any]] = {
        F: {"scaled_dot_product_attention": attention, "rms_norm": norm},
        build: {"_fused": lambda groups: True},
        sys.modules["torch.nn.utils.clip_grad"]: {"_has_foreach_support": lambda tensors, device: True},
        sys.modules["torch.optim.optimizer"]: {"_get_fused_kernels_supported_devices": lambda: ["meta"]},
    }
    if fused:
        replaced[positions] = {"_fused_rotation": Rotation.apply}
    return replaced


def joined(kernels: list[Kernel], later: set[int]) -> list[Kernel]:
    """What stands between two products as one kernel; `later` is the memory that is read after these kernels."""
    needed: list[set[int]] = [later]
    for kernel in reversed(kernels):
        needed.append(needed[-1] | {memory for memory, _ in kernel.reads})
    needed.reverse()  # needed[i]: what is read from kernel i on
    found: list[Kernel] = []
    group: list[Kernel] = []

    def close(end: int) -> None:
        if not group:
            return
        made = {memory for kernel in group for memory, _ in kernel.writes}
        reads: dict[int, int] = {}
        written: set[int] = set()
        writes: dict[int, int] = {}
        for kernel in group:
            for memory, size in kernel.reads:
                if memory not in written:
                    reads[memory] = max(reads.get(memory, 0), size)
            written |= {memory for memory, _ in kernel.writes}
            for memory, size in kernel.writes:
                writes[memory] = max(writes.get(memory, 0), size)
        kept = {memory: size for memory, size in writes.items() if memory in needed[end] and memory in made}
        found.append(Kernel("joined", tuple(reads.items()), tuple(kept.items())))
        group.clear()

    for place, kernel in enumerate(kernels):
        if kernel.kind == "other":
            group.append(kernel)
        else:
            close(place)
            found.append(kernel)
    close(len(kernels))
    return found


def count_loss(counter: Counter, model: ModelConfig, tokens: int, *, fused: bool) -> None:
    """The loss and its gradients as a GPU makes them; with `fused` as Triton's kernels do."""

    def one_kernel(logits: Tensor, labels: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        counter.launch("softmax_and_gradient", (logits, logits, labels), logits)
        return logits.new_empty(2, dtype=torch.float32), logits.new_empty(len(logits), dtype=torch.float32)

    rows = chunked.chunk_rows
    replaced = {
        chunked: {
            "_cuda_memory": lambda: MEMORY,
            "chunk_rows": lambda count, size, dtype, device, limit: rows(count, size, dtype, "cuda", limit),
            "adds_exactly": lambda device: True,
            "fuses": lambda device: fused,
        },
        losses: {"losses_then_gradients": one_kernel} if fused else {},
        torch: {"is_autocast_enabled": lambda device: False, "autocast": lambda *_, **__: nullcontext()},
    }
    with replacing(replaced), torch.no_grad(), counter.phase("loss"):
        hidden = torch.empty(tokens, model.d_model, device="meta", dtype=torch.bfloat16)
        weight = torch.empty(model.vocabulary, model.d_model, device="meta")
        labels = torch.empty(tokens, device="meta", dtype=torch.long)
        cast = torch.empty_like(weight, dtype=torch.bfloat16)
        context = SimpleNamespace(needs_input_grad=(True, True, False, False), mark_non_differentiable=lambda _: None)
        how = {"places": slice(None), "memory": chunked.LossMemory()}
        arguments = (hidden, weight, None, None, labels, cast, how, LossTerms())
        losses._LinearCrossEntropy.forward(context, *arguments)
        for gradient in context.gradients[:2]:
            gradient.mul_(torch.empty((), device="meta"))


@contextmanager
def replacing(attributes: dict[Any, dict[str, Any]]) -> Iterator[None]:
    """Sets attributes for the time inside."""
    with ExitStack() as stack:
        for owner, values in attributes.items():
            for name, value in values.items():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        yield


def pretended(model: ModelConfig) -> Transformer:
    """The network without contents."""
    with torch.device("meta"):
        return blank_model(model).to("meta")


def count_step(model: ModelConfig, rows: int, *, fused: bool) -> dict[str, Phase]:
    """One optimizer step of `rows` sequences in bf16, part by part."""
    counter = Counter()
    network_model = pretended(model)
    network = OneDevice(network_model, precision="bf16", device="meta")

    def move() -> None:
        for optimizer in optimizers:
            optimizer.step()
        network.zero_gradients()

    with replacing(fused_operations(counter, fused=fused)):
        optimizers = build_optimizers(network_model, TrainingConfig(precision="bf16"))
        ids = torch.empty(rows, model.max_seq_len, dtype=torch.long, device="meta")
        with counter.phase("weights to bf16"):
            network.begin_step()
        with counter.phase("blocks forward"):
            hidden = network.hidden_states({"input_ids": ids})
        count_loss(counter, model, ids.numel(), fused=fused)
        with counter.phase("blocks backward"):
            torch.autograd.backward(hidden, torch.empty_like(hidden))
        head = network_model.lm_head.weight
        head.grad = torch.empty_like(head) if head.grad is None else head.grad
        with counter.phase("clipping"):
            network.clip(1.0)
        gradients = [(parameter, parameter.grad) for parameter in network_model.parameters()]
        move()  # the first step makes the moments
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with counter.phase("optimizer"):
            move()
    counter.phases["optimizer"].waits += 1  # a flag on the GPU masks the step; loss and norm are read behind it
    return counter.phases


class Launches(dict[str, Any]):
    """What Triton kernels have in their place: a launch with any grid is noted, with the tensors that it is given."""

    def __init__(self, counter: Counter, name: str) -> None:
        super().__init__()
        self._counter, self._name = counter, name

    def __missing__(self, grid: tuple[int, ...]) -> Any:
        def launch(*tensors: Any, **_: Any) -> None:
            # A token is stored in one place of the cache, which is among the tensors.
            reads, writes = (tensors[:3], tensors[0]) if self._name == "store" else (tensors, ())
            self._counter.launch(self._name, reads, writes, kind="attention" if self._name == "attend" else "other")

        return launch


def count_decoding(model: ModelConfig, texts: int, context: int) -> dict[str, Phase]:
    """One decoded token for each of `texts` sequences in bf16, with `context` tokens in the cache of each."""
    counter = Counter()
    network = pretended(model).to(torch.bfloat16).eval()
    network.pack_projections()
    sampler = sampling.Sampler(torch.zeros(model.vocabulary, dtype=torch.bool, device="meta"), [2])
    vars(sampler)["_forbidden_ids"] = torch.zeros(1, dtype=torch.long)  # a model reads that once
    rows = [sampling.Row(GenerationConfig(), context, seed) for seed in range(texts)]

    def upload(tensor: Tensor, device: torch.device) -> Tensor:
        counter.launch("copy to the device", tensor, ())
        return torch.empty_like(tensor, device=device)

    def download(tensor: Tensor) -> None:
        counter.launch("copy to the host", tensor, ())

    replaced = fused_operations(counter, fused=False)
    replaced |= {owner: {"fuses": lambda device: True} for owner in (fusing, paged_kernels, sampling_kernels)}
    replaced[sampling_kernels]["upload"] = replaced.setdefault(paged_attention, {})["upload"] = upload
    replaced[sampling] = {"upload": upload, "Download": download}
    replaced[torch] = {"is_autocast_enabled": lambda device: False}
    replaced[PackedProjections] = {"holds": lambda packed, layers: True}  # what has no contents has no address either
    kernels = SimpleNamespace(**{name: Launches(counter, name) for name in _TRITON})
    modules = ("generate.triton_attention", "generate.triton_sampling", "model.triton_kernels")
    with (
        patch.dict(sys.modules, {f"sheepop.{name}": kernels for name in modules}),
        replacing(replaced),
        torch.no_grad(),
    ):
        reaches, blocks = reaches_of(network), texts * (context // 16 + 1)
        manager = BlockManager([blocks] * len(reaches), reaches, 16)
        cache = PagedCache(network, manager.num_blocks, 16)
        chunks = list[Chunk]()
        for _ in range(texts):
            table = manager.open([0])
            manager.reserve(table, context + 1)
            manager.advance(table, [0] * context, context)
            chunks.append(Chunk(table, context, 1))
        cache.make_room(chunks, [])
        static = cache.static_pass(texts, model.max_seq_len)
        static.fill([0] * texts, chunks)
        sampled = torch.empty(texts, dtype=torch.long, device="meta")
        with counter.phase("input"):
            static.fill([-1 - row for row in range(texts)], chunks)
            static.input_ids.copy_(with_sampled(static.input_ids, sampled))
        cache.static = static
        network.hidden_states(static.input_ids, cache=cache)  # makes tables that stay
        with counter.phase("network"):
            logits = network.read_out(network.hidden_states(static.input_ids, cache=cache))[:, 0]
        with counter.phase("sampler"):
            sampled = sampler.sample(logits, rows).token_ids
    return counter.phases


def summary(phases: dict[str, Phase], compiled: bool, shares: dict[str, float]) -> dict[str, Any]:
    """Counts and seconds of every part, eager or with joined blocks."""
    names = list(phases)
    result: dict[str, Any] = {}
    for place, name in enumerate(names):
        kernels = phases[name].kernels
        if compiled and name.startswith("blocks"):
            later = {
                memory for other in names[place + 1 :] for kernel in phases[other].kernels for memory, _ in kernel.reads
            }
            kernels = joined(kernels, later | {memory for memory, _ in kernels[-1].writes})
        flops = {kind: sum(k.flops for k in kernels if k.kind == kind) for kind in ("product", "attention")}
        moved = sum(k.bytes for k in kernels if k.kind == "other")
        seconds = sum(flops[kind] / (PEAK * shares[kind]) for kind in flops) + moved / BANDWIDTH
        # A product of few rows waits for its weights.
        waiting = sum(
            max(0.0, k.bytes / BANDWIDTH - k.flops / (PEAK * shares[k.kind])) for k in kernels if k.kind != "other"
        )
        result[name] = {
            "kernels": len(kernels),
            "bytes": sum(k.bytes for k in kernels),
            "bytes_outside_products": moved,
            "flops": sum(flops.values()),
            "waits": phases[name].waits,
            "seconds": seconds + waiting,
        }
    return result


def main() -> None:
    """Counts, prints the table, and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="sequences of a step")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--products", type=float, default=0.75, help="share of the nominal peak that products reach")
    parser.add_argument("--attention", type=float, default=0.45, help="share that attention reaches")
    add_json_option(parser)
    options = parser.parse_args()
    model = shape(options)
    shares = {"product": options.products, "attention": options.attention}
    tokens = options.rows * options.length
    needed = training_flops_per_token(model, options.length) * tokens
    result: dict[str, Any] = {"parameters": num_parameters(model), "tokens": tokens, "shares": shares, "step": {}}
    print(f"{result['parameters']:,} parameters, {options.rows} x {options.length} tokens, bf16, on an H100 by count")
    for name, compiled, fused in (
        ("eager", False, False),
        ("eager, fused loss", False, True),
        ("compiled, fused loss", True, True),
    ):
        parts = summary(count_step(model, options.rows, fused=fused), compiled, shares)
        total = {key: sum(part[key] for part in parts.values()) for key in next(iter(parts.values()))}
        share = needed / PEAK / total["seconds"]
        result["step"][name] = {"parts": parts, "total": total, "share_of_nominal_peak": share}
        print(f"\n{name}: {total['seconds'] / tokens * 1e6:.2f} us a token, {share:.1%} of the nominal peak")
        print(f"{'part':<18}{'kernels':>9}{'GB':>9}{'TFLOP':>9}{'waits':>7}{'us/token':>10}")
        for part, row in (*parts.items(), ("all", total)):
            print(
                f"{part:<18}{row['kernels']:>9,}{row['bytes'] / 1e9:>9,.1f}{row['flops'] / 1e12:>9,.1f}"
                f"{row['waits']:>7}{row['seconds'] / tokens * 1e6:>10.2f}"
            )
    result["decoding"] = {}
    context = min(1023, options.length - 1)
    for texts in (1, 32):
        counted = count_decoding(model, texts, context)
        parts = summary(counted, False, shares)
        result["decoding"][texts] = parts
        by_name = Counts(kernel.name for kernel in counted["network"].kernels)
        by_layer = by_name.total() / model.num_layers
        print(f"\na token for each of {texts} texts of {context:,}: {by_layer:.1f} kernels a layer")
        for part, row in parts.items():
            print(f"{part:<18}{row['kernels']:>9,}{row['bytes'] / 1e9:>9,.2f} GB{row['waits']:>7} waits")
        print(", ".join(f"{name} {count}" for name, count in by_name.most_common()))
    write_record(options.json, result)


if __name__ == "__main__":
    main()
