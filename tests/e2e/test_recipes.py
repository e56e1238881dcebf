"""Every recipe is valid as it stands and makes a model that loads and writes, at toy size."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import sheepop
from sheepop.core.config import read_config_file
from sheepop.core.errors import DataError
from sheepop.core.files import read_json
from sheepop.data import build_corpus
from sheepop.jobs.config import load_config
from sheepop.model import blank_model

from ..running import train

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
TOY = (
    "model.d_model=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.max_seq_len=16",
    "model.vocab_size=null",
    "tokenizer.vocab_size=300",
    "training.max_steps=3",
    "training.max_minutes=null",
    "training.max_epochs=null",
    "training.global_batch_size=4",
    "training.micro_batch_size=2",
    "training.warmup_steps=1",
    "training.sample_tokens=4",
    "training.sample_interval=3",
    "training.precision=fp32",
    "device=cpu",
)

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)


VOCABULARY = (
    "the and with that this have from their there which when about after before "
    "again little morning evening garden river mountain sheep shepherd village window letter summer winter "
    "bread water house field stone light answer question remember carry follow listen wander gather "
    "believe notice return promise gently slowly often always together "
)
WORDS = VOCABULARY.split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Modules, pages and books that are no duplicates of each other and that the rules for web pages keep."""
    place = tmp_path_factory.mktemp("source")
    (place / "books").mkdir()
    draw = random.Random(3)
    for number in range(12):
        lines = [f"    {draw.choice(WORDS)}_{k} = {draw.choice(WORDS)!r} * {draw.randrange(99)}\n" for k in range(24)]
        (place / f"module{number:02d}.py").write_text(f"def count_{number}(step):\n{''.join(lines)}    return step\n")
        (place / f"page{number:02d}.txt").write_text(prose(draw))
        (place / "books" / f"chapter{number:02d}.txt").write_text(prose(draw))
    return place


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps({"source": f"sort {w}", "target": "".join(sorted(w))}) + "\n" for w in sorted(set(WORDS)))
    )
    return path


def prose(draw: random.Random) -> str:
    sentences = [" ".join(["The", *draw.choices(WORDS, k=11)]) + "." for _ in range(30)]
    return "\n\n".join(" ".join(sentences[start : start + 5]) for start in range(0, 30, 5)) + "\n"


@pytest.mark.parametrize(
    ("name", "vocab_size", "parameters"),
    [
        # Per block: attention 4 d^2, swiglu 3 d 192, two norms of d; then the embedding and the last norm.
        ("quick-characters", 128, 2 * (4 * 64**2 + 3 * 64 * 192 + 2 * 64) + 128 * 64 + 64),
        ("shakespeare-characters", 128, 4 * (4 * 128**2 + 3 * 128 * 352 + 2 * 128) + 128 * 128 + 128),
        ("code-bpe", 4096, 4 * (4 * 256**2 + 3 * 256 * 704 + 2 * 256) + 4096 * 256 + 256),
        ("gpt2-124m", None, 124_439_808),  # as published
        # Two blocks each: one attention in the encoder, two in the decoder, a feed-forward network of 4 d, and a norm
        # behind each of them; all with biases.
        (
            "reverse-and-sort",
            128,
            2 * 3 * (4 * 64**2 + 4 * 64) + 4 * (8 * 64**2 + 5 * 64) + 2 * 5 * 2 * 64 + 128 * 64,
        ),
    ],
)
def test_the_network_has_the_size_its_name_says(name: str, vocab_size: int | None, parameters: int):
    config = load_config(next(recipe for recipe in RECIPES if recipe.stem == name)).model
    with torch.device("meta"):
        model = blank_model(config if vocab_size is None else config.replace(vocab_size=vocab_size))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_no_recipe_is_left_out():
    names = [
        "code-bpe",
        "diverging",
        "gpt2-124m",
        "quick-characters",
        "reverse-and-sort",
        "shakespeare-characters",
        "web-corpus",
    ]
    assert [recipe.stem for recipe in RECIPES] == names


@every_recipe
def test_a_recipe_trains_a_model_that_writes(recipe: Path, folder: Path, pairs: Path, tmp_path: Path):
    run = tmp_path / "run"
    data = pairs if recipe.stem == "reverse-and-sort" else folder
    config = load_config(recipe, TOY, options={"data": {"paths": [str(data)]}, "output_dir": str(run)})
    outcome = train(config)
    assert outcome.steps == 3
    scores = outcome.scores
    assert scores is not None
    assert scores.bits_per_byte == pytest.approx(scores.loss * scores.tokens / scores.bytes / math.log(2))
    # What the recipe says and the toy sizes leave alone is what the run was made with.
    asked, made = read_config_file(recipe), read_config_file(run / "config.yaml")
    overridden = {override.partition("=")[0] for override in TOY} | {"training.max_tokens"}
    for section, settings in asked.items():
        for key, value in settings.items():
            if f"{section}.{key}" not in overridden:
                assert_holds(made[section][key], value)
    assert len(sheepop.load(run, device="cpu").generate("def ", max_new_tokens=3, seed=0).token_ids) <= 3


def assert_holds(made: Any, asked: Any) -> None:
    """What was asked for is in what was made, which also holds what follows from it."""
    if isinstance(asked, Mapping):
        for key, value in asked.items():
            assert_holds(made[key], value)
    elif isinstance(asked, list) and asked and isinstance(asked[0], Mapping):
        for one, other in zip(made, asked, strict=True):
            assert_holds(one, other)
    else:
        assert made == asked


def test_the_web_recipe_builds_a_corpus_with_the_shares_it_asks_for(folder: Path, tmp_path: Path):
    recipe = next(recipe for recipe in RECIPES if recipe.stem == "web-corpus")
    config = load_config(recipe, TOY, options={"data": {"paths": [str(folder)]}})
    corpus = build_corpus(config.data, config.tokenizer, tmp_path / "corpus", seed=config.seed)
    report = read_json(corpus.directory / "report.json", DataError)
    assert sum(report["documents"]["removed"].values()) == 0
    books, others = (source["bytes_after"] for source in report["mix"])
    assert books / (books + others) == pytest.approx(1 / 4, abs=0.06)
    # The corpus is taken by the same recipe, which must ask for nothing that it was built without.
    run = tmp_path / "run"
    config = load_config(recipe, TOY, options={"data": {"paths": [str(corpus.directory)]}, "output_dir": str(run)})
    assert train(config).steps == 3
