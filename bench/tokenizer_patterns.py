"""Bytes per token of byte-level BPE by the way in which text is cut first, on text that the vocabulary has not seen.

    python bench/tokenizer_patterns.py --texts shakespeare=tinyshakespeare.txt wikitext=wikitext-2/
    python bench/tokenizer_patterns.py --vocab-size 16384

Beside the texts that are given it reads the interpreter's standard library, without its tests. A vocabulary is trained
on nine tenths of each text and measured on the last: of the files every tenth, of a single file its end.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from record import add_json_option, write_record
from sheepop.checkpoint.gguf.pre_tokenizers import find_pre_tokenizer
from sheepop.tokenizer.byte_level_files import byte_level_json
from sheepop.tokenizer.pattern import PATTERNS
from texts import code_files

_TESTS = {"test", "tests", "idle_test"}


def pre_tokenizers() -> dict[str, dict[str, Any]]:
    """The ways of cutting text: ours to choose from, and Qwen 2's."""
    qwen2 = find_pre_tokenizer("qwen2")
    assert qwen2 is not None
    return {name: pattern.pre_tokenizer for name, pattern in PATTERNS.items()} | {"qwen2": qwen2.description}


def divided(texts: list[str]) -> tuple[list[str], list[str]]:
    """What is trained on and what is measured."""
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        return [texts[0][:cut]], [texts[0][cut:]]
    measured = texts[::10]
    return [text for number, text in enumerate(texts) if number % 10], measured


def read_texts(path: Path) -> list[str]:
    """A file, or the ``.txt`` files of a folder joined."""
    files = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    return ["".join(file.read_text(encoding="utf-8") for file in files)]


def code() -> list[str]:
    """The standard library, without its tests."""
    found = []
    for name, data in code_files():
        if not _TESTS.intersection(Path(name).parts):
            found.append(data.decode("utf-8", errors="replace"))
    return found


def bytes_per_token(pre_tokenizer: dict[str, Any], vocab_size: int, texts: list[str]) -> float:
    """Of the held-out part, with a vocabulary learned from the rest."""
    from tokenizers import Tokenizer, trainers
    from tokenizers import pre_tokenizers as steps

    seen, unseen = divided(texts)
    backend = Tokenizer.from_str(byte_level_json({}, [], pre_tokenizer, []))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 4,  # the special tokens
        min_frequency=1,
        initial_alphabet=steps.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(seen, trainer)
    tokens = sum(len(encoding.ids) for encoding in backend.encode_batch_fast(unseen))
    return sum(len(text.encode("utf-8")) for text in unseen) / tokens


def main() -> None:
    """Prints one row for every text, and how far each cut is from the first in percent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", default=[], metavar="NAME=PATH", help="further texts")
    parser.add_argument("--vocab-size", type=int, default=4096)
    add_json_option(parser)
    options = parser.parse_args()
    texts = {name: read_texts(Path(path)) for name, _, path in (pair.partition("=") for pair in options.texts)}
    texts["python"] = code()
    cuts = pre_tokenizers()
    print(f"| text | {' | '.join(cuts)} |\n| --- |{' ---: |' * len(cuts)}")
    rows = []
    for name, group in texts.items():
        found = {label: bytes_per_token(cut, options.vocab_size, group) for label, cut in cuts.items()}
        first = next(iter(found.values()))
        cells = [f"{value:.3f} ({100 * (value / first - 1):+.1f} %)" for value in found.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        rows.append({"text": name, **{label: round(value, 4) for label, value in found.items()}})
    write_record(options.json, {"unit": "bytes per token", "vocab_size": options.vocab_size, "rows": rows})


if __name__ == "__main__":
    main()
