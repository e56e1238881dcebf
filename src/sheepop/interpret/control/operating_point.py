"""The operating point of a network at a prompt: the pass at which it is linearised, and the maps between its parts.

The forward pass is the network's own. Attention is computed step by step, because fused kernels have no second
derivative, and weights are in float32 or float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from sheepop.adapt.stored_weight import StoredWeight
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.facts import counted
from sheepop.interpret.control.jacobian import Jacobian
from sheepop.interpret.trace import Stream, Trace
from sheepop.model import EncoderDecoder, Transformer
from sheepop.model.accounting.cost import parameter_shapes
from sheepop.model.probe import Observer, watch
from sheepop.model.transformer import Passing
from sheepop.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "float64": torch.float64}
_ALL_WEIGHTS = "blocks.*attention.weights"
_NORMS = ("attention_norm", "attention_output_norm", "feed_forward_norm", "feed_forward_output_norm")


def plain_copy(model: Transformer, dtype: torch.dtype) -> tuple[Transformer, tuple[str, ...]]:
    """Returns a copy in evaluation mode whose weights are plain tensors of `dtype`, and notes about what was changed.

    Weights that have this type already are shared. Raises `UsageError` for an encoder-decoder and for a network of
    which this process has only a part, `CheckpointError` for a weight that is not finite.
    """
    if isinstance(model, EncoderDecoder):
        raise UsageError(
            "An encoder-decoder has two streams and cannot be analysed as one system. Choose a decoder-only model."
        )
    _refuse_parts(model)
    stored = {weight.stored for weight in model.parameters() if isinstance(weight, StoredWeight) and weight.has_scales}
    replaced: dict[Tensor, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        plain = tensor.rows() if isinstance(tensor, StoredWeight) else tensor.detach()
        plain = plain.to(dtype) if plain.is_floating_point() else plain
        require_finite(name, plain, "the model has no operating point. Use an earlier checkpoint.")
        replaced[tensor] = nn.Parameter(plain, False) if isinstance(tensor, nn.Parameter) else plain
    copy = model.sharing_copy(cast("dict[nn.Parameter, nn.Parameter]", replaced)).eval()
    name = next(name for name, kind in DTYPES.items() if kind is dtype)
    notes = [f"Attention is computed step by step, and all weights and activations are {name}."]
    if stored:
        notes.append(f"Weights stored in {' and '.join(sorted(stored))} were dequantised.")
    return copy, tuple(notes)


def require_finite(name: str, weight: Tensor, consequence: str) -> None:
    """Raises `CheckpointError` for numbers that are not finite in the weight of this name, with their `consequence`."""
    if weight.is_floating_point() and not (finite := weight.detach().isfinite()).all():
        count = int((~finite).sum())
        are = "is" if count == 1 else "are"
        raise CheckpointError(f"{name} has {counted(count, 'number')} that {are} not finite, so {consequence}")


def _refuse_parts(model: Transformer) -> None:
    whole = parameter_shapes(model.config)
    for name, weight in model.named_parameters():
        # What is split over processes has another shape here, or is a DTensor with a local part.
        if hasattr(weight, "_local_tensor") or tuple(whole.get(name, weight.shape)) != tuple(weight.shape):
            raise UsageError(
                f"This process has only a part of {name}, because the model is split. Load the model whole."
            )


@dataclass(frozen=True, eq=False)
class OperatingPoint:
    """A pass over a prompt, and the derivatives between its parts. Shapes: T tokens, D d_model, L layers, V vocab.

    `notes` are sentences about what was done to the model before. The stream ``h_0, ..., h_L`` is that of the trace.
    `proceed` is called before each pass of the model and each product with a derivative.
    """

    trace: Trace
    notes: tuple[str, ...]
    proceed: Callable[[], None] = lambda: None

    @classmethod
    def of(
        cls,
        model: Transformer,
        tokenizer: Tokenizer,
        prompt: str | Sequence[int],
        dtype: torch.dtype = torch.float32,
        proceed: Callable[[], None] = lambda: None,
    ) -> OperatingPoint:
        """Runs the network over `prompt`; raises the errors of `plain_copy` and `read_traced`."""
        plain, notes = plain_copy(model, dtype)
        plain.register_forward_pre_hook(lambda *_: proceed())
        trace = Trace.of(plain, tokenizer, prompt)
        for layer, stream_TD in enumerate(trace.residuals):
            if not stream_TD.isfinite().all():
                where = "the embeddings" if layer == 0 else f"block {layer - 1}"
                raise CheckpointError(f"The stream after {where} is not finite at this prompt. Try --dtype float64.")
        return cls(trace, notes, proceed)

    @property
    def model(self) -> Transformer:
        """The plain copy of the network."""
        return self.trace.model

    @property
    def stream(self) -> Stream:
        """The residual stream."""
        return self.trace.target

    @property
    def states(self) -> Tensor:
        """The stream before each block and after the last (L + 1, T, D)."""
        return self.trace.residuals

    @property
    def num_layers(self) -> int:
        """L."""
        return self.trace.num_layers

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.trace.num_tokens

    @property
    def tokens(self) -> list[str]:
        """The texts of the prompt's tokens."""
        return [token.text for token in self.trace.tokens]

    def position(self, position: int) -> int:
        """The number of a token, of which -1 is the last; raises `UsageError` if the prompt has no such token."""
        if not -self.num_tokens <= position < self.num_tokens:
            count = counted(self.num_tokens, "token")
            raise UsageError(f"--position {position} is outside the prompt, which has {count}.")
        return position % self.num_tokens

    @cached_property
    def _ids(self) -> Tensor:
        return torch.tensor([self.trace.token_ids], device=self.model.device)

    def run(self, first: int, last: int, x_BTD: Tensor) -> list[Tensor]:
        """Runs the blocks from `first` to before `last` on a stream, and returns it after each of them.

        What blocks get beside the stream is that of this pass, except what these blocks compute from `x_BTD`.
        """
        if first == 0:
            ids = self._ids.expand(len(x_BTD), -1)
            passing: Passing = self.model.passing(ids, x_BTD)
        else:
            passing = self.stream.passing.of_rows(len(x_BTD))
        streams = []
        with watch(self.model, {_ALL_WEIGHTS: _look}):
            for layer in range(first, last):
                x_BTD = self.stream.run_block(layer, x_BTD, passing)
                streams.append(x_BTD)
        return streams

    def logits(self, stream_BTD: Tensor) -> Tensor:
        """Returns the logits (B, T, V) of the stream after the last block."""
        return self.model.read_out(self.model.finish(stream_BTD))

    def derivative(self, function: Callable[[Tensor], Tensor], at: Tensor) -> Jacobian:
        """The derivative of a function that runs parts of the network."""
        return Jacobian(function, at, self.proceed)

    def between(self, first: int, last: int) -> Jacobian:
        """The derivative of the stream before block `last` by the stream before block `first`, (T, D) by (T, D)."""
        return self.derivative(lambda x_TD: self.run(first, last, x_TD[None])[-1][0], self.states[first])

    def part(self, layer: int, begin: str, end: str) -> Jacobian:
        """The derivative of the value at one probe of a block by that at an earlier one, such as `attention_input`."""
        path = f"{self.stream.path}.{layer}"

        def function(x_TD: Tensor) -> Tensor:
            found: list[Tensor] = []
            observers: dict[str, Observer] = {f"{path}.{begin}": lambda _: x_TD[None], f"{path}.{end}": found.append}
            with watch(self.model, observers):
                self.run(layer, layer + 1, self.states[layer][None])
            return found[0][0]

        return self.derivative(function, self.trace[f"{path}.{begin}"])

    def norms(self, layer: int) -> dict[str, Jacobian]:
        """The derivatives of the norms of a block, such as `attention_norm`, at their inputs, in their order."""
        block, inputs = self.stream.blocks[layer], dict[str, Tensor]()
        found = {name: norm for name in _NORMS if (norm := getattr(block, name)) is not None}
        hooks = [
            norm.register_forward_pre_hook(lambda _, given, name=name: inputs.update({name: given[0][0]}))
            for name, norm in found.items()
        ]
        try:
            with torch.no_grad():
                self.run(layer, layer + 1, self.states[layer][None])
        finally:
            for hook in hooks:
                hook.remove()
        return {name: self.derivative(found[name], point) for name, point in inputs.items()}

    def read_in_nats(self, stream_TD: Tensor) -> Tensor:
        """Returns the logits (T, V) of the last stream in units whose squared changes are twice a divergence in nats.

        To second order ``KL(p || p + dp) = 1/2 dz^T F dz`` with the Fisher metric of the softmax, ``F = diag(p) -
        p p^T`` (Amari 1998). With p fixed, ``sqrt(p) (z - p^T z)`` has the square ``z^T F z``.
        """
        logits = self.logits(stream_TD[None])[0]
        p = logits.detach().softmax(-1)
        return p.sqrt() * (logits - (p * logits).sum(-1, keepdim=True))


def _look(value: Tensor) -> None:
    """Does nothing; a watched probe alone makes attention compute step by step."""
