"""llama.cpp computes from our files what our network computes: logits, greedy tokens, and the ids of a text.

Needs llama-cpp-python, which is built from source: ``pip install llama-cpp-python``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sheepop.checkpoint.gguf.reader import read_gguf
from sheepop.checkpoint.model_directory import load_weights
from sheepop.model import Transformer
from sheepop.tokenizer import CharTokenizer, Tokenizer, load_tokenizer, tokenizer_from_json

llama_cpp = pytest.importorskip("llama_cpp")

PROMPT = list(range(70, 85))
NUM_NEW = 16
TEXTS = [
    "",
    "Hello, world! It's 12345 o'clock.",
    "  two  spaces \n\n\tand\ttabs  \r\n end ",
    "ä€漢 naïve café ÀÉÎ straße",
    "x=3.14159; y_1 = [1, 22, 333, 4444]\nprint('don''t')  # done",
    "🐑🐑 sheep\u200bop \u00a0 ١٢٣ ﬁne Ⅷ",
]


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[Any]:
    """The model in llama.cpp with a cache in single precision, or its vocabulary alone."""
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
    model = llama_cpp.Llama(
        str(path), n_ctx=64, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, **exact, **options
    )
    try:
        yield model
    finally:
        model.close()


def greedy(model: Any) -> tuple[np.ndarray, list[int]]:
    """llama.cpp's logits of the prompt, and the tokens that it likes best behind it."""
    model.eval(PROMPT)
    logits = np.array(model.scores[: len(PROMPT)])
    tokens: list[int] = []
    for _ in range(NUM_NEW):
        tokens.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(tokens[-1:])
    return logits, tokens


@torch.no_grad()
def greedy_of_ours(network: Transformer) -> tuple[Tensor, list[int], float]:
    """The same of our network, and by how much the least decided token won."""
    tokens, narrowest = list(PROMPT), float("inf")
    logits = network(torch.tensor([PROMPT]))[0]
    for _ in range(NUM_NEW):
        best = network(torch.tensor([tokens]), logits_to_keep=1)[0, -1].topk(2)
        narrowest = min(narrowest, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return logits, tokens[len(PROMPT) :], narrowest


def test_logits_and_greedy_tokens_are_ours(tmp_path: Path, toy: Any) -> None:
    wanted, tokens, _ = greedy_of_ours(toy.model)
    with opened(toy.write(tmp_path / "toy.gguf", dtype="f32")) as model:
        found, found_tokens = greedy(model)
    # llama.cpp looks GELU up in a table of half precision.
    tolerance = 2e-2 if "gelu" in toy.config.activation or "geglu" in toy.config.activation else 1e-4
    np.testing.assert_allclose(found, wanted.numpy(), rtol=tolerance, atol=tolerance)
    assert found_tokens == tokens


@torch.no_grad()
def stored(path: Path) -> Transformer:
    """The network of the numbers in a file, in single precision."""
    model = read_gguf(path)
    network = Transformer(model.config).eval()
    load_weights(network, {name: tensor.read().float() for name, tensor in model.tensors.items()}, path)
    return network


# llama.cpp rounds the activations, too: to half precision, or to blocks of 8 bits.
@pytest.mark.parametrize(("dtype", "error"), [("f16", 0.01), ("bf16", 0.03), ("q8_0", 0.06)])
def test_rounded_models_compute_nearly_the_same(tmp_path: Path, toy: Any, dtype: str, error: float) -> None:
    path = toy.write(tmp_path / "toy.gguf", dtype=dtype)
    wanted = greedy_of_ours(stored(path))[0].numpy()
    with opened(path) as model:
        found = greedy(model)[0]
    # Errors of independent layers add up like their root; most toys have 3.
    error *= max(1.0, toy.config.num_layers / 6) ** 0.5
    if toy.config.experts is not None:
        # Rounding may choose another expert, which changes the logits of that token and of those that look at it.
        distances = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        assert distances.min() < error
    else:
        assert np.linalg.norm(found - wanted) < error * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "gemma2"])
