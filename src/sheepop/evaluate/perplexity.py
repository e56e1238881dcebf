"""How well a model predicts text, in sliding windows: loss, perplexity, accuracy and bits per byte."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError, UsageError
from sheepop.evaluate.calibration import reliability
from sheepop.evaluate.results import Evaluation, Item, Measure, Table
from sheepop.evaluate.statistics import ratio_interval
from sheepop.generate import Generator
from sheepop.generate.likelihood import Continuation, LikelihoodScorer
from sheepop.tokenizer import Tokenizer

_WINDOWS_AT_ONCE = 64  # for each rank
_FEWEST_DOCUMENTS = 20  # with fewer, intervals come from windows instead of documents
_MOST_SOURCES = 20
_HEADER = ("Tokens", "Bytes", "Loss (nats per token)", "Next-token accuracy", "Bits per byte")


@dataclass(frozen=True)
class Text:
    """A text with a name that is unique among the texts scored together, and its source for the report."""

    id: str
    text: str
    source: str = ""


@dataclass(frozen=True)
class Window:
    """Tokens of a text that are predicted together, and the tokens before them that the model sees."""

    text: Text
    context: Sequence[int]
    predicted: Sequence[int]


def windows(text: Text, tokenizer: Tokenizer, length: int, stride: int) -> Iterator[Window]:
    """The windows of a text, which predict each of its tokens once, and the end-of-text token if there is one.

    The first window predicts up to `length` tokens, each further window `stride` tokens, which have at least
    `length - stride` tokens before them. The first token of a text is predicted only if the tokenizer puts a token
    before every text.
    """
    end = tokenizer.special_id("eos")
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(text.text), *([] if end is None else [end])]
    begin, stop = 1, length + 1
    while begin < len(ids):
        yield Window(text, ids[max(0, stop - length - 1) : begin], ids[begin:stop])
        begin, stop = stop, stop + stride


Sums = NDArray[np.float64]
"""Sums over tokens: tokens, bytes, nats, and right predictions (4,)."""


@dataclass
class _Found:
    """Sums over all predicted tokens, by window, document, source and depth (log2 of the tokens before a token)."""

    pieces: list[Sums] = field(default_factory=list)
    documents: dict[str, Sums] = field(default_factory=lambda: defaultdict(lambda: np.zeros(4)))
    sources: dict[str, Sums] = field(default_factory=lambda: defaultdict(lambda: np.zeros(4)))
    depths: dict[int, Sums] = field(default_factory=lambda: defaultdict(lambda: np.zeros(4)))
    unknown: int = 0
    confidences: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)

    def add(self, window: Window, sizes: NDArray[np.int64], given: Continuation) -> int:
        """Adds the tokens of a window, which have `sizes` bytes; returns the sum of these."""
        text, count = window.text, len(given.logprobs)
        by_token = np.stack([np.ones(count), sizes, -np.array(given.logprobs), given.is_likeliest], axis=1)
        sums = by_token.sum(0)
        self.pieces.append(sums)
        self.documents[text.id] += sums
        self.sources[text.source] += sums
        octaves = np.log2(np.arange(len(window.context), len(window.context) + count)).astype(int)
        for octave in np.unique(octaves):
            self.depths[int(octave)] += by_token[octaves == octave].sum(0)
        self.confidences += [min(1.0, math.exp(value)) for value in given.best_logprobs]
        self.right += given.is_likeliest
        return int(sizes.sum())


def evaluate_perplexity(
    generator: Generator,
    texts: Iterable[Text],
    *,
    name: str = "held-out text",
    stride: int | None = None,
    on_done: Callable[[int], None] | None = None,
) -> Evaluation:
    """Scores `texts` in windows that each predict `stride` tokens, by default half the model's context.

    `on_done` gets the number of further bytes that are finished. Raises `DataError` if there is nothing to predict, and
    `UsageError` for a stride that is longer than the model's context.
    """
    length = generator.model.config.max_seq_len
    stride = max(1, length // 2) if stride is None else stride
    if not 1 <= stride <= length:
        raise UsageError(f"stride = {stride} must be at least 1 and at most the model's context of {length} tokens.")
    scorer, tokenizer, found = LikelihoodScorer(generator), generator.tokenizer, _Found()
    sizes, unknown = np.asarray(tokenizer.byte_lengths()), tokenizer.special_id("unk")
    waiting = (window for text in texts for window in windows(text, tokenizer, length, stride))
    while group := list(islice(waiting, _WINDOWS_AT_ONCE * generator.ranks.size)):
        scored = scorer.score([(window.context, window.predicted) for window in group])
        found.unknown += sum(token == unknown for window in group for token in window.predicted)
        done = sum(
            found.add(window, sizes[list(window.predicted)], given) for window, given in zip(group, scored, strict=True)
        )
        if on_done is not None:
            on_done(done)
    if not sum(sums[1] for sums in found.documents.values()):
        raise DataError("There is no text to predict: every text is empty or a single token. Give more text.")
    return _evaluation(name, found, {"stride": stride, "context": length})


def _evaluation(name: str, found: _Found, settings: Mapping[str, Any]) -> Evaluation:
    calibration = reliability(found.confidences, found.right)
    items = [
        Item(str(key), {"bits_per_byte": _bits_per_byte(sums)}, weight=float(sums[1]))
        for key, sums in found.documents.items()
        if sums[1]
    ]
    notes = []
    if len(found.documents) < _FEWEST_DOCUMENTS:
        notes.append(
            f"There are fewer than {_FEWEST_DOCUMENTS} documents, so intervals come from windows of up to "
            f"{settings['context']} tokens, which are not quite independent of each other."
        )
    if found.unknown:
        notes.append(
            f"{found.unknown:,} of {len(found.right):,} predicted tokens replace characters that the tokenizer cannot "
            "encode. The model need not distinguish these, so bits per byte are too low."
        )
    measures = [*_means(found), Measure.calibration_error(calibration, "the likeliest next token")]
    return Evaluation("perplexity", name, measures, items, _tables(found), notes, settings, reliability=calibration)


def _means(found: _Found) -> list[Measure]:
    """Loss, perplexity, accuracy and bits per byte; intervals are over documents, or over windows of few documents."""
    few = len(found.documents) < _FEWEST_DOCUMENTS
    rows = np.stack(found.pieces if few else list(found.documents.values()))
    tokens, num_bytes, nats, right = rows.T
    whole = rows.sum(0)
    low, high = ratio_interval(nats, tokens)
    bits, loss, accuracy = _bits_per_byte(whole), float(whole[2] / whole[0]), float(whole[3] / whole[0])

    def measure(name: str, value: float, interval: tuple[float, float], definition: str) -> Measure:
        return Measure(name, value, definition, int(whole[0]), interval, higher_is_better=name == "accuracy")

    return [
        measure(
            "bits_per_byte",
            bits,
            ratio_interval(nats / math.log(2), num_bytes),
            "Minus the binary logarithm of the probability of all predicted tokens, per UTF-8 byte of their text; the "
            "end of each text is predicted too. Comparable between tokenizers and with compressors.",
        ),
        measure(
            "loss",
            loss,
            (low, high),
            "Minus the natural logarithm of the probability of a token, given the tokens before it in the window, on "
            "average over tokens.",
        ),
        measure(
            "perplexity",
            _exp(loss),
            (_exp(low), _exp(high)),
            "e to the power of the loss. It depends on the tokenizer, so compare only models with the same one.",
        ),
        measure(
            "accuracy",
            accuracy,
            ratio_interval(right, tokens),
            "How often the likeliest token is the next token of the text. It depends on the tokenizer.",
        ),
    ]


def _tables(found: _Found) -> list[Table]:
    lengths: dict[int, Sums] = defaultdict(lambda: np.zeros(4))
    for sums in found.documents.values():
        lengths[int(math.log10(max(1.0, sums[1])))] += sums
    sources = sorted(found.sources.items(), key=lambda entry: -entry[1][1])
    if len(sources) > _MOST_SOURCES:
        rest = sum((sums for _, sums in sources[_MOST_SOURCES - 1 :]), np.zeros(4))
        sources = [*sources[: _MOST_SOURCES - 1], (f"{len(sources) - _MOST_SOURCES + 1} others", rest)]
    return [
        _table("By source", "Source", ((key, sums) for key, sums in sources)),
        _table(
            "By number of tokens before the predicted one",
            "Tokens before it",
            ((_span(2**key, 2 ** (key + 1) - 1), found.depths[key]) for key in sorted(found.depths)),
        ),
        _table(
            "By length of the document",
            "Predicted bytes",
            ((_span(10**key, 10 ** (key + 1) - 1), lengths[key]) for key in sorted(lengths)),
        ),
    ]


def _table(title: str, label: str, rows: Iterable[tuple[str, Sums]]) -> Table:
    cells = [
        [key, int(sums[0]), int(sums[1]), sums[2] / sums[0], sums[3] / sums[0], _bits_per_byte(sums)]
        for key, sums in rows
    ]
    return Table(title, (label, *_HEADER), cells)


def _span(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _bits_per_byte(sums: Sums) -> float:
    """Bits per byte; infinite for no bytes."""
    return float(sums[2] / math.log(2) / sums[1]) if sums[1] else math.inf


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
