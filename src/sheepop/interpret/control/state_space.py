"""The network as a state-space system: what a block remembers, what one token can control, what the logits tell of it.

A block reads one token after the other. Its state x_t are the keys and values of the tokens before t, its input u_t is
the stream at t, and its output y_t the stream behind it. Linearised at a prompt::

    x_(t+1) = A x_t + B u_t        y_t = C x_t + D u_t

A keeps what is in the cache (a sliding window drops the oldest), and B appends a key and a value. Shapes: T tokens, D
d_model, L layers, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sheepop.core.facts import counted, visible_line
from sheepop.generate import GenerationConfig
from sheepop.generate.sampler import Row, Sampler
from sheepop.interpret.control.finding import PromptFinding, columns, lines_by_layer
from sheepop.interpret.control.gains import Gain, both, gain_of
from sheepop.interpret.control.jacobian import Jacobian, signs
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.interpret.pictures import Picture
from sheepop.model import num_parameters
from sheepop.model.probe import Observer, watch

_STEPS = 12
_SEEDS = 16
_FINER, _TRIED = 16, (0.25, 16.0)  # the number of lengths that are tried, and their range, in linear ones
_NOTICED = 1e-3  # nats by which a prediction must change for a direction to count as observed


@dataclass(frozen=True, eq=False)
class BlockSystem:
    """The gains of the linearised system of a block at the last token.

    `b` maps the stream at the token to its key and value, `c` the earlier keys and values to the output, and `d` the
    stream at the token to the output. `memory` maps the streams of all earlier tokens to the output, through whatever
    the block remembers. b and c are None for a block without keys of its own, c and `memory` for a single token.
    """

    d: Gain
    memory: Gain | None
    b: Gain | None
    c: Gain | None

    def parts(self) -> dict[str, Gain | None]:
        """The gains by name."""
        return {"B": self.b, "C": self.c, "D": self.d, "memory": self.memory}


@dataclass(frozen=True)
class Reach:
    """What it takes to make `token_id` the likeliest next token by a change of one token's vector.

    To first order, no change shorter than `linear` makes it likelier than the likeliest one now. In the network itself
    the shortest tried change along that direction is `real` long; None if none was found.
    """

    token_id: int
    text: str
    probability: float
    linear: float
    real: float | None


@dataclass(frozen=True, eq=False)
class StateSpace(PromptFinding):
    """A network at a prompt as a state-space system, seen from the embedding of the token at `position`.

    `length` is that of this embedding. `reaches` are the tokens that a change of it can make the likeliest next token.
    `observed` maps the embedding to the next-token prediction, in root nats (see `gains`); of its directions,
    `distinct` (at least, unless the search went through all) change the prediction by a thousandth of a nat if they
    have a tenth of the embedding's length, and `effective_rank` is ``(sum s^2)^2 / sum s^4`` of its singular values s.
    """

    verb: ClassVar[str] = "state-space"
    dimensions: dict[str, int]
    blocks: tuple[BlockSystem, ...]
    position: int
    length: float
    likeliest: str
    reaches: tuple[Reach, ...]
    observed: Gain
    distinct: int
    effective_rank: float
    passes_equal: bool
    drawn: tuple[str, ...]

    def table(self) -> list[str]:
        """The dimensions, the gains of each block's system, and the tokens that can be reached."""
        sizes = [f"  {name}: {size:,}" for name, size in self.dimensions.items()]
        names = list(self.blocks[0].parts())
        rows = [[layer, *map(both, own.parts().values())] for layer, own in enumerate(self.blocks)]
        head = ["token", "probability:.2%", "least (linear):.3g", "found (real):.3g", "of its length:.1%"]
        reached = [
            (visible_line(to.text), to.probability, to.linear, to.real or "not found", to.linear / self.length)
            for to in self.reaches
        ]
        return [
            "Dimensions:",
            *sizes,
            "",
            "Largest and typical gain of each block at the last token:",
            *columns(["block", *names], rows),
            "",
            f"Changes of the embedding of token {self.position} that make another token likelier than "
            f"{visible_line(self.likeliest)!r}:",
            *columns(head, reached),
        ]

    def sentences(self) -> list[str]:
        """What can be controlled, what can be observed, and what the seed changes."""
        place = self.named(self.position)
        reached = f"No change of {place} that was tried makes another token likeliest."
        if done := [(reach.real, reach) for reach in self.reaches if reach.real is not None]:
            real, nearest = min(done, key=lambda pair: pair[0])
            reached = (
                f"A change of {real:.3g}, {real / self.length:.1%} of the embedding of {place}, makes "
                f"{visible_line(nearest.text)!r} the likeliest next token; the linearised network says "
                f"{nearest.linear:.3g}."
            )
        least = "" if self.observed.spectrum.is_whole else "at least "
        equal = "does not change" if self.passes_equal else "CHANGES"
        return [
            reached,
            f"Of {self.dimensions['numbers in a vector of the stream']:,} directions of this embedding, {least}"
            f"{self.distinct} can be told from the next-token prediction; the effective rank is "
            f"{self.effective_rank:.1f}.",
            f"The seed {equal} the forward pass. {_SEEDS} seeds of the sampler drew "
            f"{counted(len(set(self.drawn)), 'different token')}.",
        ]

    def pictures(self) -> Iterator[Picture]:
        """The largest gains of each block's system."""
        parts = [own.parts() for own in self.blocks]
        drawn = {name: [getattr(own[name], "largest", math.nan) for own in parts] for name in parts[0]}
        yield lines_by_layer("state_space", "Each block as a system at the last token", drawn, "Largest gain")


