"""Pre-tokenizers, which split text before merging: llama.cpp's names and their form in a ``tokenizer.json``.

The patterns are those of the published tokenizers. llama.cpp's regular expressions know neither the cases of letters
outside of ASCII nor all digits, so it splits some texts otherwise. Such pre-tokenizers are read, but not written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sheepop.tokenizer.pattern import LLAMA3, byte_level_step, split_bytes, without_offsets

# Parts that the patterns consist of.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s+(?!\S)|\s+"
_ENDS = r"\s*[\r\n]+"
_THREE, _ONE = r"\p{N}{1,3}", r"\p{N}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_EAST_ASIAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CHINESE_TO_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with an upper and a lower case.
_LETTERS_WITH_CASES = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_WIDE_SIGNS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
_ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
# DeepSeek's words, of which one of the signs above may be a part.
_DEEPSEEK_WORDS = f"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK = rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+[" + "\r\n]*" + r"|\s*[" + "\r\n]+" + rf"|{_SPACES}"


def _cased_words(behind: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Returns the alternatives for words whose capital letters come first."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}[{upper}]*[{lower}]+{behind}|{before}[{upper}]+[{lower}]*{behind}"


def _any_of(*alternatives: str) -> str:
    return "|".join(alternatives)


def _words_and_digits(digits: str) -> str:
    """Returns the pattern of cl100k and its descendants, which differ in how many digits stay together."""
    return _any_of(_CONTRACTIONS, _WORD, digits, _SIGNS, _ENDS, _SPACES)


_REST = (_SIGNS_AND_SLASHES, _ENDS, _SPACES)
_GPT4O = _any_of(_cased_words(f"{_CONTRACTIONS}?"), _THREE, *_REST)
_TEKKEN = _any_of(_cased_words(""), _ONE, *_REST)
_YOUTU = _any_of(_cased_words(f"{_CONTRACTIONS}?"), _ONE, *_REST)
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI = _any_of(
    r"[\p{Han}]+",
    _cased_words(f"{_CONTRACTIONS}?", _UPPER + _NOT_HAN, _LOWER + _NOT_HAN), _THREE, _SIGNS, _ENDS, _SPACES,
)  # fmt: skip
_DIGITS_APART = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level_step(use_regex=True)],
}
_THREE_DIGITS, _ONE_DIGIT = split_bytes(_words_and_digits(_THREE)), split_bytes(_words_and_digits(_ONE))
_THREES = split_bytes("[0-9][0-9][0-9]")["pretokenizers"][0]
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer with llama.cpp's `names` for it. With `ignore_merges`, parts that are tokens skip the merges.

    A file gets the first name, also for the pre-tokenizers in `same`, which llama.cpp treats like `description`. It
    gets no name if llama.cpp splits some text otherwise (`exact` is false). `add_bos` is llama.cpp's default.
    """

    names: tuple[str, ...]
    description: dict[str, Any]
    ignore_merges: bool = False
    add_bos: bool = False
    same: tuple[dict[str, Any], ...] = ()
    exact: bool = True


