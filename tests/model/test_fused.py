"""What a GPU computes in one kernel: the same numbers as the operations one by one, compiled here for a CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from sheepop.core.machine import find_compiler, has_python_headers
from sheepop.model import LossTerms, ModelConfig, build_model, loss, row_losses
from sheepop.model.fused import fused, fuses
from sheepop.model.loss import linear_cross_entropy, linear_log_probabilities
from sheepop.model.norms import add_and_normalise, build_norm, scaling_of
from sheepop.model.positions import rotary_tables, rotate, rotate_by_triton

N, D, V = 24, 8, 50
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


def chunk(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, V, generator=generator).mul_(3).to(dtype), torch.randint(V, (N,), generator=generator)


@pytest.mark.parametrize("terms", [LossTerms(), LossTerms(z_loss=0.01, label_smoothing=0.2)])
@pytest.mark.parametrize("soft_cap", [None, 2.5])
def test_losses_at_once_are_those_in_steps(terms: LossTerms, soft_cap: float | None) -> None:
    z, labels = chunk(torch.float64)
    at_once, in_steps = z.clone(), z.clone()
    with torch.no_grad():
        found = row_losses._losses_then_gradients_at_once(at_once, labels, terms, soft_cap, torch.float64)
        expected = row_losses._losses_then_gradients(in_steps, labels, terms, soft_cap, torch.float64)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(at_once, in_steps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("soft_cap", [None, 2.5])
def test_weighted_gradients_are_those_of_autograd(dtype: torch.dtype, soft_cap: float | None) -> None:
    """Also for labels that some other columns have."""
    z, labels = chunk(dtype)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.linspace(-2.0, 3.0, N, dtype=exact)
    leaf = z.double().requires_grad_()
    capped = leaf if soft_cap is None else soft_cap * (leaf / soft_cap).tanh()
    log_sum = capped.logsumexp(1)
    (weights.double() * (capped.gather(1, labels[:, None])[:, 0] - log_sum)).sum().backward()
    for columns in (slice(0, V), slice(0, 20), slice(20, V)):
        for function in (row_losses._weighted_gradients, row_losses._weighted_gradients_at_once):
            part = z[:, columns].clone()
            with torch.no_grad():
                function(part, labels - columns.start, log_sum.detach().to(exact), weights, soft_cap, exact)
            error = 1e-12 if dtype == torch.float64 else 0.02
            torch.testing.assert_close(part.double(), leaf.grad[:, columns], rtol=error, atol=error)
    for function in (row_losses._label_and_sum, row_losses._label_and_sum_at_once):
        with torch.no_grad():
            found = function(z.clone(), labels, soft_cap, exact)
        torch.testing.assert_close(found[1].double(), log_sum.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            found[0].double(), capped.detach().gather(1, labels[:, None])[:, 0], rtol=1e-6, atol=1e-6
        )


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Functions are fused on a CPU too; the source of what was compiled."""
    from torch._inductor.utils import run_and_get_code

    if find_compiler() is None or not has_python_headers():
        pytest.skip("needs a C++ compiler and Python's headers")
    sources: list[str] = []

    def compiled(function):
        def run(*args):
            found, code = run_and_get_code(torch.compile(function, dynamic=True), *args)
            sources.extend(code)
            return found

        return run

    for name in ("losses_then_gradients", "label_and_sum", "weighted_gradients"):
        monkeypatch.setattr(loss, name, compiled(getattr(row_losses, f"_{name}_at_once")))
    yield sources
    torch.compiler.reset()


