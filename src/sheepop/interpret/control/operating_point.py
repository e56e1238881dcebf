"""The operating point of a network at a prompt: the pass at which it is linearised, and the maps between its parts.

The forward pass is the network's own. Attention is computed step by step, because fused kernels have no second
derivative, and weights are in float32 or float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from sheepop.adapt.stored_weight import StoredWeight
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.facts import counted
from sheepop.interpret.control.jacobian import Jacobian
from sheepop.interpret.trace import Trace
from sheepop.model import EncoderDecoder, Transformer
from sheepop.model.accounting.cost import parameter_shapes
from sheepop.model.probe import Observer, named_probes, watch
from sheepop.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "float64": torch.float64}
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


@contextmanager
def stepwise_attention(
    model: nn.Module, observe: Callable[[str, Tensor], None] = lambda path, scores: None
) -> Iterator[None]:
    """Within the block attention is computed in steps that have second derivatives; `observe` sees all scores.

    It is called with the path of the attention layer and its masked scores (B, H, T, S). A watched probe alone makes
    attention compute step by step.
    """
    paths = [name.removesuffix(".scores") for name in named_probes(model) if name.endswith(".scores")]
    with watch(model, {f"{path}.scores": partial(observe, path) for path in paths}):
        yield


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


class OperatingPoint:
    """A pass over a prompt, and the derivatives between its parts. Shapes: T tokens, D d_model, L layers, V vocab.

    `notes` are sentences about what was done to the model before; `model` is the plain copy. `stream` is the residual
    stream of the trace, and `states` (L + 1, T, D) are its values ``h_0, ..., h_L`` before each block and after the
    last. `tokens` are the texts of the prompt's tokens. `proceed` is called before each pass of the model and each
    product with a derivative.
    """

    def __init__(self, trace: Trace, notes: tuple[str, ...], proceed: Callable[[], None] = lambda: None) -> None:
        self.trace, self.notes, self.proceed = trace, notes, proceed
        self.model, self.stream, self.states = trace.model, trace.target, trace.residuals
        self.num_layers, self.num_tokens = trace.num_layers, trace.num_tokens
        self.tokens = [token.text for token in trace.tokens]
        self._ids = torch.tensor([trace.token_ids], device=trace.model.device)

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

    def position(self, position: int) -> int:
        """The number of a token, of which -1 is the last; raises `UsageError` if the prompt has no such token."""
        if not -self.num_tokens <= position < self.num_tokens:
            count = counted(self.num_tokens, "token")
            raise UsageError(f"--position {position} is outside the prompt, which has {count}.")
        return position % self.num_tokens

    def run(self, first: int, last: int, x_BTD: Tensor) -> list[Tensor]:
        """Runs the blocks from `first` to before `last` on a stream, and returns it after each of them.

        What blocks get beside the stream is that of this pass, except what these blocks compute from `x_BTD`.
        """
        count, streams = len(x_BTD), []
        whole, later = self.model.passing, self.stream.passing
        passing = whole(self._ids.expand(count, -1), x_BTD) if first == 0 else later.of_rows(count)
        with stepwise_attention(self.model):
            for layer in range(first, last):
                x_BTD = self.stream.run_block(layer, x_BTD, passing)
                streams.append(x_BTD)
        return streams

    def through(self, x_BTD: Tensor) -> list[Tensor]:
        """Runs all blocks on a stream, and returns it after each of them."""
        return self.run(0, self.num_layers, x_BTD)

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
