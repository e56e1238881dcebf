"""Where a training step is computed: which weights it meets, in which data type, and how gradients come together.

The loop, the objectives and the optimizers see a `Placement` and never ask which one it is. `OneDevice` is the plain
one; whoever spreads a model over several devices writes another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sheepop.model import LossSums, Outputs, Transformer
from sheepop.model.experts import Routing
from sheepop.model.head import OutputHead
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.ranks import ALONE
from sheepop.train.precision import autocast, working_dtype
from sheepop.train.tensor_batch import TensorBatch


class Network(Protocol):
    """What an objective computes its loss with: forward passes, the modules they run, and the output projection."""

    @property
    def head(self) -> OutputHead:
        """The output projection as steps use it."""

    @property
    def modules(self) -> Transformer:
        """The modules that steps run, in training mode; their buffers are those of the model."""

    def run(self, inputs: Mapping[str, Any]) -> Outputs:
        """As `run` of the model, which `inputs` are the arguments of."""

    def hidden_states(self, inputs: Mapping[str, Any]) -> Tensor:
        """The hidden states of such a pass (B, T, D)."""

    def over_rows(self, counts: Tensor) -> Tensor:
        """The sum of `counts` over all that have tokens of the same rows; the same tensor where one has all."""
        return counts


@dataclass(frozen=True)
class Loss:
    """The losses of a micro-batch, and of these the scalar whose gradients are the step's."""

    sums: LossSums
    scaled: Tensor

    def back(self) -> LossSums:
        """Adds its gradients to the weights; the sums without their graphs."""
        torch.autograd.backward(self.scaled)
        return self.sums._replace(objective=self.sums.objective.detach())


class Pass(Protocol):
    """What to compute of a micro-batch, given its number and itself on the host."""

    def __call__(self, number: int, batch: TensorBatch, network: Network) -> Loss:
        """Its loss by `network`."""

    def of_layers(self, number: int, batch: TensorBatch, network: Network, routings: Mapping[int, Routing]) -> Loss:
        """What some layers with experts add to it, where others are elsewhere; see `Objective.layer_sums`."""


class Placement(Network, Protocol):
    """A model laid out for training steps, in a process alone or as one of several ranks.

    A step is `begin_step`, `compute`, `unscale` and `clip`; by then the gradients are in the float32 parameters of
    `model`, which the optimizers move. They come normalised by the tokens of the whole step, so ranks add theirs up.
    """

    device: str
    model: Transformer  # with the weights that the optimizers move, in evaluation mode for good
    layout: Layout

    @property
    def may_be_left(self) -> bool:
        """Whether a step may be given up in its middle: not where other ranks would wait for this one."""

    def begin_step(self) -> None:
        """Brings what is computed with up to date with the weights; called before the first micro-batch of a step."""

    def arithmetic(self) -> AbstractContextManager[None]:
        """The context that forward passes and losses are computed in."""

    def compute(self, batches: Sequence[TensorBatch], pass_of: Pass) -> list[LossSums]:
        """Forward and backward passes of all micro-batches, in the order that suits, and the sum over ranks.

        Gradients are added to those that are there. Returns the sums of each micro-batch whose end is computed here.
        """

    def unscale(self, scale: float) -> None:
        """Divides all gradients by the scale of the loss that they were computed from."""

    def clip(self, max_norm: float | None) -> Tensor:
        """Scales the gradients so that their global norm is at most `max_norm`, if given; the norm before."""

    def reduce(self, sums: Tensor) -> Tensor:
        """The sums of a step over all ranks."""

    def greatest(self, value: float) -> float:
        """The greatest of what ranks give; the same answer on all of them."""

    def zero_gradients(self) -> None:
        """Forgets all gradients."""

    def differences(self, own: Sequence[str]) -> Sequence[str]:
        """What was found to differ on any rank, `own` on this one, and which ranks have not the weights they should."""
        return own

    def evaluating(self) -> AbstractContextManager[None]:
        """Within the block `model` is whole and in one data type, to be scored, sampled from and saved."""

    def gathered(self) -> AbstractContextManager[None]:
        """Within the block `model` is whole, each weight in the data type that it has between evaluations."""
        return nullcontext()


