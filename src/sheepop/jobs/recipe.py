"""The recipe: chooses the settings that a training run leaves open, for its text, this machine and its budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sheepop.adapt.lora_config import LoraConfig
from sheepop.core.config import leaves, merge, validate, value_text
from sheepop.core.console import Console
from sheepop.core.facts import plural
from sheepop.data import Corpus, DataConfig, is_corpus
from sheepop.data.discovery import Entry, discover
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.recipe_sizes import SIZES, Size
from sheepop.model.presets import PRESETS
from sheepop.report import data_size, flops
from sheepop.train import TrainingConfig

ARCHITECTURE: dict[str, Any] = {
    "position_encoding": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "dropout": 0.0,
}
# The settings of a model without parts that only SheepOp computes.
EXPORTABLE: Mapping[str, Any] = {"ngrams": None, "short_convolution": None}
# Only for decoders.
_SHORT_CONVOLUTION = 3
_NGRAM_ORDERS = (2, 3)
_MOST_NGRAM_ROWS, _FEWEST_NGRAM_ROWS = 65_536, 1024
_BYTES_PER_NGRAM_ROW = 48
MOST_PASSES_OF_NGRAMS = 3.5  # they memorise a text that is read more often: bench/results/minutes.md
_HEAD_DIM = 32
# Limits by the amount of text: bytes per vocabulary entry, fewest bytes for a subword vocabulary, weights per byte, and
# the epochs after which a small model learns little more from the same text.
_BYTES_PER_VOCABULARY_ENTRY = 400
_SMALLEST_VOCABULARY = 512
_BYTES_FOR_WORDS = 20_000
_WEIGHTS_PER_BYTE = 0.75
_MAX_EPOCHS = 16
_BYTES_PER_TOKEN = 3
# A run without a budget in minutes gets a model that this many minutes suffice for.
_MINUTES_AT_MOST = 60.0
# Post-training: learning rate of a model of 1e9 weights, factor for LoRA, highest rate, rows or learnt tokens of a
# step, epochs.
_TUNING_RATE, _LORA_FACTOR, _MOST_TUNING_RATE = 2e-5, 10.0, 1e-2
_TUNING_BATCH, _TUNING_TOKENS, _TUNING_EPOCHS = 16, 8192, 3
_MORE_ROWS = {"ppo": 4, "grpo": 4}
_SMALLER_RATE = {"dpo": 0.2, "ppo": 0.2, "grpo": 0.2}
_GROUP = 8
# Longest row that is chosen for a finished model, which may read far more tokens than fit into memory at once.
MOST_ROW_TOKENS = 2048
_FEW_WEIGHTS = 1_000_000
_EVAL_TOKENS = 16_384  # held-out tokens of each validation in a run with a budget in minutes
_MEMORY_CONTEXT = 24  # tokens of the longest context that a memory of the text looks up
# A model with a memory reads so many tokens: its attention sees as far as the rows that it learns from, the memory sees
# all of them. It takes this many bytes of text, and that none of these keys is given.
_READ_TOKENS, _BYTES_TO_READ = 1024, 2_000_000
_KEYS_OF_ROWS = {
    "model": {"preset", "max_seq_len", "sliding_window", "short_convolution"},
    "data": {"max_length"},
    "training": {"sequence_length_warmup", "eval_length", "eval_stride"},
}


@dataclass(frozen=True)
class Completed:
    """A complete configuration, and the values that the recipe chose, by key."""

    config: SheepOpConfig
    chosen: dict[str, Any]


@dataclass(frozen=True)
class Draft:
    """The settings `given` for a run, which starts from the model `fork` if there is one, and a first completion.

    `config` has the smallest choices for the settings that are open.
    """

    given: Mapping[str, Any]
    fork: Path | None
    config: SheepOpConfig


def draft(given: Mapping[str, Any], fork: Path | None = None) -> Draft:
    """Completes `given` with the smallest choices; raises `ConfigError` for an invalid tree."""
    smallest = _choices(SIZES[0], given, 0, keeps_model=fork is not None)
    return Draft(given, fork, validate(SheepOpConfig, merge(smallest, given)))


def complete(draft: Draft, speed: Callable[[str], float], console: Console) -> Completed:
    """Completes the given settings for text, machine and budget, prints the choices in one line, and keeps given keys.

    Chooses model sizes, context, vocabulary, optimizer, learning rate and batch size from the amount of text, the
    budget and the result of `speed`: operations per second of training steps on a device, measured only if needed. For
    a run that starts from a model, it chooses only training settings; for post-training, it uses only the size of that
    model. Raises `ConfigError` for an invalid tree.
    """
    given, config, keeps_model = draft.given, draft.config, draft.fork is not None
    if not config.data.paths or not _choices(SIZES[0], given, 0, keeps_model):
        return Completed(config, {})
    start = None if draft.fork is None else _Start.read(draft.fork, config, given)
    if config.tuning.method is None:
        chosen, basis = _for_text(given, config, speed, start)
    else:
        weights, reason = (_FEW_WEIGHTS, None) if start is None else (start.weights, start.why_lora)
        adapter = {} if reason is None else {"tuning": {"lora": {"rank": LoraConfig().rank}}}
        found = _choices(SIZES[0], merge(given, adapter), 0, keeps_model=True, weights=weights)
        chosen, basis = merge(found, adapter), f"a model of {weights:,} parameters{reason or ''}"
    config, by_key = validate(SheepOpConfig, merge(chosen, given)), dict(leaves(chosen))
    if by_key:
        settings = " ".join(f"{key}={value_text(value)}" for key, value in by_key.items())
        console.info(f"Chosen for {basis}; give a key to override it: {settings}")
        if chosen.get("model", {}).keys() & config.model.own_parts.keys():
            console.info(f"{own_parts_words(config)}: --exportable chooses one that other programs run, too.")
    return Completed(config, by_key)


def own_parts_words(config: SheepOpConfig) -> str | None:
    """Says that only SheepOp runs this model, and why; None if other programs may."""
    found = config.model.own_parts.values()
    return f"Only SheepOp runs this model, for its {' and '.join(found)}" if found else None


def _for_text(
    given: Mapping[str, Any], requested: SheepOpConfig, speed: Callable[[str], float], start: _Start | None
) -> tuple[dict[str, dict[str, Any]], str]:
    """The choices for a run on text, and what they are based on."""
    num_bytes, training = text_bytes(requested.data), requested.training
    flops_per_second = speed(requested.device)
    size = choose_size(flops_per_second, training, num_bytes)
    passes = _passes(flops_per_second, training, size, num_bytes)
    minutes = training.max_minutes
    budget = "" if minutes is None else f", {minutes:g} {plural(minutes, 'minute')}"
    machine = f"the {flops(flops_per_second)} that are free on this machine"
    basis = f"{data_size(num_bytes)} of text{budget} and {machine}"
    chosen = _choices(size, given, num_bytes, start is not None, passes)
    if start is not None and requested.data.max_length is None and start.max_seq_len > MOST_ROW_TOKENS:
        chosen["data"] = {"max_length": MOST_ROW_TOKENS}
    return chosen, basis


@dataclass(frozen=True)
class _Start:
    """The model that a run starts from: its context, its weights, and the reason to train only an adapter, if any."""

    max_seq_len: int
    weights: int
    why_lora: str | None

    @classmethod
    def read(cls, fork: Path, requested: SheepOpConfig, given: Mapping[str, Any]) -> Self:
        """Reads the description of the model. An adapter is for post-training, and only if `given` leaves it open."""
        # These load torch, which checking a configuration does not need.
        from sheepop.checkpoint import resolve_model_directory
        from sheepop.checkpoint.model_description import read_model_config, read_quantization
        from sheepop.core.device import resolve_device
        from sheepop.model import num_parameters
        from sheepop.model.accounting.cost import training_bytes
        from sheepop.train.activation_checkpointing import usable_memory

        place = resolve_model_directory(fork)
        network, reason, are_integers = read_model_config(place), None, read_quantization(place) is not None
        if requested.tuning.method is not None and "lora" not in _section(given, "tuning"):
            needed = training_bytes(network, requested.training.optimizer, "fp32").total
            usable = usable_memory(requested.training, resolve_device(requested.device))
            if are_integers:
                reason = ", which are integers"
            elif needed > usable:
                reason = f", whose training needs over {data_size(needed)} of memory ({data_size(usable)} are to use)"
        return cls(network.max_seq_len, num_parameters(network), reason)


def small_run() -> SheepOpConfig:
    """The recipe's settings of a small run on much text; the time of its steps shows how fast a machine trains."""
    given = {"model": {"vocab_size": SIZES[2].vocab_size}}
    return validate(SheepOpConfig, merge(_choices(SIZES[2], given, 10**9, keeps_model=False), given))


