"""The classifier learns, equals a slow implementation without hashing, and reads back only what it wrote."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sheepop.core.errors import DataError
from sheepop.core.random import Permutation, derive_seed
from sheepop.data.clean.classifier import Example, LinearClassifier, Training, read_examples, train_classifier

COMMON = [f"word{number}" for number in range(60)]
SIGNS = [f"sign{number}" for number in range(20)]


def made_up(count: int, seed: int) -> list[Example]:
    """Texts of common words; those of the class hold two of twenty signs."""
    stream = random.Random(seed)
    examples = []
    for number in range(count):
        words = [stream.choice(COMMON) for _ in range(stream.randint(5, 40))]
        if number % 2:
            words[0:0] = stream.sample(SIGNS, 2)
            stream.shuffle(words)
        examples.append(Example(" ".join(words), bool(number % 2)))
    return examples


def slow(examples: list[Example], training: Training) -> dict[str, float]:
    """The same training by its definition: sums over n-grams as strings, one by one."""
    sets = [grams(example.text, training.ngram) for example in examples]
    weights: dict[str, float] = defaultdict(float)
    scale: dict[str, float] = defaultdict(lambda: 1e-8)
    for epoch in range(training.epochs):
        order = Permutation(len(examples), derive_seed(training.seed, "classifier", epoch))
        for first in range(0, len(examples), training.batch_size):
            chosen = [order[index] for index in range(first, min(first + training.batch_size, len(examples)))]
            gradient: dict[str, float] = defaultdict(float)
            for index in chosen:
                found = sets[index]
                score = weights["bias"] + sum(weights[gram] for gram in found) / math.sqrt(len(found))
                error = (1 / (1 + math.exp(-score)) - examples[index].label) / len(chosen)
                for gram in found:
                    gradient[gram] += error / math.sqrt(len(found))
                gradient["bias"] += error
            for gram, value in gradient.items():
                value += training.l2 * weights[gram] * (gram != "bias")
                scale[gram] += value**2
                weights[gram] -= training.learning_rate * value / math.sqrt(scale[gram])
    return weights


def grams(text: str, ngram: int) -> set[str]:
    words = text.lower().split()
    return {" ".join(words[at : at + size]) for size in range(1, ngram + 1) for at in range(len(words) - size + 1)}


def test_probabilities_are_those_of_a_slow_implementation_without_hashing():
    examples, training = made_up(60, 1), Training(buckets=2**22, epochs=3, batch_size=16)
    weights, model = slow(examples, training), train_classifier(examples, training)
    for example in made_up(20, 2):
        found = grams(example.text, training.ngram)
        score = weights["bias"] + sum(weights[gram] for gram in found) / math.sqrt(len(found))
        assert model.probability(example.text) == pytest.approx(1 / (1 + math.exp(-score)), abs=1e-5)


def accuracy(model: LinearClassifier, examples: list[Example]) -> float:
    return sum((model.probability(example.text) > 0.5) == example.label for example in examples) / len(examples)


def test_it_learns_to_tell_texts_that_it_has_not_seen():
    model = train_classifier(made_up(1000, 1), Training(ngram=1))
    assert accuracy(model, made_up(400, 2)) > 0.97


def test_pairs_of_words_tell_what_single_words_cannot():
    def ordered(seed: int) -> list[Example]:
        pairs = [("not", "bad"), ("bad", "not")]
        return [
            Example(f"{' '.join(pairs[number % 2])} {example.text}", bool(number % 2))
            for number, example in enumerate(made_up(1600, seed)[0::2])
        ]

    assert accuracy(train_classifier(ordered(1), Training(ngram=2)), ordered(2)) > 0.9
    assert accuracy(train_classifier(ordered(1), Training(ngram=1)), ordered(2)) < 0.6


def test_the_same_examples_give_the_same_bytes_and_another_seed_gives_others(tmp_path: Path):
    examples = made_up(100, 1)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train_classifier(examples, Training(seed=seed)).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_a_classifier_is_read_back_equal(tmp_path: Path):
    model = train_classifier(made_up(100, 1))
    model.save(tmp_path / "model")
    again = LinearClassifier.load(tmp_path / "model")
    for text in ("", "word1 sign1", "Sign1, SIGN2!", "\ud800 日本語 sign3"):
        assert again.probability(text) == model.probability(text)


def test_a_text_without_words_has_the_probability_of_the_bias():
    model = LinearClassifier(np.ones(2**10, np.float32), -1.0, 2)
    assert model.probability(" ... ") == pytest.approx(1 / (1 + math.e))


def test_examples_of_one_class_are_refused():
    with pytest.raises(DataError, match="label 1 and examples with label 0"):
        train_classifier([Example("a", True), Example("b", True)])


def test_examples_are_read_from_lines_of_json(tmp_path: Path):
    path = tmp_path / "examples.jsonl"
    path.write_text('{"text": "good", "label": 0}\n\n{"label": 1, "text": "bad é"}\n', encoding="utf-8")
    assert list(read_examples([path])) == [Example("good", False), Example("bad é", True)]


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"text": "a"}', '{"text": "a", "label": 2}', '{"text": 1, "label": 1}', "[" * 100_000]
)
def test_a_line_that_is_no_example_is_named(tmp_path: Path, line: str):
    path = tmp_path / "examples.jsonl"
    path.write_text(f'{{"text": "good", "label": 0}}\n{line}\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 2"):
        list(read_examples([path]))


def test_a_missing_file_of_examples_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="no such file"):
        list(read_examples([tmp_path / "none.jsonl"]))


def damaged_files(tmp_path: Path) -> dict[str, Path]:
    good = tmp_path / "good"
    train_classifier(made_up(20, 1)).save(good)
    tensors = load_file(good)
    header = header_of(good)
    files = {
        "cut": good.read_bytes()[:5000],
        "text": b"not a model",
        "empty": b"",
    }
    paths = {}
    for name, content in files.items():
        paths[name] = tmp_path / name
        paths[name].write_bytes(content)
    nan = tensors["weights"].copy()
    nan[3] = np.nan
    for name, weights, changes in (
        ("nan", nan, {}),
        ("shape", tensors["weights"].reshape(2, -1), {}),
        ("odd size", tensors["weights"][:1000], {}),
        ("other type", tensors["weights"].astype(np.float64), {}),
        ("other format", tensors["weights"], {"format": "another"}),
        ("other hashes", tensors["weights"], {"probe": "0"}),
        ("no number", tensors["weights"], {"ngram": "two"}),
    ):
        paths[name] = tmp_path / name
        save_file(
            {"weights": weights, "bias": tensors["bias"]},
            paths[name],
            metadata={"classifier": json.dumps({**header, **changes})},
        )
    paths["no tensors"] = tmp_path / "no tensors"
    save_file({"other": tensors["bias"]}, paths["no tensors"], metadata={"classifier": json.dumps(header)})
    paths["missing"] = tmp_path / "missing"
    return paths


def header_of(path: Path) -> dict[str, object]:
    length = int.from_bytes(path.read_bytes()[:8], "little")
    return dict(json.loads(json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]["classifier"]))


def test_whatever_else_a_file_holds_is_refused_with_its_name(tmp_path: Path):
    for name, path in damaged_files(tmp_path).items():
        with pytest.raises(DataError) as raised:
            LinearClassifier.load(path)
        assert str(path) in str(raised.value), name
