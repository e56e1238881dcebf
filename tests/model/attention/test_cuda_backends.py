"""Attention on a GPU keeps to fused kernels: told on pretended tensors, and measured where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.attention import blocks
from sheepop.model.attention.choose import KERNELS, choose_kernel
from sheepop.model.attention.kernel import AttentionKind, Score
from sheepop.model.attention.stepwise import Stepwise

from ...reading import PieceReader

LENGTH = 64
IDS = (torch.arange(LENGTH)[None] >= torch.tensor([[20], [40]])).long()


def cuda_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """Which of PyTorch's kernels for CUDA the call reaches: ``flash``, ``efficient``, or ``math`` with full scores.

    The constraints are those of ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` for GPUs from 2020 on; dropout
    and a scale are no matter to any of them.
    """
    width, value_width = query.shape[-1], value.shape[-1]
    one_head_count = query.shape[1] == key.shape[1] == value.shape[1]
    groups = enable_gqa and query.shape[1] % key.shape[1] == 0
    rows_touch = all(part.stride(-1) == 1 for part in (query, key, value))
    if not rows_touch or len({query.dtype, key.dtype, value.dtype}) > 1 or 0 in (query.shape[2], key.shape[2]):
        return "math"
    half = query.dtype in (torch.float16, torch.bfloat16)
    square = not is_causal or query.shape[2] == key.shape[2]
    if half and attn_mask is None and square and width == value_width <= 256 and (one_head_count or groups):
        return "flash"
    alignment = 8 if half else 4
    aligned = width % alignment == 0 and value_width % alignment == 0
    masked = attn_mask is None or attn_mask.ndim in (2, 4)
    known = half or query.dtype == torch.float32
    return "efficient" if known and one_head_count and aligned and masked else "math"


class PretendedGpu(TorchFunctionMode):
    """Says of every tensor that it is on a GPU while it stays on the CPU, numbers and all.

    `backends` are the kernels that the calls of attention would reach there, `masks` the bytes of their masks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backends: list[str] = []
        self.masks: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__:
            return torch.device("cuda")
        args, kwargs = tuple(map(_on_cpu, args)), {key: _on_cpu(value) for key, value in (kwargs or {}).items()}
        if func is F.scaled_dot_product_attention:
            self.backends.append(cuda_backend(*args, **kwargs))
            mask = kwargs.get("attn_mask")
            self.masks.append(0 if mask is None else mask.untyped_storage().nbytes())
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value == "cuda")
    return torch.device("cpu") if is_device else value


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    """A GPU without Triton; with it documents and windows without dropout go to FlexAttention."""
    monkeypatch.setattr(blocks, "_has_triton", lambda _: False)
    monkeypatch.setattr("sheepop.model.fused.has_triton", lambda: False)
    with PretendedGpu() as mode:
        yield mode


def network(dtype: torch.dtype, **settings: Any) -> Transformer:
    base = {"vocab_size": 32, "d_model": 64, "num_layers": 1, "num_heads": 4, "max_seq_len": LENGTH, "dropout": 0.0}
    return build_model(ModelConfig(**{**base, "position_encoding": "rope", **settings}), 0).to(dtype)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_training_never_falls_to_full_scores(gpu, dropout, kv_heads, packed, window, dtype, compiled) -> None:
    model = network(dtype, dropout=dropout, num_kv_heads=kv_heads, sliding_window=window).train()
    model.compiled = compiled  # the kernel is chosen as for a compiled network, whose code is then run as it is
    model.hidden_states(torch.zeros_like(IDS), document_ids=IDS if packed else None)
    assert gpu.backends
    assert "math" not in gpu.backends
    if dtype == torch.bfloat16 and window is None:
        assert set(gpu.backends) == {"flash"}
    # No mask has as many entries as a row has pairs.
    assert max(gpu.masks) < LENGTH * LENGTH


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"position_encoding": "alibi"}, {"attention_sinks": True}], ids=str)
@pytest.mark.parametrize("counts", [[12, 12], [12, 9]], ids=["even", "uneven"])
def test_generation_never_falls_to_full_scores(gpu, kv_heads, dtype, settings, counts, monkeypatch) -> None:
    monkeypatch.setattr("sheepop.generate.paged_attention.attends_by_triton", lambda kind: False)
    model = network(dtype, num_kv_heads=kv_heads, **settings).eval()
    reader = PieceReader(model, 2)
    with torch.no_grad():
        reader.read([torch.zeros(count, dtype=torch.long) for count in counts])
        reader.read([torch.zeros(1, dtype=torch.long)] * 2)
    assert len(gpu.backends) == 2  # one for both beginnings, packed, and one for both tokens behind them
    assert "math" not in gpu.backends


def test_groups_of_heads_under_a_mask_or_in_float32_would_leave_the_fused_kernels() -> None:
    """What the calls above avoid: PyTorch's own way with groups, as its constraints are written."""
    q, k = (torch.empty(2, heads, 8, 64, dtype=torch.bfloat16) for heads in (4, 2))
    mask = torch.empty(8, 8, dtype=torch.bool)
    assert cuda_backend(q, k, k, is_causal=True, enable_gqa=True) == "flash"
    assert cuda_backend(q, k, k, mask, enable_gqa=True) == "math"
    assert cuda_backend(q.float(), k.float(), k.float(), is_causal=True, enable_gqa=True) == "math"
    assert cuda_backend(q, q, q, mask) == "efficient"
    assert cuda_backend(q[..., :5], q[..., :5], q[..., :5], mask) == "math"


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def on_the_gpu(dtype: torch.dtype, kv_heads: int, **settings: Any) -> tuple[AttentionKind, list[torch.Tensor]]:
    kind = AttentionKind(head_dim=64, value_dim=64, device=torch.device("cuda"), dtype=dtype, **settings)
    generator = torch.Generator().manual_seed(0)
    heads = (torch.randn(2, count, LENGTH, 64, generator=generator) for count in (4, kv_heads, kv_heads))
    return kind, [part.to("cuda", dtype).requires_grad_() for part in heads]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("kernel", KERNELS[:-1], ids=lambda kernel: kernel.name)
class TestOnTheGpu:
    pytestmark = GPU

    def test_each_kernel_equals_the_steps_in_float32(self, kernel, window, packed, dtype, kv_heads) -> None:
        kind, inputs = on_the_gpu(dtype, kv_heads, window=window)
        sight = kind.sight(LENGTH, document_ids=IDS.cuda() if packed else None)
        if reason := kernel.lacks(kind, sight):
            pytest.skip(f"{kernel.name} {reason}")
        exact = [part.detach().float().requires_grad_() for part in inputs]
        expected = Stepwise().prepare(kind, sight).attend(*exact)
        with sdpa_kernel(FUSED):
            found = kernel.prepare(kind, sight).attend(*inputs)
            gradients = torch.autograd.grad(found.square().sum(), inputs)
        tolerance = 3e-2 if dtype == torch.bfloat16 else 5e-3
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=0)
        for ours, theirs in zip(gradients, torch.autograd.grad(expected.square().sum(), exact), strict=True):
            torch.testing.assert_close(ours.float(), theirs, atol=10 * tolerance, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_runs_on_fused_kernels_alone(dtype, window, packed) -> None:
    kind, inputs = on_the_gpu(dtype, 2, window=window, dropout=0.1)
    sight = kind.sight(LENGTH, document_ids=IDS.cuda() if packed else None)
    with sdpa_kernel(FUSED):
        found = choose_kernel(kind, sight).kernel.prepare(kind, sight).attend(*inputs, Score(dropout=0.1))
        gradients = torch.autograd.grad(found.square().sum(), inputs)
    assert all(part.isfinite().all() for part in (found, *gradients))
