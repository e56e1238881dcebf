"""Constrained output: texts of an untrained network follow their grammar."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.constraints import Grammars
from sheepop.model import Transformer
from sheepop.tokenizer import CharTokenizer, TokenizerConfig, train_tokenizer

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    characters = CharTokenizer()
    found = Grammars(characters, torch.zeros(characters.vocab_size, dtype=torch.bool), [characters.eos_id])
    yield found
    found.close()


def write(grammars: Grammars, settings: dict[str, object], seed: int, most: int = 400) -> str:
    """Random allowed tokens, to the end of the text."""
    characters, draw = CharTokenizer(), torch.Generator().manual_seed(seed)
    matcher = grammars.matcher(GenerationConfig(**settings))
    assert matcher is not None
    written: list[int] = []
    for _ in range(most):
        choices = matcher.allowed().nonzero()[:, 0]
        # If the text may end, it ends half of the time.
        token = int(choices[torch.randint(len(choices), (1,), generator=draw)])
        if characters.eos_id in choices.tolist() and torch.rand((), generator=draw) < 0.5:
            token = characters.eos_id
        if token == characters.eos_id:
            return characters.decode(written)
        written.append(token)
        matcher.accept(token)
    raise AssertionError("the text did not end")


@pytest.mark.parametrize("seed", range(4))
def test_texts_follow_their_grammar(grammars: Grammars, seed: int) -> None:
    assert re.fullmatch(r"[a-c]{2,5}/\d", write(grammars, {"regex": r"[a-c]{2,5}/\d"}, seed))
    assert write(grammars, {"choice": ("yes", "no", 'a "quoted" one', "é")}, seed) in (
        "yes",
        "no",
        'a "quoted" one',
        "é",
    )
    assert write(grammars, {"grammar": 'start: "(" start ")" | "x"'}, seed).strip("()") == "x"
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 40}, "b": {"enum": ["u", "v"]}},
        "required": ["n", "b"],
        "additionalProperties": False,
    }
    found = json.loads(write(grammars, {"json_schema": schema}, seed))
    assert found.keys() == {"n", "b"}
    assert 3 <= found["n"] <= 40
    assert found["b"] in ("u", "v")


def test_guesses_are_followed_and_taken_back(grammars: Grammars) -> None:
    characters = CharTokenizer()
    matcher = grammars.matcher(GenerationConfig(regex="abc|abd"))
    assert matcher is not None
    a, b, c, x = (characters.encode(letter)[0] for letter in "abcx")
    behind = matcher.allowed_after([a, b, x])
    assert [allowed.nonzero()[:, 0].tolist() for allowed in behind[:2]] == [[a], [b]]
    assert characters.decode(behind[2].nonzero()[:, 0].tolist()) == "cd"
    assert len(behind) == 3
    for token in (a, b, c):
        assert matcher.allowed()[token]
        matcher.accept(token)
    assert matcher.allowed().nonzero()[:, 0].tolist() == [characters.eos_id]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regex": "(a|b"}, "(?s)regex is not valid: .*unclosed group"),
        ({"grammar": "start: nothing"}, "grammar is not valid"),
        ({"json_schema": {"type": "nosuch"}}, "json_schema is not valid: Invalid type: nosuch"),
        ({"regex": "a" * 1_000_001}, "regex has .* characters; at most 1,000,000"),
    ],
)
def test_what_is_no_grammar_is_refused(grammars: Grammars, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        grammars.matcher(GenerationConfig(**settings))


def test_a_schema_of_ten_thousand_levels_is_refused(grammars: Grammars) -> None:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(10_000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UsageError, match="deeper than 200 levels"):
        grammars.matcher(GenerationConfig.model_construct(json_schema=schema))


def test_a_generator_writes_what_is_asked_for(toy_model: Callable[..., Transformer]) -> None:
    characters = CharTokenizer()
    generator = Generator(toy_model(vocab_size=characters.vocab_size), characters)
    asked = [
        GenerationConfig(regex=r"\d{3}-[xyz]+;", seed=1, num_completions=3, max_new_tokens=60),
        GenerationConfig(choice=("left", "right"), seed=2),
        GenerationConfig(seed=3, max_new_tokens=9),
    ]
    found = generator.generate(["a", "b", "c"], asked)
    assert len(found) == 5
    assert all(re.fullmatch(r"\d{3}-[xyz]+;", done.text) for done in found[:3] if done.finish_reason == "stop")
    assert all(re.fullmatch(r"\d{3}-[xyz]*;?", done.text) for done in found[:3])
    assert found[3].text in ("left", "right")
    assert found[3].finish_reason == "stop"
    # The other texts are the same as alone, except for their index in the call.
    assert found[4].token_ids == generator.generate(["a", "b", "c"], asked[2])[2].token_ids


def test_what_the_tokenizer_cannot_write_is_said(toy_model: Callable[..., Transformer]) -> None:
    characters = CharTokenizer()
    generator = Generator(toy_model(vocab_size=characters.vocab_size), characters)
    with pytest.raises(UsageError, match="this model's tokenizer cannot write"):
        generator.generate(["a"], GenerationConfig(regex="x\u00df", seed=1))
    generator.close()


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose texts are short, since every unbounded part has a limit."""
    kinds = ["null", "boolean", "integer", "number", "string", "pattern", "enum", "const"]
    kinds += ["object", "object", "array", "tuple", "anyOf", "$ref"] if depth else []
    kind = draw.choice(kinds)
    if kind == "integer":
        low = draw.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)}
    if kind == "number":
        low = draw.randint(-50, 50) / 4
        return {"type": "number", "minimum": low, "maximum": low + draw.randint(1, 20)}
    if kind == "string":
        least = draw.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 5)}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(["^[a-f]{2,4}$", "^(red|green)-\\d{1,3}$", "^\\d{4}-\\d\\d$"])}
    if kind == "enum":
        return {"enum": draw.sample([1, -2.5, "é\n", 'a"b', None, True, [], [1, 2], {"k": 0}, ""], draw.randint(1, 4))}
    if kind == "const":
        return {"const": draw.choice([0, "x", None, [1, {"y": "z"}], False])}
    if kind == "object":
        names = draw.sample(["a", "long name", "ß", 'q"', "d.e", "0"], draw.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(draw, depth - 1) for name in names},
            "required": draw.sample(names, draw.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "array":
        least = draw.randint(0, 2)
        bounds = {"minItems": least, "maxItems": least + draw.randint(0, 2)}
        return {"type": "array", "items": random_schema(draw, depth - 1), **bounds}
    if kind == "tuple":
        items = [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
    if kind == "$ref":
        return {"$ref": "#/$defs/shared"}
    return {"type": kind}


@pytest.mark.parametrize(
    ("count", "first"), [(150, 0), pytest.param(1000, 1000, marks=pytest.mark.campaign)], ids=["150", "1000"]
)
def test_json_fits_its_schema_whatever_the_schema(
    toy_model: Callable[..., Transformer], count: int, first: int
) -> None:
    """The network is untrained, and the validator is an independent one."""
    jsonschema = pytest.importorskip("jsonschema")
    text = json.dumps([{"long name": [1, 20.5, "red"], "ß": None}, {"a": True, "d.e": "green-12"}] * 9, indent=1)
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=290), [text], console=Console.silent())
    sizes = {"vocab_size": tokenizer.vocab_size, "num_layers": 1, "d_model": 16, "max_seq_len": 512}
    generator = Generator(toy_model(**sizes), tokenizer, max_batch_size=32)
    schemas = []
    for number in range(first, first + count):
        draw = random.Random(number)
        schemas.append({**random_schema(draw), "$defs": {"shared": random_schema(draw, 0)}})
    asked = [GenerationConfig(json_schema=schema, max_new_tokens=500, temperature=1.0, seed=5) for schema in schemas]
    written = generator.generate(["x"] * count, asked)
    generator.close()
    whole = 0
    for schema, done in zip(schemas, written, strict=True):
        if done.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(done.text))
            whole += 1
    assert whole >= 0.97 * count