def test_quantised_models_write_the_same_tokens(tmp_path: Path, make: Callable[..., Any], name: str) -> None:
    """With the first model whose every token wins by more than the rounding."""
    for seed in range(100):
        path = make(name, seed).write(tmp_path / f"{seed}.gguf", dtype="q8_0")
        _, tokens, narrowest = greedy_of_ours(stored(path))
        if narrowest > 0.3:
            break
    else:
        pytest.fail("no model is decided enough")
    with opened(path) as model:
        assert greedy(model)[1] == tokens


def byte_level(pre_tokenizer: Any, *, ignore_merges: bool = False) -> Tokenizer:
    """A tokenizer that the tokenizers library trains with a cut that llama.cpp knows."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer_from_json(backend.to_str(), {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"})


def cuts() -> dict[str, Callable[[], Tokenizer]]:
    from tokenizers import Regex, pre_tokenizers

    from sheepop.checkpoint.gguf.pre_tokenizers import BY_NAME

    def split(name: str) -> Any:
        known = BY_NAME.get(name)
        assert known is not None
        pattern = known.description["pretokenizers"][0]["pattern"]["Regex"]
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    digits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return {
        "gpt-2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
        "llama-bpe": lambda: byte_level(split("llama-bpe"), ignore_merges=True),
        "smaug-bpe": lambda: byte_level(split("smaug-bpe")),
        "qwen2": lambda: byte_level(split("qwen2")),
        "smollm": lambda: byte_level(pre_tokenizers.Sequence(digits)),
        "bloom": lambda: byte_level(split("bloom")),
    }


def sentencepiece(tmp_path: Path, **options: Any) -> Tokenizer:
    """A tokenizer that SentencePiece trains, with bytes for what it lacks."""
    package = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 3), encoding="utf-8")
    package.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "toy"), model_type="bpe", vocab_size=400,
        byte_fallback=True, character_coverage=0.98, normalization_rule_name="identity", minloglevel=2,
        remove_extra_whitespaces=False, num_threads=1, **options,
    )  # fmt: skip
    return load_tokenizer(tmp_path / "toy.model")


SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "sentencepiece": {},
    "sentencepiece-without-prefix": {"add_dummy_prefix": False, "user_defined_symbols": ["<code>"]},
}


@pytest.fixture(
    scope="module", params=[*SENTENCEPIECE, "characters", "gpt-2", "llama-bpe", "smaug-bpe", "qwen2", "smollm", "bloom"]
)
def vocabulary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make: Callable[..., Any]
) -> Iterator[tuple[Any, Any]]:
    """A tokenizer of ours, and llama.cpp's of the file that it was written into."""
    tokenizer: Tokenizer
    if request.param in SENTENCEPIECE:
        tokenizer = sentencepiece(tmp_path_factory.mktemp("trained"), **SENTENCEPIECE[request.param])
    else:
        tokenizer = CharTokenizer("ä€漢é") if request.param == "characters" else cuts()[request.param]()
    toy = make("llama", vocab_size=tokenizer.vocab_size + 3)
    path = tmp_path_factory.mktemp("vocabulary") / "toy.gguf"
    toy.with_tokenizer(tokenizer).write(path)
    with opened(path, vocab_only=True) as model:
        yield tokenizer, model


def ids_of(model: Any, text: str, *, special: bool = False) -> list[int]:
    found: list[int] = model.tokenize(text.encode("utf-8"), add_bos=False, special=special) if text else []
    return found


def known_text(tokenizer: Tokenizer, text: str) -> str:
    """The text without characters that a character tokenizer does not know, which llama.cpp leaves out."""
    if not isinstance(tokenizer, CharTokenizer):
        return text
    return "".join(character for character in text if tokenizer.encode(character) != [tokenizer.unk_id])


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_same_ids(vocabulary: tuple[Any, Any], text: str) -> None:
    tokenizer, model = vocabulary
    text = known_text(tokenizer, text)
    assert ids_of(model, text) == tokenizer.encode(text)
    text += "<code>"
    assert ids_of(model, text) == tokenizer.encode(text)