def test_compiled_losses_keep_nothing_of_the_size_of_the_logits(kernels: list[str]) -> None:
    """Of a chunk of (R, V) no copy in float32 is made: what the kernels allocate has at most a number a row."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(N, D, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(V, D, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(V, (N,), generator=generator)
    exact = hidden.detach().double() @ weight.detach().double().t()
    expected = torch.log_softmax(exact, -1).gather(1, labels[:, None])[:, 0]
    sums = linear_cross_entropy(hidden, weight, labels)
    log_p = linear_log_probabilities(hidden, weight, labels)
    torch.testing.assert_close(sums.objective.double(), -expected.sum(), rtol=2e-3, atol=0)
    torch.testing.assert_close(log_p.double(), expected, rtol=0, atol=0.05)
    torch.testing.assert_close(
        torch.autograd.grad(-log_p.sum(), (hidden, weight)),
        torch.autograd.grad(sums.objective, (hidden, weight)),
        rtol=0.02,
        atol=0.02,
    )
    source = "".join(kernels)
    assert len(kernels) == 3
    assert re.search(r"empty_strided_cpu\(\((s\d+), 1\)", source)
    assert not re.search(r"empty_strided_cpu\(\(s\d+, s\d+\)", source)


def test_only_a_gpu_with_triton_fuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sheepop.model.fused.has_triton", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: pytest.fail("compiled on a CPU"))
    assert fuses("cuda")
    assert not fuses("cpu")
    assert fused(torch.exp)(torch.zeros(1)).item() == 1
    monkeypatch.setattr("sheepop.model.fused.has_triton", lambda: False)
    assert not fuses("cuda")


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("soft_cap", [None, 4.0])
def test_losses_on_a_gpu_are_those_of_the_cpu(dtype: torch.dtype, soft_cap: float | None) -> None:
    """The CPU computes in float32 from the same rounded inputs; several chunks, some rows without a label."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(96, 64, generator=generator).to(dtype)
    weight = torch.randn(1000, 64, generator=generator).mul_(0.3).to(dtype)
    labels = torch.randint(1000, (96,), generator=generator)
    labels[::7] = -100
    weighting = torch.randn(96, generator=generator)
    results = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        inputs = [tensor.to(device, kind).requires_grad_() for tensor in (hidden, weight)]
        on_device, chunk_bytes = labels.to(device), 40 * 1000 * kind.itemsize
        options = {"soft_cap": soft_cap, "chunk_bytes": chunk_bytes}
        loss = linear_cross_entropy(*inputs, on_device, LossTerms(0.01, 0.1), **options).objective
        log_p = linear_log_probabilities(*inputs, on_device, **options)
        found = (
            loss,
            log_p,
            *torch.autograd.grad(loss, inputs),
            *torch.autograd.grad(log_p, inputs, weighting.to(device)),
        )
        results.append([tensor.detach().float().cpu() for tensor in found])
    tolerance = 5e-3 if dtype == torch.float32 else 5e-2  # TensorFloat-32 may be on
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width", "rotated"), [(3, 32, 24), (4, 16, 16), (1, 20, 12)])
@pytest.mark.parametrize("of_rows", [False, True])
def test_rotation_in_triton_is_that_in_torch(dtype: torch.dtype, heads: int, width: int, rotated: int, of_rows: bool):
    """Without a GPU, Triton's interpreter runs the kernel. The angles are those of tokens, or of rows and tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(2, 5, heads, width, generator=torch.Generator().manual_seed(4)).to(device, dtype).transpose(1, 2)
    cos, sin = (table.to(device) for table in rotary_tables(40, rotated))
    if of_rows:
        positions = torch.tensor([[3, 1, 7, 30, 2], [0, 39, 38, 5, 5]], device=device)
        cos, sin = cos[positions][:, None], sin[positions][:, None]
    else:
        cos, sin = cos[:5], sin[:5]
    with torch.no_grad():
        torch.testing.assert_close(rotate_by_triton(x, cos, sin), rotate(x.cpu(), cos.cpu(), sin.cpu()).to(device))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rmsnorm", "rmsnorm_zero_centered"])
@pytest.mark.parametrize("width", [24, 100])
@pytest.mark.parametrize("of_found", [False, True])
def test_a_sum_and_its_norm_in_triton_are_exact_up_to_rounding(
    dtype: torch.dtype, kind: str, width: int, of_found: bool
) -> None:
    """The sum is that of PyTorch; the norm of the rounded sum, in float64, is hit within one rounding."""
    device, draws = "cuda" if torch.cuda.is_available() else "cpu", torch.Generator().manual_seed(5)
    config = ModelConfig(norm=kind, norm_eps=1e-3, d_model=width, num_heads=1)
    norm, found_norm = (build_norm(config).to(device, dtype) for _ in range(2))
    for each in (norm, found_norm):
        each.weight.data += torch.randn(width, generator=draws).to(device, dtype)
    x, found = (torch.randn(2, 3, width, generator=draws).to(device, dtype) for _ in range(2))
    with torch.no_grad():
        kernel = add_and_normalise(x, found, norm, found_norm if of_found else None)
        assert kernel is not None
        exact = by_hand(found, found_norm) if of_found else found.double()
    total, normed = kernel
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(total.double(), x.double() + exact, rtol=2 * epsilon, atol=2 * epsilon)
    torch.testing.assert_close(normed.double(), by_hand(total, norm), rtol=epsilon, atol=1e-6)
    if not of_found and (dtype == torch.float32 or device == "cuda"):  # the interpreter truncates to bf16
        assert torch.equal(total, x + found)
    norm.register_forward_hook(lambda *_: None)
    assert add_and_normalise(x, found, norm) is None


def by_hand(x: Tensor, norm: nn.Module) -> Tensor:
    scaling = scaling_of(norm)
    assert scaling is not None
    weight, added, eps = scaling
    return x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + added)


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_on_a_gpu_is_exact_up_to_rounding(dtype: torch.dtype) -> None:
    """A rotation keeps the length, so that the gradient of the squared length is twice what goes in."""
    x = torch.randn(2, 3, 40, 32, generator=torch.Generator().manual_seed(4)).to(dtype)
    cos, sin = rotary_tables(40, 24)
    there = x.cuda().requires_grad_()
    turned = rotate(there, cos.cuda(), sin.cuda())
    (gradient,) = torch.autograd.grad(turned.square().sum(), there)
    exact = rotate(x.double(), cos.double(), sin.double())
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(turned.double().cpu(), exact, rtol=epsilon, atol=1e-6)
    # The parts of a pair are rounded before they are added.
    torch.testing.assert_close(gradient.cpu(), 2 * x, rtol=0, atol=4 * epsilon * float(2 * x.abs().max()))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("norm", ["rmsnorm", "rmsnorm_zero_centered"])
@pytest.mark.parametrize(("rotary_fraction", "norm_position"), [(1.0, "pre"), (0.5, "sandwich")])
def test_a_network_with_kernels_in_triton_is_that_without(
    norm: str, rotary_fraction: float, norm_position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads' norms with rotation, sums with norms, and SwiGLU; without a GPU, Triton's interpreter runs the kernels."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = ModelConfig(
        vocab_size=40, d_model=24, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=8, max_seq_len=16, norm=norm,
        qk_norm="head", norm_position=norm_position,
        position_encoding="rope", rotary_fraction=rotary_fraction, activation="swiglu", bias=False,
    )  # fmt: skip
    model = build_model(config, seed=1).to(device).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)).to(device)
    input_ids = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(3)).to(device)
    found = []
    for uses in (True, False):
        for module in ("attention.layer", "block", "positions", "feedforward"):
            monkeypatch.setattr(f"sheepop.model.{module}.uses_triton", lambda x, uses=uses: uses)
        with torch.no_grad():
            found.append(model(input_ids))
    torch.testing.assert_close(*found)
