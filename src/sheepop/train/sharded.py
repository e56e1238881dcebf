"""The placement for several ranks, each of which computes its rows of a step (data parallelism)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sheepop.adapt.stored_weight import StoredWeight
from sheepop.model import LossSums, Outputs, Transformer
from sheepop.model.head import OutputHead
from sheepop.model.ngrams import NgramEmbedding
from sheepop.parallel.experts import share_experts
from sheepop.parallel.layout import EXPERT, PIECE, PIPELINE, REPLICA, TENSOR, Layout
from sheepop.parallel.parts import SharingRanks
from sheepop.parallel.ring import RingRows
from sheepop.parallel.sharding import Pieces, same_on_all, shard
from sheepop.parallel.tensor import split
from sheepop.parallel.ulysses import SharedRows
from sheepop.train.optimizers.adafactor import Adafactor, Sums
from sheepop.train.optimizers.momentum import Matrices, Muon
from sheepop.train.placement import CastEmbedding, Pass, Placement, clip_gradients, computing_in
from sheepop.train.precision import working_dtype
from sheepop.train.tensor_batch import TensorBatch


class ShardedModel(Placement):
    """`model` laid out over ranks; between evaluations its parameters are this rank's pieces of the float32 weights.

    Optimizers and averages update those pieces. `modules` compute, and gather whole weights when they need them. All
    ranks start with the weights of the first rank.
    """

    may_be_left = False

    def __init__(
        self,
        model: Transformer,
        layout: Layout,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        *,
        precision: str,
        device: str,
        compiled: bool,
    ) -> None:
        self.model, self.precision, self.device, self.layout = model.eval(), precision, device, layout
        self._adds_up_each_time, self._frees = layout.config.zero >= 2, layout.config.zero == 3
        same_on_all([*model.parameters(), *model.buffers()])
        self._dtype = working_dtype(precision)
        network = model.sharing_copy(computing_in(model, self._dtype or torch.float32)).train()
        if self._dtype is not None and type(model.embedding) is nn.Embedding:
            network.embedding = CastEmbedding(model.embedding, self._dtype)
        for module in network.modules():
            if isinstance(module, NgramEmbedding):
                module.is_sparse = False  # ranks sum whole gradients
        if device == "cpu":  # the allocator of an accelerator keeps freed memory itself
            network.lm_head.keep_memory()
        mesh, self.context = layout.mesh(device), layout.context_ranks(device)
        experts = None if network.config.experts is None else layout.expert_mesh(device)
        self._parts = self._cut(network, mesh)
        for part in self._parts:
            if layout.config.expert > 1:
                assert experts is not None
                share_experts(part, SharingRanks.of(experts[EXPERT]))
            if layout.config.tensor > 1:
                split(part, SharingRanks.of(mesh[TENSOR]))
            if compiled:
                part.compile_blocks(with_attention=self.context is None)
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._floats()}
        masters = [[model.get_parameter(name) for name in self._names(part)] for part in self._parts]
        for part in self._parts:
            shard(part, mesh, layout.config, self._dtype, experts)
        # Two parts may contain the same tied weight.
        self._spread = [
            (master, spread)
            for part, of_part in zip(self._parts, masters, strict=True)
            for master, spread in zip(of_part, part.parameters(), strict=True)
            if isinstance(spread, DTensor)
        ]
        self.pieces = Pieces.of(names, self._spread, self._group(mesh))
        # A weight that several ranks have counts once.
        here = [(parameter, name) for parameter, name in names.items() if name in self.pieces.parameters]
        self._counted = [parameter for parameter, name in here if self._counts(name)]
        self._alike = [parameter for parameter, name in here if not self._counts(name)]
        self._take_pieces()
        self._take_over(optimizers, names)

    def _cut(self, network: Transformer, mesh: DeviceMesh) -> Sequence[Transformer]:
        """The parts of `network` that this rank computes."""
        return [network]

    def _names(self, part: Transformer) -> list[str]:
        """The names of the part's parameters in the whole network."""
        return [name for name, _ in part.named_parameters()]

    def _group(self, mesh: DeviceMesh) -> dist.ProcessGroup | None:
        """The process group of the ranks that have the other parts."""
        return None

    def _counts(self, name: str) -> bool:
        # A weight that is not split over tensor ranks is on each of them.
        are_alike = set(self.pieces.laid_over(name)) <= {REPLICA, PIECE}
        return self.pieces.is_counted(name) and not (are_alike and self.layout.tensor_rank)

    def _take_over(self, optimizers: Iterable[torch.optim.Optimizer], names: Mapping[Tensor, str]) -> None:
        """Gives Muon whole matrices and Adafactor sums over them, and learns which dimensions optimizer states have."""
        for optimizer in optimizers:
            dimensions = {**self.pieces.dimensions, **getattr(optimizer, "dimensions", {})}
            self.pieces = replace(self.pieces, dimensions=dimensions)
            if isinstance(optimizer, Muon):
                optimizer.matrices = _SpreadMatrices(self.pieces, names)
            if isinstance(optimizer, Adafactor):
                optimizer.sums = _SpreadSums(self.pieces, names)

    @property
    def modules(self) -> Transformer:
        """The modules of training steps."""
        return self._parts[0]

    @property
    def head(self) -> OutputHead:
        """The output projection of `modules`, whose weight is whole between a forward pass and its backward pass."""
        return self._parts[-1].lm_head

    def begin_step(self) -> None:
        """Does nothing, because weights are cast when they are gathered."""

    def run(self, inputs: Mapping[str, Any]) -> Outputs:
        """Runs `modules`."""
        found = super().run(self._of_this_rank(inputs))
        self._cast_head()
        return found

    def _of_this_rank(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs; if ranks share rows, with a cache through which attention reads the tokens of other ranks."""
        if self.context is None:
            return inputs
        kind = RingRows if self.layout.config.context_method == "ring" else SharedRows
        return {**inputs, "cache": kind(self.context, inputs.get("document_ids"), inputs["input_ids"].device)}

    def _cast_head(self) -> None:
        if self._dtype is not None and self.head.own_weight.dtype != self._dtype:
            self.head.cast = self.head.own_weight.detach().to(self._dtype)

    def over_rows(self, counts: Tensor) -> Tensor:
        """The sum over context ranks."""
        if self.context is None:
            return counts
        found = counts.clone()
        dist.all_reduce(found, group=self.context.group)
        return found

    def compute(self, batches: Sequence[TensorBatch], pass_of: Pass) -> list[LossSums]:
        """Computes the micro-batches in turn; below ZeRO 2, ranks sum their gradients only after the last one."""
        found = []
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            loss = pass_of(number, batch, self)
            root = cast(FSDPModule, self.modules)
            root.set_requires_gradient_sync(is_last or self._adds_up_each_time)
            root.set_is_last_backward(is_last or self._adds_up_each_time)
            root.set_reshard_after_backward(is_last or self._frees)
            found.append(loss.back())
            if is_last or self._adds_up_each_time:
                self._hand_over()
        return found

    def unscale(self, scale: float) -> None:
        """Divides all gradients by `scale`."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / scale)

    def clip(self, max_norm: float | None) -> Tensor:
        """Clips as `clip_gradients` does, by the norm of all pieces, which is not finite if any replica's is not."""
        squares = self._norm(self._counted).square() + 0 * self._norm(self._alike)
        return clip_gradients(self.model.parameters(), max_norm, self.layout.ranks.total(squares).sqrt())

    def _norm(self, parameters: Iterable[Tensor]) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self.device)

    def reduce(self, sums: Tensor) -> Tensor:
        """The sums over all ranks; of tensor ranks, which have the same sums, only one counts."""
        return self.layout.ranks.total(sums if self.layout.tensor_rank == 0 else torch.zeros_like(sums))

    def greatest(self, value: float) -> float:
        """The greatest of the ranks' values."""
        return self.layout.ranks.greatest(value)

    def differences(self, own: Sequence[str]) -> Sequence[str]:
        """All ranks' findings, and each rank whose weights differ from those of the first rank with the same pieces."""
        layout = self.layout
        sums: dict[str, Any] = {}
        for name in self.pieces.parameters:
            parameter = self.model.get_parameter(name)
            content = parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            place = json.dumps({PIPELINE: layout.pipeline_rank, **self.pieces.place(name)})
            sums.setdefault(place, hashlib.blake2b(digest_size=16)).update(content)
        gathered = layout.ranks.gathered([list(own), {place: found.hexdigest() for place, found in sums.items()}])
        different = [f"rank {rank}: {line}" for rank, (lines, _) in enumerate(gathered) for line in lines]
        firsts: dict[str, int] = {}
        for rank, (_, parts) in enumerate(gathered):
            found = {place: gathered[firsts.setdefault(place, rank)][1][place] for place in parts}
            wrong = [firsts[place] for place in parts if parts[place] != found[place]]
            different += [f"the weights of rank {rank} are not those of rank {first}" for first in wrong[:1]]
        return different

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Gives `model` the whole weights on every rank within the block."""
        pieces = {name: parameter.data for name, parameter in self._floats()}
        for name, whole in self.pieces.wholes(pieces):
            self.model.get_parameter(name).data = whole
        try:
            yield
        finally:
            self._take_pieces()

    def gathered(self) -> AbstractContextManager[None]:
        """The same as `evaluating`, because pieces are always float32."""
        return self.evaluating()

    def _floats(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights of `model` that ranks share, with their names; quantised ones are whole on every rank."""
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, StoredWeight):
                yield name, parameter

    @torch.no_grad()
    def _take_pieces(self) -> None:
        for name, parameter in self._floats():
            spread = self.pieces.parameters.get(name)
            parameter.data = parameter.data.new_empty(0) if spread is None else spread.to_local().detach()

    def _hand_over(self) -> None:
        """Moves the reduced gradients to the pieces."""
        for parameter, spread in self._spread:
            found, spread.grad = spread.grad, None
            if found is None:
                continue
            assert isinstance(found, DTensor)
            local = found.to_local()
            if parameter.grad is None:
                parameter.grad = local
            else:
                parameter.grad.add_(local)