@given(
    st.text(
        st.one_of(
            st.sampled_from(" \t\r\n.,'sStTdDmM019_-é漢"),
            # Assigned since long, so that every table of Unicode has them in the same class.
            st.characters(codec="utf-8", min_codepoint=1, max_codepoint=0x2FFF, exclude_categories=["Cn", "Cs", "Co"]),
        ),
        max_size=30,
    )
)
@settings(max_examples=100)
def test_random_texts_have_the_same_ids(vocabulary: tuple[Any, Any], text: str) -> None:
    tokenizer, model = vocabulary
    text = known_text(tokenizer, text)
    assert ids_of(model, text) == tokenizer.encode(text)


def test_tokens_stand_for_the_same_bytes(vocabulary: tuple[Any, Any]) -> None:
    tokenizer, model = vocabulary
    for token_id in range(tokenizer.vocab_size):
        if token_id not in tokenizer.special_tokens.values():
            assert model.detokenize([token_id]) == tokenizer.token_bytes(token_id), token_id


def test_special_tokens_are_those_of_the_tokenizer(vocabulary: tuple[Any, Any]) -> None:
    tokenizer, model = vocabulary
    assert model.token_eos() == tokenizer.special_id("eos")
    assert model.token_bos() == tokenizer.special_id("bos")
    assert model.n_vocab() == tokenizer.vocab_size + 3
    for text, token_id in tokenizer.special_tokens.items():
        assert ids_of(model, f"a{text}b", special=True) == [*tokenizer.encode("a"), token_id, *tokenizer.encode("b")]
        assert token_id not in ids_of(model, f"a{text}b")


def test_what_is_put_around_a_text_is_put_there(tmp_path: Path, make: Callable[..., Any]) -> None:
    content = json.loads(cuts()["gpt-2"]().to_json())
    token = {"SpecialToken": {"id": "<|user|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [token, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|user|>": {"id": "<|user|>", "ids": [1], "tokens": ["<|user|>"]}},
    }
    settings = {"bos_token": "<|user|>", "eos_token": "<|endoftext|>"}
    tokenizer = tokenizer_from_json(json.dumps(content), settings)
    toy = make("llama", vocab_size=tokenizer.vocab_size)
    with opened(toy.with_tokenizer(tokenizer).write(tmp_path / "toy.gguf"), vocab_only=True) as model:
        assert model.tokenize(b"Hello", add_bos=True) == [*tokenizer.prefix_ids, *tokenizer.encode("Hello")]
        assert tokenizer.prefix_ids == (1,)


def test_every_token_that_ends_a_text_ends_it_there(tmp_path: Path, make: Callable[..., Any]) -> None:
    toy = make("llama")
    assert toy.tokenizer.special_id("eos") == 3
    with opened(toy.write(tmp_path / "toy.gguf", end_ids=[3, 9, 11]), vocab_only=True) as model:
        vocabulary = llama_cpp.llama_model_get_vocab(model.model)
        ending = [token for token in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocabulary, token)]
        assert ending == [3, 9, 11]


def test_a_file_without_a_tokenizer_computes(tmp_path: Path, make: Callable[..., Any]) -> None:
    toy = make("llama")
    _, tokens, _ = greedy_of_ours(toy.model)
    with opened(toy.with_tokenizer(None).write(tmp_path / "toy.gguf")) as model:
        assert greedy(model)[1] == tokens


def test_a_name_that_llama_cpp_takes_for_phi_3s_would_fail_there(tmp_path: Path, make: Callable[..., Any]) -> None:
    from sheepop.core.errors import CheckpointError

    with pytest.raises(CheckpointError, match="Choose another name"):
        make("llama").write(tmp_path / "toy.gguf", name="My-Phi3")