def chosen_keys() -> frozenset[str]:
    """The keys that the recipe may choose for a run with a budget in minutes; a nested section counts as one key."""
    given = {"training": {"max_minutes": 1}}
    texts = (_choices(SIZES[-1], given, num_bytes, keeps_model=False) for num_bytes in (0, 10**9))
    return frozenset(f"{name}.{key}" for tree in texts for name, section in tree.items() for key in section)


def choose_size(flops_per_second: float, training: TrainingConfig, num_bytes: int) -> Size:
    """The largest size that the budget allows on a machine of this speed, with `num_bytes` of text.

    A model with many more weights than the text has bytes would memorise it.
    """
    seconds = 60 * (training.max_minutes or _MINUTES_AT_MOST)
    fitting = [
        size
        for size in SIZES
        if size.flops <= min(flops_per_second * seconds, size.cost(_most_tokens(training, size, num_bytes)))
        and size.weights <= _WEIGHTS_PER_BYTE * num_bytes
    ]
    return max(fitting, key=lambda size: size.flops, default=SIZES[0])


def choose_tokenizer(size: Size, num_bytes: int) -> dict[str, Any]:
    """The size's vocabulary, halved until `num_bytes` of text suffice for it; characters for less than 20 kB."""
    if num_bytes < _BYTES_FOR_WORDS:
        return {"algorithm": "char"}
    vocab_size = size.vocab_size
    while vocab_size > _SMALLEST_VOCABULARY and vocab_size * _BYTES_PER_VOCABULARY_ENTRY > num_bytes:
        vocab_size //= 2
    return {"vocab_size": vocab_size}


