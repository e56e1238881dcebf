"""What a user does: train with the defaults, export, and open the file with llama.cpp.

Needs llama-cpp-python, which is built from source: ``pip install llama-cpp-python``.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.core.console import Console
from sheepop.generate import GenerationConfig
from sheepop.jobs.exchange import export_model
from sheepop.jobs.generate import load_generator
from sheepop.jobs.recipe import complete, draft
from sheepop.tokenizer import Tokenizer, load_tokenizer

from ...running import train

llama_cpp = pytest.importorskip("llama_cpp")

TEXTS = [
    "def f(self, x):\n\tif x > 1_000:\n\t\treturn x ** 2  # done\n\n\n",
    "class A:\n    def g(self):\n        return {'a': [1, 22, 333, 4444]}\n",
    "x = 1   \n   \ny = 2 \t \n\r\n\r\n  z",
    "It's they'LL DON'T we've I'M o'clock ''s '\u017false",
    "3.14159 0xDEADBEEF 1,234,567 ١٢٣٤٥ x² Ⅷ½",
    "漢字かな交じり文。日本語のテキスト、한국어 텍스트",
    "🐑🐑 👩\u200d💻 🇩🇪 e\u0301 \ufe0f",
    "हिन्दी में पाठ, שלום עולם, مرحبا بالعالم, Привет мир",
    "trailing spaces   ",
    "\n\n\n   \n",
    " ",
    "\u00a0\u2003wide\u3000spaces\u2028and lines\x85 \x0b\x0c",
    "<eos><bos> <pad>x<unk> <|endoftext|>",
]
PROMPTS = ["def ", "class A:\n    def ", "import os\n\n\n", "  # naïve 漢"]
CHARACTERS = st.one_of(
    st.sampled_from(" \t\r\n.,'sStTdDmMlL019_-é漢\u0301\u00a0\u2028"),
    # Assigned since long, so that every table of Unicode has them in the same class.
    st.characters(codec="utf-8", min_codepoint=1, max_codepoint=0x2FFF, exclude_categories=["Cn", "Cs", "Co"]),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the quickstart's settings, with fewer steps, a smaller network and fewer files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [str(folder / name) for name in ("argparse.py", "textwrap.py", "json/decoder.py", "heapq.py")]
    given = {
        "model": {"d_model": 64, "num_layers": 2, "max_seq_len": 64},
        "tokenizer": {"vocab_size": 1024},
        "data": {"paths": files},
        "training": {"max_steps": 40, "global_batch_size": 8, "precision": "fp32"},
        "device": "cpu",
        "output_dir": str(tmp_path_factory.mktemp("trained") / "run"),
    }
    return train(complete(draft(given), lambda device: 1e9, Console.silent()).config).run


@pytest.fixture(scope="module")
def opened(run: Path) -> Iterator[tuple[Tokenizer, Any]]:
    """The tokenizer of the run, and its model in llama.cpp, with a cache in single precision."""
    path = run.parent / "model.gguf"
    assert export_model(run, path, format="gguf")["notes"] == []
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
    model = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False, **exact)
    yield load_tokenizer(run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()), model
    model.close()


def ids_of(model: Any, text: str) -> list[int]:
    # A file that says nothing else gets a token in front; ours says that there is none.
    found: list[int] = model.tokenize(text.encode("utf-8"), add_bos=True, special=False)
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_hard_texts_have_the_same_ids_and_come_back(opened: tuple[Tokenizer, Any], text: str) -> None:
    tokenizer, model = opened
    ids = ids_of(model, text)
    assert ids == tokenizer.encode(text)
    assert b"".join(model.detokenize([token_id]) for token_id in ids).decode("utf-8") == text


@given(st.text(CHARACTERS, min_size=1, max_size=40))
@settings(max_examples=300)
def test_random_texts_have_the_same_ids(opened: tuple[Tokenizer, Any], text: str) -> None:
    tokenizer, model = opened
    assert ids_of(model, text) == tokenizer.encode(text)


def test_a_source_file_has_the_same_ids(opened: tuple[Tokenizer, Any]) -> None:
    tokenizer, model = opened
    text = Path(pytest.__file__).read_text(encoding="utf-8")
    assert ids_of(model, text) == tokenizer.encode(text)


def test_the_same_text_is_written(run: Path, opened: tuple[Tokenizer, Any]) -> None:
    config = GenerationConfig(max_new_tokens=24, temperature=0.0)
    completions = load_generator(run, device="cpu").generate(PROMPTS, config)
    for prompt, wanted in zip(PROMPTS, completions, strict=True):
        written = opened[1](prompt, max_tokens=24, temperature=0.0, repeat_penalty=1.0)["choices"][0]["text"]
        assert written == wanted.text