@dataclass(frozen=True)
class _SpreadMatrices(Matrices):
    """The matrices of Muon over ranks: every rank gathers each whole matrix and computes the same update."""

    pieces: Pieces
    names: Mapping[Tensor, str]

    def shape(self, parameter: Tensor) -> torch.Size:
        return self.pieces.shape(self.names[parameter])

    def whole(self, parameter: Tensor, piece: Tensor) -> Tensor:
        return self.pieces.whole(self.names[parameter], piece)

    def piece(self, parameter: Tensor, whole: Tensor) -> Tensor:
        return self.pieces.piece(self.names[parameter], whole)


@dataclass(frozen=True)
class _SpreadSums(Sums):
    """The sums of Adafactor over ranks: each rank sums its piece, and the ranks add their sums."""

    pieces: Pieces
    names: Mapping[Tensor, str]

    def shape(self, parameter: Tensor) -> torch.Size:
        return self.pieces.shape(self.names[parameter])

    def form(self, parameter: Tensor) -> Hashable:
        spread = self.pieces.parameters[self.names[parameter]]
        return spread.shape, spread.placements

    def total(self, parameter: Tensor, sums: Tensor, *dimensions: int) -> Tensor:
        cuts = self.pieces.cuts(self.names[parameter])
        for group in (group for dimension in dimensions for group in cuts.get(dimension, ())):
            dist.all_reduce(sums, group=group)
        return sums
