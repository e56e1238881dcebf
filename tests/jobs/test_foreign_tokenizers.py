"""Corpora, runs and text with tokenizers that others made: no padding, one token for both ends, a token in front."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sheepop
from sheepop.core.config import validate
from sheepop.core.console import Console
from sheepop.core.errors import TokenizerError
from sheepop.data import Corpus, PairBatches
from sheepop.data.corpus import trace_tokens
from sheepop.data.documents import Pair
from sheepop.generate import GenerationConfig, Generator
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.data import build
from sheepop.tokenizer import Tokenizer, load_tokenizer

from ..running import train

TEXTS = [f"Sheep {number} jumps over the fence.\nIt is é.\n" for number in range(30)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = "▁SheepjumsovrtfncI.0123456789"


def save(directory: Path, content: dict[str, Any], settings: dict[str, Any]) -> Path:
    directory.mkdir()
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], **empty, **content}))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def gpt2(directory: Path) -> Path:
    """All roles but padding are played by one token."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(b) for b in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]
    vocabulary = {c: i for i, c in enumerate([*alphabet, "Ġt", "<|endoftext|>"])}
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": ["Ġ t"]}
    roles = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    return save(directory, {"pre_tokenizer": step, "decoder": step, "model": model}, roles)


def llama(directory: Path) -> Path:
    """A space in front of every text, a token in front of that, and bytes for what no piece has."""
    pieces = ["<unk>", "<s>", "</s>", *BYTES, *dict.fromkeys(LETTERS), "▁t"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    start = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content = {
        "added_tokens": [{"id": i, "content": text, **flags} for i, text in enumerate(pieces[:3])],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]},
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": start,
            "pair": start,
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": ["▁ t"],
        },
    }
    return save(directory, content, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


MAKERS = {"gpt2": gpt2, "llama": llama}


@pytest.fixture(scope="module", params=list(MAKERS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Corpus, str]:
    """A tokenizer, a corpus built with it, and what was said meanwhile."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "text" / f"{number:02}.txt").write_text(text)
    directory = MAKERS[request.param](folder / "tokenizer")
    screen = io.StringIO()
    overrides = [str(folder / "text"), f"tokenizer.path={directory}", "data.clean.preset=none"]
    build(overrides, folder / "corpus", None, Console(file=screen))
    return directory, Corpus.open(folder / "corpus"), screen.getvalue()


def test_a_document_is_its_text_with_what_the_tokenizer_puts_around(made: tuple[Path, Corpus, str]):
    directory, corpus, said = made
    tokenizer = load_tokenizer(directory)
    split = corpus.train
    for number, document in enumerate(corpus.documents("train")):
        start, stop = split.offsets[number : number + 2]
        expected = [*tokenizer.prefix_ids, *tokenizer.encode(document.text), tokenizer.eos_id]
        assert split.tokens(int(start), int(stop)).tolist() == expected
        assert tokenizer.decode(expected) == document.text
    assert "not in the tokenizer's vocabulary" not in said


def test_the_origin_of_tokens_is_the_text_between_others(made: tuple[Path, Corpus, str]):
    _, corpus, _ = made
    document = next(iter(corpus.documents("train")))
    stop = int(corpus.train.offsets[1])
    found = [next(trace_tokens(corpus, "train", place, stop)).text for place in range(stop)]
    assert found[0] == document.text
    assert all(document.text.endswith(text) or "\ufffd" in text for text in found)


def opt(directory: Path) -> Path:
    """The token that ends every text begins it too."""
    content = json.loads((gpt2(directory) / "tokenizer.json").read_text())
    token = next(iter(reversed(content["model"]["vocab"])))
    start = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    entry = {"id": token, "ids": [content["model"]["vocab"][token]], "tokens": [token]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": start,
        "pair": start,
        "special_tokens": {token: entry},
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


def ignorant(directory: Path) -> Path:
    """What it does not know becomes the token that ends a text."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "BPE", "vocab": {"</s>": 0, "a": 1, "b": 2}, "merges": [], "unk_token": "</s>"}
    added = [{"id": 0, "content": "</s>", **flags}]
    return save(directory, {"added_tokens": added, "model": model}, dict.fromkeys(("bos_token", "eos_token"), "</s>"))


def pairs_of(folder: Path, tokenizer: Path) -> Corpus:
    pairs = [{"source": f"abba {number}", "target": f"baab {number}"} for number in range(30)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    overrides = [str(folder / "pairs.jsonl"), f"tokenizer.path={tokenizer}", "data.extract.pair=[source,target]"]
    build(overrides, folder / "corpus", None, Console.silent())
    return Corpus.open(folder / "corpus")


@pytest.mark.parametrize("maker", [gpt2, llama, opt])
def test_source_and_target_are_told_apart_whatever_a_tokenizer_puts_around_text(maker: Any, tmp_path: Path):
    corpus = pairs_of(tmp_path, maker(tmp_path / "tokenizer"))
    tokenizer = corpus.tokenizer()
    assert (maker is gpt2) == (tokenizer.prefix_ids == ())
    batches = PairBatches(corpus.train, max_length=64, pad_id=tokenizer.filler_id, eos_id=tokenizer.eos_id)
    for number, document in enumerate(corpus.documents("train")):
        pair = Pair.of(document)
        source, target = batches.batch(np.array([number])).pair(0)
        assert source.tolist() == [*tokenizer.encode(pair.source), tokenizer.eos_id]
        assert target.tolist() == [tokenizer.bos_id, *tokenizer.encode(pair.target), tokenizer.eos_id]
    tree = {
        "data": {"paths": [str(corpus.directory)]},
        "model": {
            "architecture": "encoder_decoder",
            "d_model": 16,
            "num_layers": 1,
            "num_heads": 2,
            "max_seq_len": 64,
        },
        "training": {"max_steps": 2, "global_batch_size": 4, "precision": "fp32", "warmup_steps": 0, "sinks": []},
        "device": "cpu",
        "output_dir": str(tmp_path / "run"),
    }
    train(validate(SheepOpConfig, tree))
    done = sheepop.load(tmp_path / "run", device="cpu").generate("abba 7", max_new_tokens=4, greedy=True)
    assert done.num_prompt_tokens == len(tokenizer.encode("abba 7")) + 1


def test_a_tokenizer_that_encodes_text_as_the_end_is_refused_for_pairs(tmp_path: Path):
    with pytest.raises(TokenizerError, match="encodes some text as its eos_token, which separates the source"):
        pairs_of(tmp_path, ignorant(tmp_path / "tokenizer"))


def trained(made: tuple[Path, Corpus, str], output: Path, *, packing: bool) -> Path:
    tree = {
        "data": {"paths": [str(made[1].directory)], "packing": packing},
        "model": {"d_model": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 64},
        "training": {"max_steps": 2, "global_batch_size": 4, "precision": "fp32", "warmup_steps": 0, "sinks": []},
        "device": "cpu",
        "output_dir": str(output),
    }
    train(validate(SheepOpConfig, tree))
    return output


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_trains_and_its_model_writes(made: tuple[Path, Corpus, str], packing: bool, tmp_path: Path):
    lm = sheepop.load(trained(made, tmp_path / "run", packing=packing), device="cpu")
    assert lm.tokenizer.fingerprint() == load_tokenizer(made[0]).fingerprint()
    prompt = lm.tokenizer.encode("Sheep")
    completion = lm.generate("Sheep", max_new_tokens=8, temperature=0)
    assert completion.num_prompt_tokens == len(lm.tokenizer.prefix_ids) + len(prompt)
    assert "Sheep" + completion.text == lm.tokenizer.decode(prompt + completion.token_ids)


def test_what_is_written_behind_a_prompt_keeps_its_space(made: tuple[Path, Corpus, str]):
    tokenizer = load_tokenizer(made[0])
    (space_t,) = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b" t"]
    generator = Generator(writes(space_t, tokenizer), tokenizer)
    config = GenerationConfig(max_new_tokens=2, temperature=0)
    assert generator.generate(["over"], config)[0].text == " t t"
    # Where nothing is written yet, the space is the one that the tokenizer puts before every text.
    leading = [list(tokenizer.prefix_ids) or [tokenizer.eos_id]]
    assert generator.generate(leading, config)[0].text == " t t"[tokenizer.leading_spaces :]


def writes(token_id: int, tokenizer: Tokenizer) -> Any:
    """A network that writes one token whatever it reads."""
    config = sheepop.model.ModelConfig(
        vocab_size=tokenizer.vocab_size, d_model=8, num_layers=1, num_heads=2, max_seq_len=16, tie_weights=False
    )
    model = sheepop.model.build_model(config, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.final_norm.bias.fill_(1.0)
        model.lm_head.weight[token_id] = 1.0
    return model
