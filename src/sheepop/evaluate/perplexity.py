"""How well a model predicts text, in sliding windows: loss, perplexity, accuracy and bits per byte.

Texts come from files, folders, JSON lines, and the held-out documents of corpora.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError, UsageError
from sheepop.core.json_lines import json_rows
from sheepop.data import Corpus, is_corpus
from sheepop.evaluate.likelihood import Continuation, LikelihoodScorer, window_length
from sheepop.evaluate.results import Evaluation, Item, Measure, Table
from sheepop.evaluate.statistics import ratio_interval, reliability
from sheepop.generate import Generator
from sheepop.model.corpus_memory import CorpusMemory
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
class Held:
    """Texts to predict: their number, and a function that reads them from the beginning."""

    count: int
    read: Callable[[], Iterator[Text]]

    @classmethod
    def of(cls, corpus: Corpus) -> Held:
        """The held-out documents of a corpus."""
        return cls(corpus.validation.num_documents, lambda: _of_corpus(corpus))

    def sample(self, limit: int | None) -> Held:
        """About `limit` of the texts, evenly spaced."""
        if limit is None or limit >= self.count:
            return self
        chosen = set(np.linspace(0, self.count - 1, limit).round().astype(int).tolist())
        return Held(len(chosen), lambda: (text for place, text in enumerate(self.read()) if place in chosen))


def held_texts(paths: Sequence[Path]) -> Held:
    """The texts of files and folders, the field ``text`` of JSON lines, and the held-out documents of corpora.

    Raises `DataError` for a path that does not exist and for a file that is not UTF-8 text.
    """
    files = [(path, file) for path in paths for file in _files(path)]
    counts = [_count(file) for _, file in files]

    def read() -> Iterator[Text]:
        return (text for path, file in files for text in _texts(path, file))

    return Held(sum(counts), read)


def _of_corpus(corpus: Corpus) -> Iterator[Text]:
    for number, document in enumerate(corpus.documents("validation")):
        yield Text(f"{number}:{document.source}", document.text, _folder(document.source))


def _files(path: Path) -> list[Path]:
    if is_corpus(path) or path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist. Give a file, a folder or a corpus to predict.")
    found = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    if not found:
        raise DataError(f"{path} has no files.")
    return found


def _count(file: Path) -> int:
    if is_corpus(file):
        return Corpus.open(file, verify=False).validation.num_documents
    return sum(1 for _ in json_rows(file)) if file.suffix == ".jsonl" else 1


def _texts(path: Path, file: Path) -> Iterator[Text]:
    if is_corpus(file):
        yield from _of_corpus(Corpus.open(file, verify=False))
        return
    name = file.name if file == path else str(file.relative_to(path))
    if file.suffix != ".jsonl":
        yield Text(name, _decoded(file), _folder(name))
        return
    for number, row in json_rows(file):
        text = row.get("text")
        if not isinstance(text, str):
            raise DataError(f'{file}, line {number}: "text" must be a text, not {text!r}.')
        yield Text(f"{name}:{row.get('id', number)}", text, name)


def _decoded(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(
            f"{file} is not UTF-8 text. Convert other files to text with: sheepop data build {file} --output CORPUS"
        ) from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {(error.strerror or '').lower()}.") from None


def _folder(source: str) -> str:
    """The group of a text in the report: the first folder of its name, or else its file extension."""
    parts = Path(source).parts
    return parts[0] if len(parts) > 1 else Path(source).suffix or source


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
    context: int | None = None,
    stride: int | None = None,
    on_done: Callable[[int], None] | None = None,
    memory: CorpusMemory | None = None,
) -> Evaluation:
    """Scores `texts` in windows of `context` tokens that each predict `stride` tokens, by default half the window.

    A `memory` of the training text corrects the predictions.
    `context` is that of `window_length`. `on_done` gets the number of further bytes that are finished. Raises
    `DataError` if there is nothing to predict, and `UsageError` for a window that is longer than the model's context, a
    stride that is longer than the window, and windows that do not fit the free memory.
    """
    length = window_length(generator.model, context)
    stride = max(1, length // 2) if stride is None else stride
    if not 1 <= stride <= length:
        raise UsageError(f"stride = {stride} must be at least 1 and at most the window of {length} tokens.")
    scorer, tokenizer, found = LikelihoodScorer(generator, memory=memory), generator.tokenizer, _Found()
    unknown = tokenizer.special_id("unk")
    waiting = (window for text in texts for window in windows(text, tokenizer, length, stride))
    while group := list(islice(waiting, _WINDOWS_AT_ONCE * generator.ranks.size)):
        scored = scorer.score([(window.context, window.predicted) for window in group])
        found.unknown += sum(token == unknown for window in group for token in window.predicted)
        pairs = zip(group, scored, strict=True)
        done = sum(found.add(window, _byte_lengths(window, tokenizer), given) for window, given in pairs)
        if on_done is not None:
            on_done(done)
    if not sum(sums[1] for sums in found.documents.values()):
        raise DataError("There is no text to predict: every text is empty or a single token. Give more text.")
    longest = generator.model.config.max_seq_len
    notes = []
    if context is None and length != longest:
        reach = f"the model's context is {longest:,}"
        notes.append(f"Windows have {length:,} tokens; {reach}. Choose another length with --context.")
    return _evaluation(name, found, notes, {"stride": stride, "context": length})


def _byte_lengths(window: Window, tokenizer: Tokenizer) -> NDArray[np.int64]:
    return np.array([len(tokenizer.token_bytes(token)) for token in window.predicted], dtype=np.int64)


def _evaluation(name: str, found: _Found, notes: list[str], settings: Mapping[str, Any]) -> Evaluation:
    calibration = reliability(found.confidences, found.right)
    items = [
        Item(str(key), {"bits_per_byte": _bits_per_byte(sums)}, weight=float(sums[1]))
        for key, sums in found.documents.items()
        if sums[1]
    ]
    if len(found.pieces) == 1:
        notes.append("The text fits one window, so there is nothing to compute an interval from. Give more text.")
    elif len(found.documents) < _FEWEST_DOCUMENTS:
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
    """Loss, perplexity, accuracy and bits per byte; intervals are over documents, or over windows of few documents.

    A single window has no intervals.
    """
    few = len(found.documents) < _FEWEST_DOCUMENTS
    rows = np.stack(found.pieces if few else list(found.documents.values()))
    tokens, num_bytes, nats, right = rows.T
    whole = rows.sum(0)
    bits, loss, accuracy = _bits_per_byte(whole), float(whole[2] / whole[0]), float(whole[3] / whole[0])

    def interval_of(values: NDArray[np.float64], sizes: NDArray[np.float64]) -> tuple[float, float] | None:
        return None if len(rows) == 1 else ratio_interval(values, sizes)

    def measure(name: str, value: float, interval: tuple[float, float] | None, definition: str) -> Measure:
        return Measure(name, value, definition, int(whole[0]), interval, higher_is_better=name == "accuracy")

    of_loss = interval_of(nats, tokens)
    return [
        measure(
            "bits_per_byte",
            bits,
            interval_of(nats / math.log(2), num_bytes),
            "Minus the binary logarithm of the probability of all predicted tokens, per UTF-8 byte of their text; the "
            "end of each text is predicted too. Comparable between tokenizers and with compressors.",
        ),
        measure(
            "loss",
            loss,
            of_loss,
            "Minus the natural logarithm of the probability of a token, given the tokens before it in the window, on "
            "average over tokens.",
        ),
        measure(
            "perplexity",
            _exp(loss),
            None if of_loss is None else (_exp(of_loss[0]), _exp(of_loss[1])),
            "e to the power of the loss. It depends on the tokenizer, so compare only models with the same one.",
        ),
        measure(
            "accuracy",
            accuracy,
            interval_of(right, tokens),
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