def own_parts(num_bytes: int, passes: float) -> dict[str, Any]:
    """The parts of a decoder that only SheepOp computes, for a text of this size that is read so many times."""
    tables = {"orders": list(_NGRAM_ORDERS), "rows": _ngram_rows(num_bytes)}
    return {"short_convolution": _SHORT_CONVOLUTION, "ngrams": tables if passes <= MOST_PASSES_OF_NGRAMS else None}


def _ngram_rows(num_bytes: int) -> int:
    """The rows of the n-gram tables: a power of two, fewer for less text, which repeats fewer n-grams."""
    rows = _MOST_NGRAM_ROWS
    while rows > _FEWEST_NGRAM_ROWS and rows * _BYTES_PER_NGRAM_ROW > num_bytes:
        rows //= 2
    return rows


def text_bytes(data: DataConfig) -> int:
    """The approximate size of the text in `data`: the sizes of files before extraction, the exact size of a corpus."""
    places = [path for path in data.paths if "://" not in path]
    corpora = [path for path in places if is_corpus(path)]
    found = discover(
        [path for path in places if path not in corpora], max_file_bytes=data.max_file_bytes, ignore=data.ignore
    )
    return sum(Corpus.open(path, verify=False).train.num_bytes for path in corpora) + sum(
        file.size for file in found if isinstance(file, Entry)
    )


