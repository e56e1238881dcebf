"""The parts that sum to the residual stream: token, positions, every head, every feed-forward network.

A norm is not linear, because it divides by a statistic of its input. With that statistic fixed it is linear, so it maps
each part of a sum separately, and the parts still sum to the network's values (Elhage et al. 2021, "A Mathematical
Framework for Transformer Circuits"). Sums are in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from sheepop.interpret.trace import Keep, Stream, Trace, attentions_of
from sheepop.model.attention.layer import Attention
from sheepop.model.norms import ZeroCenteredRMSNorm
from sheepop.model.probe import Probe, watch


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """A norm as a linear map, with the mean and scale of one input (..., D) fixed.

    ``norm(x) = linear(x) + shift`` for that input; the norm subtracts `mean` and divides by `scale` (..., 1).
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor
    shift: Tensor
    centres: bool = False

    @classmethod
    def of(cls, norm: nn.Module | None, x: Tensor) -> FrozenNorm:
        """Freezes `norm` at the input `x`; None is the identity."""
        mean, ones = torch.zeros_like(x[..., :1]), x.new_ones(x.shape[-1])
        if norm is None:
            return cls(mean, mean + 1, ones, ones * 0)
        if isinstance(norm, nn.LayerNorm):
            mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
            shift = ones * 0 if norm.bias is None else norm.bias.to(x)
            return cls(mean, (variance + norm.eps).sqrt(), norm.weight.to(x), shift, centres=True)
        assert isinstance(norm, ZeroCenteredRMSNorm | nn.RMSNorm)
        eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
        weight = norm.weight.to(x) + (1.0 if isinstance(norm, ZeroCenteredRMSNorm) else 0.0)
        return cls(mean, (x.square().mean(-1, keepdim=True) + eps).sqrt(), weight, ones * 0)

    def linear(self, part: Tensor) -> Tensor:
        """Maps a part (..., D) of the input."""
        centred = part - part.mean(-1, keepdim=True) if self.centres else part
        return centred / self.scale * self.weight


@torch.no_grad()
def norm_statistics(trace: Trace, path: str) -> Tensor:
    """The mean and the scale (T, 2) of the norm at `path`, such as ``blocks.0.attention_norm``.

    The norm subtracts the mean and divides by the scale. Raises `KeyError` if no block has a norm at that path.
    """
    block_path, _, name = path.rpartition(".")
    stream = next((each for each in trace.streams if each.path == block_path.partition(".")[0]), None)
    blocks = {} if stream is None else {found: (layer, block) for layer, (found, block) in enumerate(stream.paths())}
    layer, block = blocks.get(block_path, (0, None))
    norm = None if block is None or name not in _BEFORE else getattr(block, name, None)
    if stream is None or block is None or norm is None:
        raise KeyError(f"no block has a norm {path!r}")
    passed = [f"{block_path}.{probe}" for probe in _BEFORE[name] if isinstance(getattr(block, probe, None), Probe)]
    x_TD = trace[passed[0]] if passed else stream.residuals[layer]
    if block.position == "post":
        x_TD = x_TD + trace[f"{block_path}.{name.removesuffix('_norm')}_output"]
    frozen = FrozenNorm.of(norm, x_TD)
    return torch.cat([frozen.mean, frozen.scale], -1)


# The input of each branch: the first of these probes that its block has, else the stream before the block.
_BEFORE = {"attention_norm": (), "cross_attention_norm": ("middle",), "feed_forward_norm": ("upper_middle", "middle")}


@dataclass(eq=False)
class Parts:
    """Named vectors (D,) that sum to the residual stream at one position."""

    names: list[str] = field(default_factory=list)
    vectors: list[Tensor] = field(default_factory=list)

    @property
    def total(self) -> Tensor:
        """The sum of the vectors (D,)."""
        return torch.stack(self.vectors).sum(0)

    def add(self, name: str, vector: Tensor) -> None:
        """Adds a part, unless it is 0."""
        if bool(vector.any()):
            self.names.append(name)
            self.vectors.append(vector.double())

    def normalise(self, norm: nn.Module | None, name: str) -> None:
        """Maps every part by the norm, frozen at their sum; the norm's shift becomes a part named `name`."""
        if norm is not None:
            frozen = FrozenNorm.of(norm, self.total)
            self.vectors = [frozen.linear(vector) for vector in self.vectors]
            self.add(name, frozen.shift)


def project_heads(attention: Attention, heads_HC: Tensor) -> tuple[Tensor, Tensor]:
    """The output projection of each head alone (H, D), and its bias (D,)."""
    own = torch.eye(len(heads_HC), device=heads_HC.device, dtype=heads_HC.dtype)
    alone = (own[:, :, None] * heads_HC).flatten(1)  # row h has the output of head h, and zeros for the others
    bias = attention.o_proj(torch.zeros_like(alone[:1]))
    return attention.o_proj(alone) - bias, bias[0]


def part_cuts(trace: Trace, position: int, stream: Stream | None = None) -> dict[str, Keep]:
    """Returns the patterns of probes that `parts_of` reads, each with a function that keeps one position."""
    stream = stream or trace.target
    mixed = [f"{path}.attention_output" for path, block in stream.paths() if block.mixer is not None]
    further = [f"{stream.path}.*layer_input_output"] if trace.config.layer_inputs is not None else []
    cuts: dict[str, Keep] = {f"{stream.path}.*attention.head_outputs": lambda value_HTC: value_HTC[:, position]}
    outputs = [f"{stream.path}.*feed_forward_output", *mixed, *further]
    return cuts | dict.fromkeys(outputs, lambda value_TD: value_TD[position])


