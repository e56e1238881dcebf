"""The model as a training step runs it: in which data type, compiled or not."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sheepop.model import Outputs, Transformer
from sheepop.train.output_head import OutputHead
from sheepop.train.precision import autocast, working_dtype


class ObjectiveNetwork(Protocol):
    """What an objective computes its loss with: forward passes, and the output projection."""

    head: OutputHead

    def run(self, inputs: Mapping[str, Any]) -> Outputs:
        """As `run` of the model, which `inputs` are the arguments of."""

    def hidden_states(self, inputs: Mapping[str, Any]) -> Tensor:
        """The hidden states of such a pass (B, T, D)."""


class Network:
    """Hidden states and `head`, the output projection, of `model` for training steps; the gradients arrive in `model`.

    In bf16 the steps run on a working copy of the weights, cast once a step from `model`'s float32 ones; routers keep
    these. Modules are
    copied, parameters and buffers shared, so that what is compiled here is compiled for training steps only: they have
    one shape, while texts of every length are scored and sampled. `modules` is that copy.
    """

    def __init__(self, model: Transformer, *, precision: str, device: str, compiled: bool = False) -> None:
        self.precision, self.device = precision, device
        self._masters: list[Tensor] = []
        self._working: list[Tensor] = []
        dtype = working_dtype(precision)
        self.head = OutputHead(model, dtype, device)
        replaced: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        if dtype is not None:
            replaced |= {id(master): self._working_weight(master, dtype) for master in _computed_with(model)}
        # Tensors are looked up before they are copied: shared, or replaced by their working copy.
        self.modules = copy.deepcopy(model, replaced).train()
        if self.head.cast is not None:
            self._masters.append(self.head.weight)
            self._working.append(self.head.cast)
        sparse = device == "cpu" and self.head.weight is model.embedding.weight
        if dtype is not None or sparse:
            self.modules.embedding = _Embedding(model.embedding, dtype, sparse)
        if torch.device(device).type == "cuda":
            # On a CPU a wider product may round otherwise, and nothing is gained.
            self.modules.pack_projections()
        if compiled:
            self.modules.compile_blocks()

    def begin_step(self) -> None:
        """Brings the working copy up to date; called before the first micro-batch of every step."""
        if self._working:
            with torch.no_grad():
                torch._foreach_copy_(self._working, self._masters)
        self.head.begin_step()

    def arithmetic(self) -> AbstractContextManager[None]:
        """The context that forward passes and losses are computed in."""
        return autocast(self.device, "fp32" if self._working else self.precision)

    def run(self, inputs: Mapping[str, Any]) -> Outputs:
        """As `run` of the model, which `inputs` are the arguments of."""
        return self.modules.run(**inputs)

    def hidden_states(self, inputs: Mapping[str, Any]) -> Tensor:
        """The hidden states of such a pass (B, T, D)."""
        return self.run(inputs).hidden_states

    def _working_weight(self, master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        working = nn.Parameter(torch.empty_like(master, dtype=dtype), requires_grad=master.requires_grad)
        self._masters.append(master)
        self._working.append(working)

        def hand_over(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if master.grad is None:
                master.grad = gradient.to(master.dtype)
            else:
                master.grad.add_(gradient)

        if master.requires_grad:
            working.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
        return working


class _Embedding(nn.Embedding):
    """Looks up float32 vectors and casts what was found to `dtype`, if one is given.

    A gradient of the vectors in bfloat16 would lose its smaller parts where one token occurs often. Where the output
    projection is the same parameter, its gradient is there by then, and only the rows of the tokens that occur are
    added to it: `sparse` does so.
    """

    def __init__(self, embedding: nn.Embedding, dtype: torch.dtype | None, sparse: bool) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, sparse=sparse, device="meta")
        self.weight, self._dtype = embedding.weight, dtype
        if sparse and embedding.weight.requires_grad:
            # A leaf of its own in the same memory: autograd would add a sparse gradient to a copy of the dense one.
            self.weight = nn.Parameter(embedding.weight.detach())
            self.weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_add_rows, embedding.weight)
            )

    def forward(self, input_ids: Tensor) -> Tensor:
        found = super().forward(input_ids)
        return found if self._dtype is None else found.to(self._dtype)


def _add_rows(master: Tensor, embedding: Tensor) -> None:
    """Adds the sparse gradient of `embedding` to that of `master`."""
    rows, embedding.grad = embedding.grad, None
    assert rows is not None
    if master.grad is None:
        master.grad = rows.to_dense()
    else:
        master.grad.add_(rows)


def _computed_with(model: Transformer) -> list[nn.Parameter]:
    """The parameters that activations meet in the working data type: all but the embedding, which is looked up, the
    head, and those that are exact.
    """
    apart = {id(weight) for weight in (model.embedding.weight, model.lm_head.weight, *model.exact_parameters)}
    return [parameter for parameter in model.parameters() if id(parameter) not in apart]