def state_space(
    point: OperatingPoint, position: int = -1, *, candidates: int = 8, steps: int = 32, probes: int = 8, seed: int = 0
) -> StateSpace:
    """Describes a network at a prompt as a state-space system; `position` is the token whose embedding is changed.

    `candidates` is the number of likeliest other next tokens that are tried to be reached. Raises `UsageError` for a
    position outside the prompt.
    """
    position = point.position(position)
    vector = point.states[0][position]
    length = float(vector.norm())
    observed = point.derivative(
        lambda x_D: point.read_in_nats(point.through(_replaced(point, position, x_D[None]))[-1][0, -1:]), vector
    )
    gain = gain_of("observed", observed, steps, probes, seed, count=steps)
    values = torch.tensor([value.value for value in gain.spectrum.largest])
    noticed = int((0.5 * (0.1 * length * values).square() >= _NOTICED).sum())
    trace = point.trace
    return StateSpace(
        point.notes,
        point.tokens,
        _dimensions(point),
        tuple(_system(point, layer, probes, seed) for layer in range(point.num_layers)),
        position,
        length,
        trace.text_of(int(trace.logits_behind(-1).argmax())),
        tuple(_reaches(point, position, candidates)),
        gain,
        noticed,
        _effective_rank(observed, gain, probes, seed),
        _passes_equal(point),
        tuple(_drawn(point)),
    )


def _effective_rank(jacobian: Jacobian, gain: Gain, probes: int, seed: int) -> float:
    """``(sum s^2)^2 / sum s^4`` of the singular values, of which the search found all, or from random directions."""
    if gain.spectrum.is_whole:
        squares = torch.tensor([value.value**2 for value in gain.spectrum.largest])
        return float(squares.sum() ** 2 / squares.square().sum())
    vectors = (signs(jacobian.point, seed, "rank", probe) for probe in range(probes))
    fourth = sum(float(jacobian.vjp(jacobian.jvp(v)).double().square().sum()) for v in vectors) / probes
    return (len(jacobian.point) * gain.typical.value**2) ** 2 / fourth


def _replaced(point: OperatingPoint, position: int, x_BD: Tensor) -> Tensor:
    """The embeddings (B, T, D) with that at `position` replaced by `x_BD`."""
    embedded = point.states[0].expand(len(x_BD), -1, -1)
    return torch.cat([embedded[:, :position], x_BD[:, None], embedded[:, position + 1 :]], 1)


def _next_logits(point: OperatingPoint, position: int, x_BD: Tensor) -> Tensor:
    """The logits (B, V) behind the prompt with the embedding at `position` replaced by `x_BD`."""
    return point.logits(point.through(_replaced(point, position, x_BD))[-1][:, -1:])[:, 0]


def _dimensions(point: OperatingPoint) -> dict[str, int]:
    config = point.model.config
    cached = [config.cached_heads(layer) for layer in range(config.num_layers)]
    return {
        "tokens of the prompt": point.num_tokens,
        "numbers in a vector of the stream": config.d_model,
        "numbers in the stream between two blocks": point.num_tokens * config.d_model,
        "blocks": point.num_layers,
        "numbers in the cache for each token": sum(of.kv_heads * (of.key_width + of.value_width) for of in cached),
        "outputs (tokens of the vocabulary)": config.vocabulary,
        "parameters": num_parameters(config),
    }