@torch.no_grad()
def parts_of(
    trace: Trace, position: int, stream: Stream | None = None, values: Mapping[str, Tensor] | None = None
) -> Parts:
    """The parts of a residual stream (None: the target's) after its last block.

    They are the vectors of the token, its n-grams and its position, ``head l.h`` for every head, ``cross head l.h`` for
    heads that attend to a source, ``mixer l`` for what a layer has instead of attention, ``feed-forward l`` for every
    layer, ``layer input l`` if layers have one, and the biases of attention and norms, if any. `values` is what
    `part_cuts` keep of a pass, if the caller has made one already.
    """
    stream = stream or trace.target
    parts = _embedded(trace, position, stream)
    if values is None:
        cuts = part_cuts(trace, position, stream)
        values = trace.collect(cuts, cuts)
    for layer, (path, block) in enumerate(stream.paths()):
        if block.mixer is not None:
            parts.add(f"mixer {layer}", values[f"{path}.attention_output"])
            if block.position == "post":
                parts.normalise(block.attention_norm, f"mixer norm {layer}")
        for kind, attention in attentions_of(block):
            cross = "cross " if kind == "cross_attention" else ""
            attended = Parts()
            added, bias = project_heads(attention, values[f"{path}.{kind}.head_outputs"])
            for head, vector in enumerate(added):
                attended.add(f"{cross}head {layer}.{head}", vector)
            attended.add(f"{cross}attention bias {layer}", bias)
            if attended.vectors:
                attended.normalise(getattr(block, f"{kind}_output_norm"), f"{cross}attention norm {layer}")
            parts.names += attended.names
            parts.vectors += [vector * block.residual_scale for vector in attended.vectors]
            if block.position == "post":
                parts.normalise(getattr(block, f"{kind}_norm"), f"{cross}attention norm {layer}")
        parts.add(f"feed-forward {layer}", values[f"{path}.feed_forward_output"])
        if block.position == "post":
            parts.normalise(block.feed_forward_norm, f"feed-forward norm {layer}")
        if block.layer_input is not None:
            parts.add(f"layer input {layer}", values[f"{path}.layer_input_output"])
        if block.factor is not None:
            parts.vectors = [vector * block.factor.double() for vector in parts.vectors]
    return parts


def _embedded(trace: Trace, position: int, stream: Stream) -> Parts:
    """The parts before the first block."""
    model, parts = trace.model, Parts()
    ids = torch.tensor([stream.token_ids], device=model.device)
    parts.add("token", model.embedding(ids[0, [position]])[0].double() * model.embedding_scale)
    if model.ngrams is not None and stream.causal:
        parts.add("n-grams", model.ngrams(ids)[0, position])
    parts.normalise(model.embedding_norm, "embedding norm")
    if model.added_positions is not None:
        parts.add("position", stream.residuals[0, position].double() - stream.embedded[position].double())
    return parts


@dataclass(frozen=True)
class Attribution:
    """The contribution of each part of the residual stream to a logit at a position: `names` with `values`.

    With a `rival`, the contributions are to the difference of two logits. They sum to `total`, the logit before a soft
    cap.
    """

    position: int
    token_id: int
    rival: int | None
    names: list[str]
    values: list[float]

    @property
    def total(self) -> float:
        """The sum of the values."""
        return sum(self.values)


@torch.no_grad()
def direct_attribution(
    trace: Trace, position: int, token_id: int, rival: int | None = None, values: Mapping[str, Tensor] | None = None
) -> Attribution:
    """The direct contribution of every part to the logit of `token_id`, not through later blocks.

    The final norm is frozen; `values` are those of `parts_of`. Raises `IndexError` for a position or a token out of
    range.
    """
    position = range(trace.num_tokens)[position]
    vocabulary = range(trace.config.vocabulary)
    chosen = [vocabulary[each] for each in (token_id, rival) if each is not None]
    # An index of a quantised matrix would dequantise all of its rows.
    rows = functional.embedding(torch.tensor(chosen, device=trace.model.device), trace.model.lm_head.weight).double()
    direction = rows[0] if rival is None else rows[0] - rows[1]
    parts = parts_of(trace, position, values=values)
    parts.normalise(trace.model.final_norm, "final norm")
    added = (torch.stack(parts.vectors) @ direction * trace.config.output_scale).tolist()
    if (bias := trace.model.lm_head.bias) is not None:
        parts.names.append("output bias")
        added.append(float(bias[token_id].double() - (0.0 if rival is None else bias[rival].double())))
    return Attribution(position, token_id, rival, parts.names, added)


def gradient_times_input(trace: Trace, position: int, token_id: int) -> list[float]:
    """The product of each token's vector, up to `position`, with its gradient of the next-token log-probability.

    That is the log-probability of `token_id` after `position`. The tokens of a source, if there is one, come first. To
    first order, the product is the loss of log-probability in nats if the token's vector were 0 (Li et al. 2016,
    "Visualizing and Understanding Neural Models in NLP"). Raises `IndexError` for a position out of range.
    """
    position = range(trace.num_tokens)[position]
    leaves: list[Tensor] = []

    def leaf(value_BTD: Tensor) -> Tensor:
        leaves.append(value_BTD.detach().requires_grad_())
        return leaves[-1]

    ids = torch.tensor([trace.token_ids[: position + 1]], device=trace.model.device)
    places = ["embedded"] if trace.source is None else ["source_embedded", "embedded"]
    with torch.enable_grad(), watch(trace.model, dict.fromkeys(places, leaf)):
        log_p = trace.run(ids, logits_to_keep=1)[0, -1].float().log_softmax(-1)[token_id]
        gradients = torch.autograd.grad(log_p, leaves)
    products = [gradient.double() * leaf.detach().double() for gradient, leaf in zip(gradients, leaves, strict=True)]
    found: list[float] = torch.cat(products, 1).sum(-1)[0].tolist()
    return found
