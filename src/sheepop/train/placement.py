"""Placements decide where and in which data types a step is computed, and how gradients are reduced.

The loop, the objectives and the optimizers use any `Placement` in the same way. `OneDevice` is the one for a single
device; `sheepop.train.sharded` and `sheepop.train.pipelined` have those for several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from sheepop.adapt.stored_weight import StoredWeight
from sheepop.core.device import return_freed_memory
from sheepop.model import LossSums, Outputs, Transformer
from sheepop.model.deferred_gradient import DeferredGradient
from sheepop.model.experts import Routing
from sheepop.model.head import OutputHead
from sheepop.model.logits import adds_in_place
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.ranks import ALONE
from sheepop.train.precision import autocast, working_dtype
from sheepop.train.tensor_batch import TensorBatch


class Network(Protocol):
    """The network of an objective: its forward passes, their modules, and the output projection."""

    @property
    def head(self) -> OutputHead:
        """The output projection of training steps."""

    @property
    def modules(self) -> Transformer:
        """The modules of training steps, in training mode; they share the buffers of the model."""

    def run(self, inputs: Mapping[str, Any]) -> Outputs:
        """Calls `run` of the model with the keyword arguments `inputs`."""

    def hidden_states(self, inputs: Mapping[str, Any]) -> Tensor:
        """Runs the model; returns the hidden states (B, T, D)."""
        return self.run(inputs).hidden_states

    def over_rows(self, counts: Tensor) -> Tensor:
        """The sum of `counts` over the ranks that share rows; the same tensor if rows are whole."""
        return counts


@dataclass(frozen=True)
class Loss:
    """The losses of a micro-batch, and the scaled scalar for the backward pass."""

    sums: LossSums
    scaled: Tensor

    def back(self) -> LossSums:
        """Runs the backward pass; returns the sums without their graphs."""
        torch.autograd.backward(self.scaled)
        return self.sums._replace(objective=self.sums.objective.detach())


class Pass(Protocol):
    """A function from a micro-batch on the host, with its number, to its loss."""

    def __call__(self, number: int, batch: TensorBatch, network: Network) -> Loss:
        """The loss of the micro-batch by `network`."""

    def of_layers(self, number: int, batch: TensorBatch, network: Network, routings: Mapping[int, Routing]) -> Loss:
        """The part of the loss from some layers with experts, if ranks share the layers; see `Objective.layer_sums`."""


class Placement(Network, Protocol):
    """A model laid out for training steps, in a single process or as one of several ranks.

    A step calls `begin_step`, `compute`, `unscale` and `clip`; then the gradients are in the float32 parameters of
    `model`, which the optimizers update. Each rank divides its gradients by the tokens of the whole step, so that the
    gradient of the step is their sum.
    """

    device: str
    precision: str
    may_be_left: bool  # whether a step may be abandoned halfway; false if other ranks would wait for this one
    model: Transformer  # always in evaluation mode; the optimizers update its weights
    layout: Layout
    deferred: DeferredGradient | None = None  # of a large output weight, for which a step may have no `grad`

    @property
    def head(self) -> OutputHead:
        """The output projection of `modules`."""
        return self.modules.lm_head

    def begin_step(self) -> None:
        """Updates the working copies of the weights; called before the first micro-batch of a step."""

    def arithmetic(self) -> AbstractContextManager[None]:
        """The context of forward passes and losses: autocast, unless they get weights that are cast already."""
        return autocast(self.device, "fp32" if working_dtype(self.precision) is not None else self.precision)

    def run(self, inputs: Mapping[str, Any]) -> Outputs:
        """Runs `modules`."""
        return self.modules.run(**inputs)

    def compute(self, batches: Sequence[TensorBatch], pass_of: Pass) -> list[LossSums]:
        """Runs the forward and backward passes of all micro-batches in any order, and sums gradients over ranks.

        Gradients are added to existing ones. Returns the sums of each micro-batch whose loss is computed here.
        """

    def unscale(self, scale: float) -> None:
        """Divides all gradients by the scale of the loss."""

    def clip(self, max_norm: float | None) -> Tensor:
        """Scales the gradients to a global norm of at most `max_norm`, if given; returns the norm before."""

    def reduce(self, sums: Tensor) -> Tensor:
        """The sums of a step over all ranks."""
        return sums

    def greatest(self, value: float) -> float:
        """Returns the greatest value of all ranks, on every rank."""
        return value

    def zero_gradients(self) -> None:
        """Deletes the gradients of `model`; `modules` keep none."""
        self.model.zero_grad(set_to_none=True)

    def differences(self, own: Sequence[str]) -> Sequence[str]:
        """The differences found on all ranks (`own` on this one), and the ranks whose copies of weights differ."""
        return own

    def evaluating(self) -> AbstractContextManager[None]:
        """Within the block `model` is whole and in one data type, for scoring, sampling and saving."""

    @contextmanager
    def sampling(self) -> Iterator[Transformer]:
        """Yields a model with the current weights to sample from; on one device it has the data type of steps."""
        with self.evaluating():
            yield self.model

    def gathered(self) -> AbstractContextManager[None]:
        """Within the block `model` is whole, and each weight keeps its data type between evaluations."""
        return nullcontext()


class OneDevice(Placement):
    """The whole `model` on one device; `modules` is a copy of it for training steps.

    The copy has its own modules but shares parameters and buffers. So only training steps, whose inputs have one shape,
    run compiled code, while scoring and sampling read texts of any length; and `model` stays in evaluation mode while
    `modules` stays in training mode.

    In bf16 the steps run on working weights, which are cast from the float32 weights once a step; each gradient is
    moved to its float32 weight as soon as it is complete. A frozen weight is cast only once: `model` then has it in
    bfloat16 too, and in float32 only during evaluation. A quantised weight stays as it is stored.
    """

    may_be_left = True

    def __init__(self, model: Transformer, *, precision: str, device: str, compiled: bool = False) -> None:
        self.model, self.precision, self.device = model.eval(), precision, device
        self.layout = Layout(ALONE, ParallelConfig())
        self._masters: list[Tensor] = []
        self._working: list[Tensor] = []
        self._sampled: Transformer | None = None
        dtype = working_dtype(precision)
        self._frozen = [] if dtype is None else _frozen(model)
        for parameter in self._frozen:
            parameter.data = parameter.data.to(dtype)
        working = {} if dtype is None else {m: self._working_weight(m, dtype) for m in _cast_each_step(model)}
        working |= computing_in(model, dtype or torch.float32)
        self._modules = model.sharing_copy(working).train()
        self._place_head(dtype)
        self._returns_memory = adds_in_place(self.head.weight.nbytes, device)
        if self._returns_memory and self.head.weight.requires_grad:
            self.deferred = DeferredGradient(self.head)
        sparse = device == "cpu" and self.head.weight is model.embedding.weight
        # An embedding with an adapter returns their sum, in the data type of its frozen weight.
        if type(model.embedding) is nn.Embedding and (dtype is not None or sparse):
            self._modules.embedding = CastEmbedding(model.embedding, dtype, sparse=sparse, deferred=self.deferred)
        if torch.device(device).type == "cuda":
            # On a CPU a wider product may round differently and is no faster.
            self._modules.pack_projections()
        if compiled:
            self._modules.compile_blocks()

    @property
    def modules(self) -> Transformer:
        """The modules of training steps."""
        return self._modules

    def begin_step(self) -> None:
        """Casts the float32 weights to the working weights."""
        if self._working:
            with torch.no_grad():
                torch._foreach_copy_(self._working, self._masters)
        self.head.begin_step()

    def compute(self, batches: Sequence[TensorBatch], pass_of: Pass) -> list[LossSums]:
        """Computes the losses and gradients of the micro-batches, one after the other.

        On a CPU a model with a large vocabulary begins each of them but the first with no freed memory: activations
        have other sizes in each, so that pieces of freed memory between them add up. What the step before has freed,
        the first one uses again, since new pages would take a fifth of the step.
        """
        found = []
        for number, batch in enumerate(batches):
            if self._returns_memory and number > 0:
                return_freed_memory()
            found.append(pass_of(number, batch, self).back())
        if (deferred := self._deferred) is not None and deferred.weight.grad is not None:
            deferred.add(deferred.weight.grad)
            deferred.weight.grad = None
        return found

    def unscale(self, scale: float) -> None:
        """Divides all gradients by `scale`."""
        torch._foreach_mul_(list(_gradients(self.model.parameters())), 1 / scale)
        if self._deferred is not None:
            self._deferred.scale(1 / scale)

    def clip(self, max_norm: float | None) -> Tensor:
        """See `clip_gradients`."""
        deferred, parameters = self._deferred, list(self.model.parameters())
        if deferred is None:
            return clip_gradients(parameters, max_norm)
        norms = [torch.nn.utils.get_total_norm(_gradients(parameters)), deferred.norm()]
        norm = clip_gradients(parameters, max_norm, torch.linalg.vector_norm(torch.stack(norms)))
        if max_norm is not None and norm > max_norm:
            deferred.scale(max_norm / norm)
        return norm

    def zero_gradients(self) -> None:
        """Deletes the gradients of `model`."""
        super().zero_gradients()
        if self.deferred is not None:
            self.deferred.clear()
        elif self._returns_memory and not self.head.weight.requires_grad:
            return_freed_memory()  # small tensors, which share few pages with those of the next step

    @property
    def _deferred(self) -> DeferredGradient | None:
        return self.deferred if self.deferred is not None and self.deferred.is_active else None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block frozen weights are float32, like all others."""
        placed = [parameter.data for parameter in self._frozen]
        for parameter in self._frozen:
            parameter.data = parameter.data.float()
        try:
            yield
        finally:
            for parameter, data in zip(self._frozen, placed, strict=True):
                parameter.data = data

    @contextmanager
    def sampling(self) -> Iterator[Transformer]:
        """Yields a model over the working weights of training steps, always the same one."""
        dtype = working_dtype(self.precision)
        if dtype is None:
            yield self.model
            return
        if self._sampled is None:
            self._sampled = self._sampling_model(dtype)
        self.begin_step()
        yield self._sampled

    def _sampling_model(self, dtype: torch.dtype) -> Transformer:
        """Returns the model with its working weights; an untied embedding gets a working weight of its own."""
        embedding, working = self.model.embedding.weight, dict(zip(self._masters, self._working, strict=True))
        if embedding.dtype != dtype and embedding not in working:
            working[embedding] = torch.empty_like(embedding, dtype=dtype, requires_grad=False)
            self._masters.append(embedding)
            self._working.append(working[embedding])
        parameters = {cast(nn.Parameter, master): nn.Parameter(found, False) for master, found in working.items()}
        return self.model.sharing_copy(parameters).eval()

    def _place_head(self, dtype: torch.dtype | None) -> None:
        head = self.head
        # The allocator of an accelerator keeps freed memory itself.
        if self.device == "cpu":
            head.keep_memory()
        if dtype is not None and head.weight.dtype != dtype:
            head.cast = torch.empty_like(head.weight, dtype=dtype, requires_grad=False)
            self._masters.append(head.weight)
            self._working.append(head.cast)

    def _working_weight(self, master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        working = nn.Parameter(torch.empty_like(master, dtype=dtype))
        self._masters.append(master)
        self._working.append(working)

        def hand_over(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if master.grad is None:
                master.grad = gradient.to(master.dtype)
            else:
                master.grad.add_(gradient)

        working.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
        return working


class CastEmbedding(nn.Embedding):
    """Looks up float32 vectors and casts them to `dtype`, if given.

    The gradient of the vectors is float32, because in bfloat16 it would lose its smaller parts if one token occurs
    often. If the output projection shares the parameter, its gradient is complete before that of the embedding; with
    `sparse`, only the rows of tokens that occur are then added to it, or to the `deferred` one.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        dtype: torch.dtype | None,
        *,
        sparse: bool = False,
        deferred: DeferredGradient | None = None,
    ) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, sparse=sparse, device="meta")
        self.weight, self._dtype = embedding.weight, dtype
        if sparse and embedding.weight.requires_grad:
            # A separate leaf in the same memory, because autograd would add a sparse gradient to a copy of a dense one.
            self.weight = nn.Parameter(embedding.weight.detach())
            self.weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_add_rows, embedding.weight, deferred)
            )

    def forward(self, input_ids: Tensor) -> Tensor:
        """Returns the vectors of the tokens."""
        found = super().forward(input_ids)
        return found if self._dtype is None else found.to(self._dtype)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None, norm: Tensor | None = None) -> Tensor:
    """Scales all gradients by one factor so that their global norm is at most `max_norm`; returns the norm before.

    With `max_norm` None it only measures the norm (Pascanu et al. 2013, algorithm 1, over all parameters). If
    `parameters` are only some of them, give the `norm` of all.
    """
    gradients = _gradients(parameters)
    norm = torch.nn.utils.get_total_norm(gradients) if norm is None else norm
    # On a CPU, reading the norm does not wait, and a factor of 1 would only cost time.
    if gradients and max_norm is not None and not (norm.device.type == "cpu" and norm <= max_norm):
        factor = torch.clamp(max_norm / norm, max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The values of all gradients, to be changed in place; for a sparse gradient, those of the rows that it has."""
    found = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            found.append(parameter.grad.values())
        elif parameter.grad is not None:
            found.append(parameter.grad)
    return found


def _add_rows(master: Tensor, deferred: DeferredGradient | None, embedding: Tensor) -> None:
    """Adds the sparse gradient of `embedding` to that of `master`."""
    rows, embedding.grad = embedding.grad, None
    assert rows is not None
    if deferred is not None and deferred.is_active:
        deferred.add(rows)
    elif master.grad is None:
        master.grad = rows.to_dense()
    else:
        master.grad.add_(rows)


def _cast_each_step(model: Transformer) -> list[nn.Parameter]:
    """The trained parameters to cast once a step: all but the embedding, the head, and those that must be exact."""
    apart = {id(weight) for weight in (model.embedding.weight, model.lm_head.weight, *model.exact_parameters)}
    return [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in apart]


def _frozen(model: Transformer) -> list[nn.Parameter]:
    """The parameters that are not trained, except those that must be exact."""
    exact = {id(weight) for weight in model.exact_parameters}
    kept = (weight for weight in model.parameters() if not (weight.requires_grad or isinstance(weight, StoredWeight)))
    return [weight for weight in kept if id(weight) not in exact]


def computing_in(model: Transformer, dtype: torch.dtype) -> dict[nn.Parameter, nn.Parameter]:
    """Maps quantised weights to parameters for training steps, which share their memory and multiply in `dtype`."""
    return {
        weight: nn.Parameter(weight.computing_in(dtype), requires_grad=False)
        for weight in model.parameters()
        if isinstance(weight, StoredWeight)
    }
