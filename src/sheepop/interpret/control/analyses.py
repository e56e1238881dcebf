"""The analyses of a loaded model by name: ``lm.analyze.gains("Once upon")``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sheepop.core.errors import UsageError
from sheepop.generate import GenerationConfig
from sheepop.interpret.control.decode import Decode, WrittenToken, decode, written_tokens
from sheepop.interpret.control.diagrams import BlockDiagrams, block_diagrams
from sheepop.interpret.control.gains import GainChanges, Gains, compare_points, gains
from sheepop.interpret.control.influence import Impulse, Influence, impulse, influence
from sheepop.interpret.control.operating_point import DTYPES, OperatingPoint
from sheepop.interpret.control.state_space import StateSpace, state_space
from sheepop.model import Transformer
from sheepop.tokenizer import Tokenizer

Text = str | Sequence[int]
"""A prompt, or its token ids."""


@dataclass(frozen=True)
class Analyses:
    """The analyses of one model. Each returns a result with `table`, `sentences`, `to_dict` and `pictures`.

    Weights and activations are `dtype`, float32 or float64. Every analysis raises the errors of `OperatingPoint.of`.
    `proceed` is called again and again, and may raise to end an analysis.
    """

    model: Transformer
    tokenizer: Tokenizer
    dtype: str = "float32"
    proceed: Callable[[], None] = lambda: None

    def at(self, prompt: Text) -> OperatingPoint:
        """The operating point at a prompt; raises `UsageError` for an unknown `dtype`."""
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype must be {' or '.join(DTYPES)}, not {self.dtype!r}.")
        return OperatingPoint.of(self.model, self.tokenizer, prompt, DTYPES[self.dtype], self.proceed)

    def gains(self, prompt: Text, *, steps: int = 32, probes: int = 8, seed: int = 0) -> Gains:
        """The gains of every block and part, of the whole network and of its output; see `gains`."""
        return gains(self.at(prompt), steps=steps, probes=probes, seed=seed)

    def influence(self, prompt: Text, *, probes: int = 4, seed: int = 0) -> Influence:
        """How far each token reaches the last states of later ones, beside attention rollout and weights."""
        return influence(self.at(prompt), probes=probes, seed=seed)

    def impulse(
        self, prompt: Text, position: int = 0, *, size: float = 0.01, probes: int = 8, seed: int = 0
    ) -> Impulse:
        """The response to a change of the embedding at `position`, of `size` times its length."""
        return impulse(self.at(prompt), position, size=size, probes=probes, seed=seed)

    def state_space(
        self, prompt: Text, position: int = -1, *, candidates: int = 8, steps: int = 32, probes: int = 8, seed: int = 0
    ) -> StateSpace:
        """The network as a state-space system, and what the embedding at `position` controls."""
        options = {"candidates": candidates, "steps": steps, "probes": probes, "seed": seed}
        return state_space(self.at(prompt), position, **options)

    def blocks(self, prompt: Text, *, layer: int = 0, fed: int = 4, probes: int = 8, seed: int = 0) -> BlockDiagrams:
        """The block diagrams of the network, reduced step by step, with the loop of generation over `fed` tokens."""
        return block_diagrams(self.at(prompt), layer=layer, fed=fed, probes=probes, seed=seed)

    def compare(self, other: Analyses, prompt: Text, *, probes: int = 8, seed: int = 0) -> GainChanges:
        """What changed from this model to another: ``lm.analyze.compare(tuned.analyze, "Once")``."""
        return compare_points(self.at(prompt), other.at(prompt), probes=probes, seed=seed)

    def decode(
        self, prompt: Text, settings: GenerationConfig | None = None, *, length: int = 48, pairs: int = 8, seed: int = 0
    ) -> Decode:
        """The closed loop of generation after a prompt, by default with the usual settings; see `decode`."""
        return decode(self.at(prompt), settings or GenerationConfig(), length=length, pairs=pairs, seed=seed)

    def writing(
        self, prompt: Text, settings: GenerationConfig | None = None, *, length: int = 48, seed: int = 0
    ) -> Iterator[WrittenToken]:
        """The text of `decode`, token by token, with the state of the loop at each; see `written_tokens`."""
        return written_tokens(self.at(prompt), settings or GenerationConfig(), length=length, seed=seed)