_TABLE = (
    PreTokenizer(
        (
            "gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4", "gigachat", "a.x-4.0", "mellum",
            "modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "granite-docling",
        ),
        byte_level_step(use_regex=True),
    ),
    PreTokenizer(
        (
            "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
        ),
        _THREE_DIGITS,
        ignore_merges=True,
        add_bos=True,
    ),
    PreTokenizer(("glm4", "glm5"), _THREE_DIGITS, ignore_merges=True),
    PreTokenizer(("smaug-bpe", "dbrx", "chatglm-bpe"), _THREE_DIGITS, same=(LLAMA3.pre_tokenizer,)),
    PreTokenizer(
        (
            "qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "solar-open", "kormo", "f2llmv2", "grok-2",
        ),
        _ONE_DIGIT,
    ),
    PreTokenizer(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_APART
    ),
    PreTokenizer(("bloom", "gpt3-finnish", "poro-chat"), split_bytes(_BLOOM)),
    PreTokenizer(("viking",), split_bytes(_BLOOM, _ONE)),
    PreTokenizer(("qwen35",), split_bytes(_any_of(
        _CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", _ONE, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _ENDS, _SPACES
    ))),
    PreTokenizer(("ufakzeka",), split_bytes(_any_of(_WORD, _ONE, _SIGNS, _ENDS, _SPACES))),
    PreTokenizer(("laguna",), split_bytes(r"[^\n]+|[\n]+", _words_and_digits(_ONE))),
    PreTokenizer(("minicpm5",), split_bytes(_THREE, _words_and_digits(r"\p{N}+")), ignore_merges=True),
    PreTokenizer(("seed-coder",), split_bytes(_any_of(
        _CONTRACTIONS, "[^\r\n" + r"\p{L}\p{N}]?\p{L}+", r"\p{N}{1}", r" ?[^\s\p{L}\p{N}" + "\r\n]+",
        r"\s*[" + "\r\n]+", _SPACES,
    ))),
    PreTokenizer(("bailingmoe", "bailingmoe2", "llada-moe"), split_bytes(_any_of(
        "'(?i:[sdmt]|ll|ve|re)", r"[^\r\n\p{L}\p{N}]?+\p{L}+", _ONE, r" ?[^\s\p{L}\p{N}]++[\r\n]*", r"\s*[\r\n]",
        _SPACES,
    ))),
    PreTokenizer(("exaone-moe",), split_bytes(_any_of(
        _CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", _ONE, r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
        r"\s*[\r\n]", _SPACES,
    ))),
    PreTokenizer(("jais-2",), split_bytes(_any_of(
        _CONTRACTIONS, _WORD, _THREE, _SIGNS, _ENDS,
        *(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)", r"\s{1}",
    ))),
    PreTokenizer(("deepseek-llm",), split_bytes(
        "[\r\n]", rf"\s?[{_LETTERS_WITH_CASES}]+", rf"\s?{_WIDE_SIGNS}+", r"\s+$", _CHINESE_TO_KOREAN, r"\p{N}+"
    )),
    PreTokenizer(
        ("deepseek-coder",), split_bytes("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_TO_KOREAN, _ONE)
    ),
    PreTokenizer(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), split_bytes(_THREE, _EAST_ASIAN, _DEEPSEEK)),
    PreTokenizer(("spark2_5",), split_bytes(
        _THREE, _EAST_ASIAN, rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+|[" + "\r\n]" + rf"|{_SPACES}", _ONE
    )),
    PreTokenizer(("falcon",), {"type": "Sequence", "pretokenizers": [
        {"type": "Punctuation", "behavior": "Contiguous"}, byte_level_step(use_regex=True), _THREES
    ]}),
    PreTokenizer(("afmoe",), split_bytes(
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
        "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        _DEEPSEEK,
    ), exact=False),
    PreTokenizer(("chameleon",), split_bytes(
        "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", _ONE, r"[\p{P}!-/:-@\[-`{-~]",
        use_regex=True,
    ), add_bos=True),
    PreTokenizer(("superbpe",), split_bytes(r"\p{N}+", r"(?=(\d{3})+(?!\d))"), exact=False),
    PreTokenizer(("kimi-k2",), split_bytes(_KIMI), exact=False),
    PreTokenizer(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), split_bytes(_GPT4O), exact=False),
    PreTokenizer(("granite-embed-multi-97m",), split_bytes(_GPT4O), ignore_merges=True, exact=False),
    PreTokenizer(("tiny_aya", "cohere2moe"), split_bytes(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O), exact=False),
    PreTokenizer(("tekken",), split_bytes(_TEKKEN), ignore_merges=True, add_bos=True, exact=False),
    PreTokenizer(("youtu",), split_bytes(
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
        "|[\u3105-\u312f]+|" + _EAST_ASIAN,
        _YOUTU,
    ), ignore_merges=True, exact=False),
    PreTokenizer(("default",), split_bytes(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        "[0-9][0-9][0-9]",
    )),
)  # fmt: skip
BY_NAME = {name: row for row in _TABLE for name in row.names}


def find_name(description: Any, ignore_merges: bool) -> str | None:
    """Returns llama.cpp's name for a pre-tokenizer, or None if it has none."""
    wanted = without_offsets(description)
    for row in _TABLE:
        forms = (row.description, *row.same) if row.exact and row.ignore_merges == ignore_merges else ()
        if wanted in map(without_offsets, forms):
            return row.names[0]
    return None
