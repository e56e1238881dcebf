"""The text of a model card: ``README.md`` with the front matter that Hugging Face's hub reads.

Provenance may contain untrusted text. It enters the front matter through a YAML writer, and the body as inline code on
one line, so that it cannot become Markdown or HTML. The card of an export is public, so it contains no local paths.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import yaml

from sheepop.core.facts import counted
from sheepop.model import ModelConfig
from sheepop.model.accounting.cost import num_active_parameters, num_parameters
from sheepop.tokenizer import Tokenizer
from sheepop.tokenizer.interface import CHAT_TEMPLATE

Library = Literal["sheepop", "transformers"]
Facts = Mapping[str, Any]
EVALUATIONS = "evaluations"

_BEGIN, _END = "Written by SheepOp; checksum of what follows: ", "End of what SheepOp writes; your own goes below."
_COMMENTS = (("# ", ""), ("<!-- ", " -->"))  # of YAML and of Markdown
_LONGEST = 500
_BACKTICKS = re.compile("`+")
_WITHOUT_PATHS = ("format", "family", "architecture", "transformers_version")
_LANGUAGE = re.compile(r"[a-z]{2,3}")
# Licences whose name on the hub is their SPDX identifier in lower case; the hub calls any other licence "other".
_LICENSES = re.compile(
    r"a?gpl-3\.0|gpl-2\.0|lgpl-(2\.1|3\.0)|apache-2\.0|bsd-[23]-clause|cc-by(-nc)?(-sa)?-4\.0|cc0-1\.0|isc|mit|mpl-2\.0|"
    r"unlicense|zlib"
)
_POSITIONS = {
    "sinusoidal": "sinusoidal positions",
    "learned": "learned positions",
    "rope": "rotary positions",
    "alibi": "positions as an attention bias (ALiBi)",
    "none": "no position encoding",
}


def model_card(
    config: ModelConfig,
    tokenizer: Tokenizer,
    provenance: Facts,
    *,
    stored: Facts | None = None,
    library: Library = "sheepop",
) -> str:
    """Returns the text of ``README.md``, which depends only on the arguments; missing facts are omitted or "unknown".

    From `provenance` it reads the entries of runs, imports and quantisation, `evaluations`, and if present `license`,
    `language`, `run` (`kind`, `command`) and `data` (`documents`, `licenses` with the number of documents of each).
    `stored` is the content of ``config.json``; `library` is the library that loads the directory.
    """
    stored = stored or {}
    scores = [score for score in _sequence(provenance.get(EVALUATIONS)) if isinstance(score, Mapping)]
    what = "reward model" if stored.get("reward_head") else "language model"
    head = _front_matter(config, provenance, stored, scores, library)
    sections = {
        "What it is": _table(("", ""), _description(config, tokenizer, stored)),
        "How it was made": _bullets(_making(provenance, library)),
        "Scores": _scores(scores, library),
        "How to use it": _usage(config, tokenizer, what, library),
        "Limits": _bullets(_limits(config, provenance)),
    }
    title = f"# A {what} of {_size(config)[0]:,} parameters\n"
    body = title + "".join(f"\n## {name}\n\n{text}" for name, text in sections.items())
    of_yaml, of_markdown = _COMMENTS
    return f"---\n{_framed(head, of_yaml)}---\n\n{_framed(body, of_markdown)}"


def renewed(old: str, card: str) -> str:
    """Returns `old` with the parts from `card`, where SheepOp wrote them and nobody has changed them since."""
    for before, after in _COMMENTS:
        begin, end = re.escape(before + _BEGIN), re.escape(before + _END + after)
        part = re.compile(rf"^{begin}([0-9a-f]{{16}}){re.escape(after)}\n(.*?)^{end}$", re.MULTILINE | re.DOTALL)
        there, here = part.search(old), part.search(card)
        if there and here and there[1] == _checksum(there[2]):
            old = old[: there.start()] + here[0] + old[there.end() :]
    return old


def _framed(text: str, comment: tuple[str, str]) -> str:
    before, after = comment
    return f"{before}{_BEGIN}{_checksum(text)}{after}\n{text}{before}{_END}{after}\n"


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@functools.lru_cache(maxsize=4)
def _size(config: ModelConfig) -> tuple[int, int]:
    """Returns the number of all and of active parameters; cached, since a run writes many checkpoints of a network."""
    return num_parameters(config), num_active_parameters(config)


def _front_matter(
    config: ModelConfig, provenance: Facts, stored: Facts, scores: Sequence[Facts], library: Library
) -> str:
    task = "text2text-generation" if config.architecture == "encoder_decoder" else "text-generation"
    judges = bool(stored.get("reward_head"))
    quantised = _mapping(stored.get("quantization")).get("weights")
    tags = ["reward-model"] * judges + ["lora"] * ("adapter" in stored) + [_plain(quantised)] * (quantised is not None)
    found: dict[str, Any] = {}
    if (license := _license(provenance)) and _LICENSES.fullmatch(license.lower()):
        found["license"] = license.lower()
    elif license:
        found |= {"license": "other", "license_name": license}
    said = provenance.get("language")
    if languages := [text for text in _sequence(said) or [said] if _LANGUAGE.fullmatch(str(text))]:
        found["language"] = languages
    found |= {"library_name": library, **({} if judges else {"pipeline_tag": task}), "tags": ["sheepop", *tags]}
    if results := list(_results(scores, task)):
        found["model-index"] = [{"name": f"sheepop-{_size(config)[0]}", "results": results}]
    return yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=math.inf)


def _results(scores: Sequence[Facts], task: str) -> Iterator[dict[str, Any]]:
    """Yields the numeric scores in the format of the hub's model index, grouped by evaluation."""
    known = [score for score in scores if _is_number(score.get("value"))]
    for (kind, name), group in groupby(known, lambda score: (_plain(score.get("kind")), _plain(score.get("name")))):
        measures = ((score.get("measure"), score["value"]) for score in group)
        metrics = [{"type": _slug(measure), "name": _plain(measure), "value": value} for measure, value in measures]
        yield {"task": {"type": task}, "dataset": {"type": _slug(kind), "name": name}, "metrics": metrics}