def _system(point: OperatingPoint, layer: int, probes: int, seed: int) -> BlockSystem:
    stream_TD, attention = point.states[layer], point.stream.blocks[layer].attention
    path = f"{point.stream.path}.{layer}.attention"
    names = [f"{path}.rotated_k", f"{path}.v"]
    maps: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {}

    def output(x_TD: Tensor, observers: dict[str, Observer]) -> Tensor:
        with watch(point.model, observers):
            return point.run(layer, layer + 1, x_TD[None])[0][0, -1]

    def written(x_1D: Tensor) -> Tensor:
        found: list[Tensor] = []
        output(torch.cat([stream_TD[:-1], x_1D]), dict.fromkeys(names, found.append))
        return torch.cat([each[0, :, -1].flatten() for each in found])

    maps["d"] = lambda x_1D: output(torch.cat([stream_TD[:-1], x_1D]), {}), stream_TD[-1:]
    if point.num_tokens > 1:
        maps["memory"] = lambda x_tD: output(torch.cat([x_tD, stream_TD[-1:]]), {}), stream_TD[:-1]
    if attention is not None and attention.has_keys:
        maps["b"] = written, stream_TD[-1:]
        if point.num_tokens > 1:
            earlier = [point.trace[name][:, :-1] for name in names]

            def read(cached: Tensor) -> Tensor:
                parts = cached.tensor_split([earlier[0].numel()])
                observers: dict[str, Observer] = {
                    name: lambda now, part=part.view_as(like): torch.cat([part, now[0, :, -1:]], 1)[None]  # type: ignore[misc]
                    for name, part, like in zip(names, parts, earlier, strict=True)
                }
                return output(stream_TD, observers)

            maps["c"] = read, torch.cat([each.flatten() for each in earlier])
    found = {name: gain_of(name, point.derivative(*map_), _STEPS, probes, seed) for name, map_ in maps.items()}
    return BlockSystem(found["d"], found.get("memory"), found.get("b"), found.get("c"))


def _reaches(point: OperatingPoint, position: int, candidates: int) -> Iterator[Reach]:
    logits = point.trace.logits_behind(-1).double()
    p, order = logits.softmax(-1), logits.argsort(descending=True).tolist()
    vector = point.states[0][position].clone().requires_grad_()
    with torch.enable_grad():
        of_last = _next_logits(point, position, vector[None])[0]
    for token in order[1 : candidates + 1]:
        (slope,) = torch.autograd.grad(of_last[token] - of_last[order[0]], vector, retain_graph=True)
        steepness = float(slope.norm())
        linear = float(logits[order[0]] - logits[token]) / steepness if steepness else torch.inf
        real = _shortest(point, position, slope / steepness, linear, token) if steepness and linear > 0 else None
        yield Reach(token, point.trace.text_of(token), float(p[token]), linear, real)


@torch.no_grad()
def _shortest(point: OperatingPoint, position: int, direction: Tensor, linear: float, token: int) -> float | None:
    """The shortest of some lengths along a direction at which `token` is the likeliest next token.

    They are tried in two rounds, of which the second is between two lengths of the first.
    """
    low, high = (factor * linear for factor in _TRIED)
    for _ in range(2):
        lengths = torch.logspace(math.log10(low), math.log10(high), _FINER, dtype=torch.float64)
        moved = point.states[0][position] + lengths.to(direction)[:, None] * direction
        hits = (_next_logits(point, position, moved).argmax(-1) == token).nonzero()[:, 0]
        if not len(hits):
            return None
        low, high = float(lengths[max(0, int(hits[0]) - 1)]), float(lengths[int(hits[0])])
    return high


@torch.no_grad()
def _passes_equal(point: OperatingPoint) -> bool:
    """Whether two passes under different states of the global generator are equal to the bit."""
    with torch.random.fork_rng(devices=[]):
        found = []
        for state in (0, 1):
            torch.manual_seed(state)
            found.append(point.through(point.states[:1])[-1])
    return torch.equal(*found)


def _drawn(point: OperatingPoint) -> Iterator[str]:
    """The next tokens that the sampler draws at temperature 1 with some seeds."""
    trace = point.trace
    sampler = Sampler.of(trace.tokenizer, trace.model, frozenset())
    config = GenerationConfig(temperature=1.0)
    logits = trace.logits_behind(-1).expand(_SEEDS, -1).contiguous()
    rows = [Row(config, 0, seed) for seed in range(_SEEDS)]
    return (trace.text_of(token) for token in sampler.choose(logits, rows).token_ids)
