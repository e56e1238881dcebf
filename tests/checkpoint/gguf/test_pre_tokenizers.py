"""Texts are split by each name of llama.cpp as llama.cpp splits them."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders

from sheepop.checkpoint.gguf.pre_tokenizers import BY_NAME, find_name

# Texts with bars where llama.cpp 0.3.36's unicode_regex_split cuts them.
CUT = [
    ("gpt-2", "It|'s| 12345| o|'|CLOCK|!|\n\n | foo|_|bar|(|x|)//|\r|\n|漢字ひらがな| 3|.|14|  |\t|नमस|्|त|े"),
    ("llama-bpe", "It|'s| |123|45| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|14|  |\tनमस|्त|े"),
    ("glm4", "It|'s| |123|45| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|14|  |\tनमस|्त|े"),
    ("smaug-bpe", "It|'s| |123|45| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|14|  |\tनमस|्त|े"),
    ("qwen2", "It|'s| |1|2|3|4|5| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|1|4|  |\tनमस|्त|े"),
    ("smollm", "It|'s| |1|2|3|4|5| o|'|CLOCK|!|\n\n | foo|_|bar|(|x|)//|\r|\n|漢字ひらがな| |3|.|1|4|  |\t|नमस|्|त|े"),
    ("bloom", "It's| 12345| o'CLOCK|!\n\n | foo_bar|(|x|)|//|\r\n|漢字ひらがな| 3|.|14|  \t|नमस्ते"),
    ("viking", "It's| |1|2|3|4|5| o'CLOCK|!\n\n | foo_bar|(|x|)|//|\r\n|漢字ひらがな| |3|.|1|4|  \t|नमस्ते"),
    ("qwen35", "It|'s| |1|2|3|4|5| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|1|4|  |\tनमस्ते"),
    ("ufakzeka", "It|'s| |1|2|3|4|5| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|1|4|  |\tनमस|्त|े"),
    ("laguna", "It|'s| |1|2|3|4|5| o|'CLOCK|!|\n\n| | foo|_bar|(x|)//\r|\n|漢字ひらがな| |3|.|1|4|  |\tनमस|्त|े"),
    ("minicpm5", "It|'s| |123|45| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|14|  |\tनमस|्त|े"),
    ("seed-coder", "It|'s| |1|2|3|4|5| o|'CLOCK|!|\n\n| | foo|_bar|(x|)//|\r\n|漢字ひらがな| |3|.|1|4|  |\tनमस|्त|े"),
    ("bailingmoe", "It|'s| |1|2|3|4|5| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|1|4|  |\tनमस|्त|े"),
    ("exaone-moe", "It|'s| |1|2|3|4|5| o|'CLOCK|!\n|\n| | foo|_bar|(x|)//\r|\n|漢字ひらがな| |3|.|1|4|  |\tनमस्ते"),
    ("jais-2", "It|'s| |123|45| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|14|  |\tनमस|्त|े"),
    ("deepseek-llm", "It|'|s| |12345| o|'|CLOCK|!|\n|\n| | foo|_|bar|(|x|)//|\r|\n|漢字ひらがな| |3|.|14|  \t|नमस्ते"),
    ("deepseek-coder",
     "It|'|s| |1|2|3|4|5| o|'|CLOCK|!|\n|\n| | foo|_|bar|(|x|)//|\r|\n|漢字ひらがな| |3|.|1|4|  |\t|नमस|्|त|े"),
    ("deepseek-v3", "It|'s| |123|45| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|14|  |\tनमस्ते"),
    ("spark2_5", "It|'s| |1|2|3|4|5| o|'CLOCK|!|\n|\n| | foo|_bar|(x|)//|\r|\n|漢字ひらがな| |3|.|1|4|  |\tनमस्ते"),
    ("falcon", "It|'|s| |123|45| o|'|CLOCK|!|\n\n | foo|_|bar|(|x|)//|\r|\n|漢字ひらがな| 3|.|14|  |\t|नमस|्|त|े"),
    ("afmoe", "It|'s| |12|345| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|14|  |\tनमस्ते"),
    ("chameleon",
     "It|'|s| |1|2|3|4|5| o|'|CLOCK|!|\n|\n|  |foo|_|bar|(|x|)|/|/|\r|\n|漢字ひらがな| |3|.|1|4|  |\t|नमस|्|त|े"),
    ("superbpe", "It's |12|345| o'CLOCK!\n\n  foo_bar(x)//\r\n漢字ひらがな |3|.|14|  \tनमस्ते"),
    ("kimi-k2", "Don't| |123|4|+|5| //\n\n|漢字| end"),
    ("gpt-4o", "I'll| pay| $|123|456|7| to| mc|Donald's|...\n| \n|はい漢字| ok"),
    ("granite-embed-multi-97m", "It's| |123|45| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|14|  |\tनमस्ते"),
    ("tiny_aya", "It's| |12|345| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|14|  |\tनमस्ते"),
    ("tekken", "I|'ll| pay| $|1|2|3|4|5|6|7| to| mc|Donald|'s|...\n| \n|はい漢字| ok"),
    ("youtu", "It's| |1|2|3|4|5| o|'CLOCK|!\n\n| | foo|_bar|(x|)//\r\n|漢字ひらがな| |3|.|1|4|  |\tनमस्ते"),
    ("default", "It|'|s| |123|45| o|'|CLOCK|!|\n\n | foo|_|bar|(|x|)//|\r|\n|漢字ひらがな| |3|.|14|  |\t|नमस|्|त|े"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "cut"), CUT)
def test_text_is_split_as_by_llama_cpp(name: str, cut: str) -> None:
    model = {"type": "BPE", "vocab": {}, "merges": []}
    backend = Tokenizer.from_str(json.dumps({"pre_tokenizer": BY_NAME[name].description, "model": model}))
    assert backend.pre_tokenizer is not None
    pieces = backend.pre_tokenizer.pre_tokenize_str(cut.replace("|", ""))
    assert [decoders.ByteLevel().decode([piece]) for piece, _ in pieces] == cut.split("|")


def test_every_pattern_is_covered() -> None:
    assert [name for name, _ in CUT] == list(dict.fromkeys(row.names[0] for row in BY_NAME.values()))


def test_what_llama_cpp_splits_otherwise_is_not_written() -> None:
    for row in BY_NAME.values():
        found = find_name(row.description, row.ignore_merges)
        assert (found is not None) == row.exact, row.names
        assert found is None or BY_NAME[found].description == row.description


def test_published_pre_tokenizers_are_known() -> None:
    """DeepSeek V3's tokenizer.json, of which the parts have line ends themselves, not their escapes."""
    regexes = [
        r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^""" "\r\n" r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[" "\r\n" r"]*|\s*[" "\r\n" r"]+|\s+(?!\S)|\s+",
    ]  # fmt: skip
    splits = [{"type": "Split", "pattern": {"Regex": it}, "behavior": "Isolated", "invert": False} for it in regexes]
    end = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    assert find_name({"type": "Sequence", "pretokenizers": [*splits, end]}, False) == "deepseek-v3"