def _description(config: ModelConfig, tokenizer: Tokenizer, stored: Facts) -> Iterator[tuple[str, str]]:
    total, active = _size(config)
    yield "architecture", _architecture(config)
    yield "parameters", f"{total:,}" + (f", of which a token uses {active:,}" if active < total else "")
    yield "context", counted(config.max_seq_len, "token")
    yield "vocabulary", counted(config.vocabulary, "token")
    template = ", with a chat template" if tokenizer.settings().get(CHAT_TEMPLATE) else ""
    yield "tokenizer", f"{_code(tokenizer.algorithm)}, {counted(tokenizer.vocab_size, 'token')}{template}"
    if quantisation := _mapping(stored.get("quantization")):
        others = " and larger formats" if quantisation.get("is_mixed") else ""
        weights = _code(quantisation.get("weights"))
        yield "weights", f"{weights}{others}, quantised from {_code(quantisation.get('dtype'))}"
    if adapter := _mapping(stored.get("adapter")):
        yield "adapter", f"LoRA of rank {_code(adapter.get('rank'))}"


def _architecture(config: ModelConfig) -> str:
    kinds = {"decoder": "a decoder-only transformer", "encoder_decoder": "an encoder-decoder transformer"}
    layers = counted(config.num_layers, "layer")
    if config.num_encoder_layers is not None:
        layers = f"{config.num_encoder_layers} + {layers}"
    shared = f", {config.kv_heads} for keys and values" if config.kv_heads < config.num_heads else ""
    parts = [
        f"{kinds[config.architecture]} of {layers} of width {config.d_model:,}",
        f"{counted(config.num_heads, 'head')} of width {config.head_size} in each{shared}",
        f"feed-forward width {config.ffn_size:,} with {_code(config.activation)}",
        _POSITIONS[config.position_encoding],
        f"{_code(config.norm)} ({config.norm_position})",
    ]
    if config.gated_convolution is not None:
        parts.append(f"gated convolutions in {counted(len(config.gated_convolution.layers), 'layer')}")
    if config.gated_delta_net is not None:
        parts.append(f"Gated DeltaNet in {counted(len(config.gated_delta_net.layers), 'layer')}")
    if config.experts is not None:
        parts.append(f"{config.experts.count} experts per layer, {config.experts.per_token} for each token")
    if config.latent_attention is not None:
        parts.append(f"keys and values from latents of width {config.latent_attention.kv_rank}")
    if config.sliding_window is not None:
        parts.append(f"attention in a window of {counted(config.sliding_window, 'token')}")
    if config.ngrams is not None:
        parts.append("n-gram embeddings")
    if config.short_convolution is not None:
        parts.append(f"convolutions over {counted(config.short_convolution, 'token')} before attention")
    parts.append("output projection tied to the embedding" if config.tie_weights else "separate output projection")
    return "; ".join(parts)


def _making(provenance: Facts, library: Library) -> Iterator[str]:
    run, data = _mapping(provenance.get("run")), _mapping(provenance.get("data"))
    imported, quantised = _mapping(provenance.get("imported")), _mapping(provenance.get("quantized"))
    with_paths = library == "sheepop"
    for fact, value in imported.items():
        if isinstance(value, str) and (with_paths or fact in _WITHOUT_PATHS):
            yield f"Imported: {_code(fact)} {_code(value)}"
    if "step" in provenance or run:
        kind = f" ({_code(run['kind'])})" if "kind" in run else ""
        version = f" with SheepOp {_code(provenance['sheepop_version'])}" if "sheepop_version" in provenance else ""
        length = f"{_count(provenance.get('step'))} steps, {_count(provenance.get('tokens'))} tokens"
        yield f"Trained{kind}{version}: {length}"
    if "command" in run and with_paths:
        yield f"Command: {_code(run['command'])}"
    for key, what in (("corpus_fingerprint", "data"), ("tokenizer_fingerprint", "tokenizer")):
        if key in provenance:
            yield f"Fingerprint of the {what}: {_code(provenance[key])}"
    yield f"Training documents: {_count(data.get('documents'))}"
    counts = _mapping(data.get("licenses"))
    found = ", ".join(f"{_code(name or 'none stated')} {_count(count)}" for name, count in counts.items())
    yield f"Stated licences of these documents, with the number of documents: {found or 'unknown'}"
    if quantised:
        numbers = [_number(value) for value in _sequence(quantised.get("perplexity"))]
        cost = f"; perplexity on the same text before and after: {', '.join(numbers)}" if numbers else ""
        origin = f" from {_code(quantised.get('from'))}" if with_paths else ""
        yield f"Quantised to {_code(quantised.get('weights'))}{origin}{cost}"