class OneDevice(Placement):
    """All of `model` on its one device; `modules` is a copy of it for training steps.

    Modules are copied, parameters and buffers shared, so that what is compiled here is compiled for training steps
    only: they have one shape, while texts of every length are scored and sampled. And each keeps its mode: `model`
    evaluates, `modules` trains.

    In bf16 the steps run on working weights, cast once a step from the float32 ones, which the gradients are handed
    to as soon as they are there. A frozen weight is cast once and for all: `model` then holds it in bfloat16 too, and
    in float32 only while it is evaluated.
    """

    def __init__(self, model: Transformer, *, precision: str, device: str, compiled: bool = False) -> None:
        self.model, self.precision, self.device = model.eval(), precision, device
        self.layout = Layout(ALONE, ParallelConfig())
        self._masters: list[Tensor] = []
        self._working: list[Tensor] = []
        dtype = working_dtype(precision)
        self._frozen = [] if dtype is None else _frozen(model)
        for parameter in self._frozen:
            parameter.data = parameter.data.to(dtype)
        working = {} if dtype is None else {m: self._working_weight(m, dtype) for m in _cast_each_step(model)}
        self._modules = model.sharing_copy(working).train()
        self._place_head(dtype)
        sparse = device == "cpu" and self.head.weight is model.embedding.weight
        # An embedding with changes beside it gives their sum, in the data type that its weight is frozen in.
        if type(model.embedding) is nn.Embedding and (dtype is not None or sparse):
            self._modules.embedding = CastEmbedding(model.embedding, dtype, sparse=sparse)
        if torch.device(device).type == "cuda":
            # On a CPU a wider product may round otherwise, and nothing is gained.
            self._modules.pack_projections()
        if compiled:
            self._modules.compile_blocks()

    @property
    def modules(self) -> Transformer:
        """The modules that steps run."""
        return self._modules

    @property
    def head(self) -> OutputHead:
        """The output projection of `modules`."""
        return self._modules.lm_head

    @property
    def may_be_left(self) -> bool:
        """Nobody waits for this process."""
        return True

    def begin_step(self) -> None:
        """Casts the working weights anew."""
        if self._working:
            with torch.no_grad():
                torch._foreach_copy_(self._working, self._masters)
        self.head.begin_step()

    def arithmetic(self) -> AbstractContextManager[None]:
        """Autocast, unless the weights are cast already."""
        return autocast(self.device, "fp32" if working_dtype(self.precision) is not None else self.precision)

    def run(self, inputs: Mapping[str, Any]) -> Outputs:
        """What `modules` give."""
        return self.modules.run(**inputs)

    def hidden_states(self, inputs: Mapping[str, Any]) -> Tensor:
        """The hidden states of such a pass."""
        return self.run(inputs).hidden_states

    def compute(self, batches: Sequence[TensorBatch], pass_of: Pass) -> list[LossSums]:
        """One after the other."""
        return [pass_of(number, batch, self).back() for number, batch in enumerate(batches)]

    def unscale(self, scale: float) -> None:
        """Divides all gradients by `scale`."""
        torch._foreach_mul_(list(_gradients(self.model.parameters())), 1 / scale)

    def clip(self, max_norm: float | None) -> Tensor:
        """See `clip_gradients`."""
        return clip_gradients(self.model.parameters(), max_norm)

    def reduce(self, sums: Tensor) -> Tensor:
        """They are those of all rows already."""
        return sums

    def greatest(self, value: float) -> float:
        """Nobody else is asked."""
        return value

    def zero_gradients(self) -> None:
        """Forgets the gradients of `model`; the working weights keep none."""
        self.model.zero_grad(set_to_none=True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block frozen weights are float32 again, as all others are."""
        placed = [parameter.data for parameter in self._frozen]
        for parameter in self._frozen:
            parameter.data = parameter.data.float()
        try:
            yield
        finally:
            for parameter, data in zip(self._frozen, placed, strict=True):
                parameter.data = data

    def _place_head(self, dtype: torch.dtype | None) -> None:
        head = self.head
        # The allocator of an accelerator keeps its memory by itself.
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
    """Looks up float32 vectors and casts what was found to `dtype`, if one is given.

    A gradient of the vectors in bfloat16 would lose its smaller parts where one token occurs often. Where the output
    projection is the same parameter, its gradient is there by then, and only the rows of the tokens that occur are
    added to it: `sparse` does so.
    """

    def __init__(self, embedding: nn.Embedding, dtype: torch.dtype | None, *, sparse: bool = False) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, sparse=sparse, device="meta")
        self.weight, self._dtype = embedding.weight, dtype
        if sparse and embedding.weight.requires_grad:
            # A leaf of its own in the same memory: autograd would add a sparse gradient to a copy of the dense one.
            self.weight = nn.Parameter(embedding.weight.detach())
            self.weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_add_rows, embedding.weight)
            )

    def forward(self, input_ids: Tensor) -> Tensor:
        """The vectors of the tokens."""
        found = super().forward(input_ids)
        return found if self._dtype is None else found.to(self._dtype)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None, norm: Tensor | None = None) -> Tensor:
    """Scales all gradients by one factor so that their global norm is at most `max_norm`; returns the norm before.

    With `max_norm` None the norm is only measured (Pascanu et al. 2013, algorithm 1, over all parameters). Where these
    are a part of them, `norm` is that of all.
    """
    gradients = _gradients(parameters)
    norm = torch.nn.utils.get_total_norm(gradients) if norm is None else norm
    # On a CPU the norm is known at once, and a factor of 1 would only cost time.
    if max_norm is not None and not (norm.device.type == "cpu" and norm <= max_norm):
        factor = torch.clamp(max_norm / norm, max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The numbers of all gradients, to be changed in place; of a sparse one those of the rows that it has."""
    found = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            found.append(parameter.grad.values())
        elif parameter.grad is not None:
            found.append(parameter.grad)
    return found


def _add_rows(master: Tensor, embedding: Tensor) -> None:
    """Adds the sparse gradient of `embedding` to that of `master`."""
    rows, embedding.grad = embedding.grad, None
    assert rows is not None
    if master.grad is None:
        master.grad = rows.to_dense()
    else:
        master.grad.add_(rows)


def _cast_each_step(model: Transformer) -> list[nn.Parameter]:
    """The trained parameters that activations meet in the working data type.

    All but the embedding, which is looked up, the head, and those that are exact.
    """
    apart = {id(weight) for weight in (model.embedding.weight, model.lm_head.weight, *model.exact_parameters)}
    return [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in apart]


def _frozen(model: Transformer) -> list[nn.Parameter]:
    """The parameters that nothing will ever add a small step to, but for those that are exact."""
    exact = {id(weight) for weight in model.exact_parameters}
    return [parameter for parameter in model.parameters() if not parameter.requires_grad and id(parameter) not in exact]
