"""The products of all experts in one call against one expert after the other."""

from __future__ import annotations

import pytest
import torch

from sheepop.model.experts.grouped_product import _grouped_product, grouped_product

# An expert without rows at either end and between others, and one with a single row.
SIZES = (0, 3, 0, 1, 8, 0)


def operands(dtype: torch.dtype, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(inputs)
    rows = torch.randn(sum(SIZES), inputs, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(SIZES), outputs, inputs, dtype=torch.float64, generator=generator).to(dtype)
    return rows, weight.requires_grad_(), torch.tensor(SIZES).cumsum(0).to(torch.int32)


def expected(
    rows: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Product and gradients in float64, row by row."""
    rows, weight, gradient = (tensor.detach().double() for tensor in (rows, weight, gradient))
    experts = [expert for expert, size in enumerate(SIZES) for _ in range(size)]
    product, for_rows, for_weight = torch.zeros_like(gradient), torch.zeros_like(rows), torch.zeros_like(weight)
    for row, expert in enumerate(experts):
        product[row] = weight[expert] @ rows[row]
        for_rows[row] = gradient[row] @ weight[expert]
        for_weight[expert] += torch.outer(gradient[row], rows[row])
    return product, for_rows, for_weight


# Rows of 33 float32 numbers are no multiple of 16 bytes, and the kernel of PyTorch has no float64.
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (33, 16), (32, 7)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str
)
@pytest.mark.parametrize("product", [grouped_product, _grouped_product], ids=["eager", "operator"])
def test_product_and_gradients_are_those_of_each_row(product, dtype, tolerance, inputs, outputs) -> None:
    rows, weight, ends = operands(dtype, inputs, outputs)
    gradient = torch.randn(len(rows), outputs, generator=torch.Generator().manual_seed(9)).to(dtype)
    found = product(rows, weight, ends)
    found.backward(gradient)
    assert found.dtype == dtype
    for value, exact in zip((found, rows.grad, weight.grad), expected(rows, weight, gradient), strict=True):
        assert (value.double() - exact).abs().max() <= tolerance * exact.abs().max()


def test_the_weights_of_an_expert_without_rows_get_a_gradient_of_zero() -> None:
    rows, weight, ends = operands(torch.float32, 32, 16)
    grouped_product(rows, weight, ends).square().sum().backward()
    assert [bool(gradient.any()) for gradient in weight.grad] == [size > 0 for size in SIZES]


def test_under_autocast_the_product_is_taken_in_its_data_type() -> None:
    rows, weight, ends = operands(torch.float32, 32, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = grouped_product(rows, weight, ends)
    assert torch.equal(found, grouped_product(rows.bfloat16(), weight.bfloat16(), ends))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_the_product_is_one_operator_in_one_graph(dtype) -> None:
    rows, weight, ends = operands(dtype, 32, 16)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    found = torch.compile(grouped_product, backend=keep, fullgraph=True)(rows, weight, ends)
    assert torch.equal(found, grouped_product(rows, weight, ends))
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.sheepop.grouped_product.default]


@pytest.mark.parametrize("inputs", [32, 33])
def test_the_operator_says_the_truth_about_itself_to_the_compiler(inputs) -> None:
    """Its fake shapes, its schema and its gradients, as PyTorch's own check has it."""
    torch.library.opcheck(_grouped_product, operands(torch.float32, inputs, 16))