def _scores(scores: Sequence[Facts], library: Library) -> str:
    if not scores:
        return "None are recorded.\n"
    rows = [
        (
            f"{_code(score.get('kind'))} {_code(score.get('name'))}",
            _code(score.get("measure")),
            _number(score.get("value")),
            " to ".join(_number(end) for end in _sequence(score.get("interval"))) or "unknown",
            _count(score.get("count")),
            _when(score),
        )
        for score in scores
    ]
    text = _table(("evaluation", "measure", "value", "95 % interval", "items", "measured"), rows)
    meanings = {
        f"{_code(score.get('measure'))}: {_code(score['definition'])}"
        + (f", with {_code(json.dumps(score['settings'], ensure_ascii=False))}" if score.get("settings") else "")
        for score in scores
        if "definition" in score
    }
    origin = "\nThey were measured with SheepOp, before the export.\n" if library == "transformers" else ""
    return text + origin + ("\n" + _bullets(sorted(meanings)) if meanings else "")


def _when(score: Facts) -> str:
    """Returns the date of a score, or the run's step: later checkpoints keep listing a score until a newer one."""
    if "date" in score:
        return _code(score["date"])
    return f"at step {_count(score['step'])}" if "step" in score else "unknown"


def _usage(config: ModelConfig, tokenizer: Tokenizer, what: str, library: Library) -> str:
    if library == "transformers":
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'tokenizer = AutoTokenizer.from_pretrained(".")',
            'model = AutoModelForCausalLM.from_pretrained(".")',
            'inputs = tokenizer("Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=16)[0]))",
        ]
        return "Run this in the model's directory, or replace the dot with its path:\n\n" + _block("python", lines)
    if what == "reward model":
        call, command = 'print(lm.rewards("Once upon a time", [" there was a sheep."]))', []
    else:
        call = 'print(lm.generate("Once upon a time", max_new_tokens=16).text)'
        command = ['sheepop generate . --prompt "Once upon a time" --max-new-tokens 16']
        command += ["sheepop chat ."] if tokenizer.settings().get(CHAT_TEMPLATE) else []
    python = _block("python", ["import sheepop", "", 'lm = sheepop.load(".")', call])
    shell = _block("bash", command) + "\n" if command else ""
    return f"Run this in the model's directory, or replace the dot with its path:\n\n{shell}{python}"


def _limits(config: ModelConfig, provenance: Facts) -> Iterator[str]:
    license = _license(provenance)
    yield f"Licence: {_code(license)}" if license else "Licence: unknown, none was given"
    yield f"Its context is at most {counted(config.max_seq_len, 'token')}"
    yield "Its output reflects its training text: it may be wrong or harmful, and may repeat that text"
    yield "Only the scores above were measured"


def _license(provenance: Facts) -> str:
    """Returns the given licence, or the one stated by an imported model, or an empty text."""
    imported = _mapping(provenance.get("imported"))
    stated = imported.get("license") or _mapping(imported.get("metadata")).get("general.license")
    return _plain(provenance.get("license") or stated or "")


def _plain(value: Any) -> str:
    """Returns a value as one line of printable characters of limited length."""
    text = str(value)[: 2 * _LONGEST]
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:_LONGEST]


def _code(value: Any) -> str:
    """Returns a text as inline code that is safe in a table: bars, which would end a cell, are escaped outside it."""
    parts = [part for part in re.split(r"(\|)", _plain(value)) if part.strip()]
    return "".join("&#124;" if part == "|" else _span(part) for part in parts) or "(empty)"


def _span(text: str) -> str:
    fence = "`" * (1 + max((len(run) for run in _BACKTICKS.findall(text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _slug(value: Any) -> str:
    return re.sub(r"[^a-z0-9._]+", "-", _plain(value).lower()).strip("-") or "unknown"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _number(value: Any) -> str:
    return f"{value:.6g}" if _is_number(value) else "unknown"


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else "unknown"


def _mapping(value: Any) -> Facts:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _table(header: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, ["---"] * len(header), *rows])


def _bullets(lines: Iterator[str] | Sequence[str]) -> str:
    return "".join(f"- {line}.\n" for line in lines)


def _block(language: str, lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in (f"```{language}", *lines, "```"))