def _most_tokens(training: TrainingConfig, size: Size, num_bytes: int) -> float:
    """The tokens that a budget in steps, tokens or epochs allows; without any budget, one epoch."""
    limits = [
        (training.max_steps, size.batch_size * size.max_seq_len),
        (training.max_tokens, 1),
        (training.max_epochs, num_bytes / _BYTES_PER_TOKEN),
    ]
    tokens = [budget * each for budget, each in limits if budget is not None]
    return min(tokens, default=math.inf if training.max_minutes else num_bytes / _BYTES_PER_TOKEN)


def _passes(flops_per_second: float, training: TrainingConfig, size: Size, num_bytes: int) -> float:
    """The approximate number of passes over the text that the budget allows for this size."""
    seconds = math.inf if training.max_minutes is None else 60 * training.max_minutes
    tokens = min(_most_tokens(training, size, num_bytes), flops_per_second * seconds / size.cost(1))
    return tokens * _BYTES_PER_TOKEN / max(1, num_bytes)


def _choices(
    size: Size,
    given: Mapping[str, Any],
    num_bytes: int,
    keeps_model: bool,
    passes: float = 1.0,
    weights: int = _FEW_WEIGHTS,
) -> dict[str, dict[str, Any]]:
    """The recipe's values, as a tree, for the keys that are missing in `given`, which may be invalid."""
    model, tokenizer, data = (_section(given, name) for name in ("model", "tokenizer", "data"))
    preset = PRESETS.get(str(model.get("preset")), {})
    reads_text = model.get("architecture", "decoder") == "decoder"
    choices: dict[str, dict[str, Any]] = {}
    if (tuning := _section(given, "tuning")).get("method") is not None:
        choices["training"] = _tuning(weights, tuning, _section(given, "training"))
        sized = {"global_batch_size", "batch_size_warmup"} & _section(given, "training").keys()
        if tuning["method"] == "sft" and not sized:
            choices["tuning"] = {"batch_tokens": _TUNING_TOKENS}
            choices["training"].pop("global_batch_size")
        return _opened(choices, given)
    if not keeps_model and "preset" not in model:
        choices["model"] = ARCHITECTURE | _sizes(size, model, _size(data, "max_length"))
        if reads_text:
            choices["model"] |= own_parts(num_bytes, passes)
    size = _nearest(size, {**choices.get("model", {}), **preset, **model})
    paths = data.get("paths") or ()
    finished = any(is_corpus(path) for path in ([paths] if isinstance(paths, str) else paths))
    if not (keeps_model or finished or {"path", "algorithm", "vocab_size"} & tokenizer.keys()):
        choices["tokenizer"] = choose_tokenizer(size, num_bytes)
        if (most := _size(model, "vocab_size")) and "vocab_size" in choices["tokenizer"]:
            choices["tokenizer"]["vocab_size"] = min(most, choices["tokenizer"]["vocab_size"])
    choices["training"] = _training(size, _section(given, "training"))
    length = _size(data, "max_length") or _size({**choices.get("model", {}), **preset, **model}, "max_seq_len")
    if "eval_tokens" in choices["training"] and length and not keeps_model and reads_text:
        choices["training"] |= {"memory": {"longest": _MEMORY_CONTEXT}}
        are_given = any(keys & _section(given, name).keys() for name, keys in _KEYS_OF_ROWS.items())
        if num_bytes >= _BYTES_TO_READ and not are_given:
            choices["model"] |= {"max_seq_len": _READ_TOKENS, "sliding_window": length}
            choices["data"] = {"max_length": length}
            choices["training"]["eval_length"] = _READ_TOKENS
        else:
            choices["training"]["eval_stride"] = max(1, length // 2)
    return _opened(choices, given)


def _opened(choices: Mapping[str, dict[str, Any]], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The choices whose keys are missing in `given`."""
    opened = {
        name: {key: value for key, value in section.items() if key not in _section(given, name)}
        for name, section in choices.items()
    }
    return {name: section for name, section in opened.items() if section}


def _sizes(size: Size, model: Mapping[str, Any], max_length: int | None) -> dict[str, Any]:
    """The sizes of the network; a given width or number of heads determines the other."""
    width, heads = _size(model, "d_model"), _size(model, "num_heads")
    d_model, num_heads = width or size.d_model, heads or size.num_heads
    if width is not None:
        num_heads = next((n for n in range(max(1, width // _HEAD_DIM), 0, -1) if width % (2 * n) == 0), 1)
    elif heads is not None:
        d_model = 2 * heads * max(1, round(d_model / (2 * heads)))
    sizes = {"d_model": d_model, "num_layers": size.num_layers, "num_heads": num_heads}
    return {**sizes, "max_seq_len": max_length or size.max_seq_len}


def _nearest(size: Size, model: Mapping[str, Any]) -> Size:
    """`size`; if the model has other layers or another width, the entry of SIZES closest in number of weights."""
    layers, width = _size(model, "num_layers"), _size(model, "d_model")
    if layers is None or width is None or 12 * layers * width**2 == size.weights:
        return size
    return min(SIZES, key=lambda other: abs(math.log(other.weights / (12 * layers * width**2))))


def _training(size: Size, given: Mapping[str, Any]) -> dict[str, Any]:
    """Learning rate and batch sizes; the rate is chosen only together with the optimizer."""
    micro = _size(given, "micro_batch_size") or 1
    chosen: dict[str, Any] = {"global_batch_size": -(-size.batch_size // micro) * micro}
    if "optimizer" not in given:
        least = given.get("min_learning_rate")
        rate = max(size.learning_rate, least) if isinstance(least, float) else size.learning_rate
        chosen |= {"optimizer": "muon", "learning_rate": rate, "schedule": "linear"}
    if given.get("max_minutes") is not None:
        chosen |= {"max_epochs": _MAX_EPOCHS, "eval_tokens": _EVAL_TOKENS}
    return chosen


def _tuning(weights: int, tuning: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Learning rate, batch size and epochs of post-training.

    The rate is lower for larger models, higher for LoRA, and lower for dpo, ppo and grpo. A batch has whole groups of
    answers.
    """
    micro, method = _size(given, "micro_batch_size") or 1, str(tuning.get("method"))
    group = (_size(_section(tuning, "grpo"), "group_size") or _GROUP) if method == "grpo" else 1
    unit, batch = math.lcm(micro, group), _TUNING_BATCH * _MORE_ROWS.get(method, 1)
    chosen: dict[str, Any] = {"global_batch_size": -(-batch // unit) * unit}
    if "optimizer" not in given:
        has_lora = tuning.get("lora") is not None
        rate = _TUNING_RATE * math.sqrt(1e9 / weights) * (_LORA_FACTOR if has_lora else 1.0)
        rate *= _SMALLER_RATE.get(method, 1.0)
        chosen |= {"learning_rate": float(f"{min(rate, _MOST_TUNING_RATE):.1e}"), "weight_decay": 0.0}
    if method != "sft":
        # Losses of comparisons have long tails: there is most to learn from those far above the median.
        chosen["trouble"] = {"spike": "ignore"}
    if not any(given.get(f"max_{unit}") is not None for unit in ("steps", "epochs", "tokens", "minutes")):
        chosen["max_epochs"] = _TUNING_EPOCHS
    if given.get("max_minutes") is not None:
        chosen["eval_tokens"] = _EVAL_TOKENS
    return chosen


def _section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = given.get(name)
    return found if isinstance(found, Mapping) else {}


def _size(section: Mapping[str, Any], name: str) -> int | None:
    """The size as an integer; None if it is missing or invalid, which validation reports."""
    found = section.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None
