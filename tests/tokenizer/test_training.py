import hashlib
import io
import os
import subprocess
import sys

import pytest

from sheepop.core.config import validate
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, TokenizerError
from sheepop.tokenizer import ByteLevelBPE, CharTokenizer, TokenizerConfig, train_tokenizer

_TRAIN = """
import hashlib, pathlib, sys, sysconfig
from sheepop.tokenizer import ByteLevelBPE
folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
texts = [(folder / name).read_text(encoding="utf-8") for name in sys.argv[1:]]
print(hashlib.sha256(ByteLevelBPE.train(texts, 1200).to_json().encode()).hexdigest())
"""


def test_the_same_texts_give_the_same_file_in_every_process():
    def digest(hash_seed: str, threads: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-c", _TRAIN, "argparse.py", "heapq.py", "textwrap.py"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return result.stdout.strip()

    assert digest("0", "1") == digest("1", "2") != hashlib.sha256(b"").hexdigest()


def test_merges_of_a_hand_worked_corpus():
    # Parts: "ab" x3, " ab" x2, "abc" x1. Pairs: a+b 6 times, then " "+ab twice, then ab+c once.
    tokenizer = ByteLevelBPE.train(["ab ab", "ab ab", "ab", "abc"], 263)
    assert [tokenizer.token_bytes(i) for i in (260, 261, 262)] == [b"ab", b" ab", b"abc"]
    assert tokenizer.encode("abc ab b") == [262, 261, tokenizer.encode(" ")[0], tokenizer.encode("b")[0]]


def test_a_vocabulary_larger_than_the_corpus_allows_is_refused_with_the_possible_size():
    # "aaaa" holds the pair a+a, then aa+aa: two merges beside the 260 tokens that are always there.
    with pytest.raises(TokenizerError, match=r"larger than the corpus allows.* gives 262 tokens at most"):
        train_tokenizer(TokenizerConfig(vocab_size=263), ["aaaa"], console=Console.silent())
    assert train_tokenizer(TokenizerConfig(vocab_size=262), ["aaaa"], console=Console.silent()).vocab_size == 262


def test_more_characters_than_the_config_allows_are_refused():
    config = TokenizerConfig(algorithm="char", vocab_size=129)
    with pytest.raises(TokenizerError, match=r"vocabulary of 130, but tokenizer\.vocab_size is 129"):
        train_tokenizer(config, ["é€"], console=Console.silent())
    assert train_tokenizer(config, ["é"], console=Console.silent()).vocab_size == 129


@pytest.mark.parametrize("algorithm", ["bpe", "char"])
@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_no_text_is_refused(algorithm: str, texts: list[str]):
    with pytest.raises(TokenizerError, match="no text to train"):
        train_tokenizer(TokenizerConfig(algorithm=algorithm, vocab_size=300), texts, console=Console.silent())


def test_text_beyond_the_cap_is_not_read_and_the_user_is_told():
    taken = []

    def texts():
        for text in ["abc", "é€xyz", "never"]:
            taken.append(text)
            yield text

    screen = io.StringIO()
    config = TokenizerConfig(algorithm="char", max_training_bytes=7)
    tokenizer = train_tokenizer(config, texts(), console=Console(file=screen))
    # 3 bytes, then 2 for é; the 3 bytes of € would make 8, so the cut is before it.
    assert isinstance(tokenizer, CharTokenizer) and tokenizer.extra_characters == "é"
    assert taken == ["abc", "é€xyz"]
    assert "first 5 bytes" in screen.getvalue() and "max_training_bytes = 7" in screen.getvalue()


@pytest.mark.parametrize(("size", "told"), [(5, False), (4, True)])
def test_the_cap_is_mentioned_only_where_it_cut(size: int, told: bool):
    screen = io.StringIO()
    config = TokenizerConfig(algorithm="char", max_training_bytes=size)
    train_tokenizer(config, ["abc", "de", ""], console=Console(file=screen))
    assert ("not used" in screen.getvalue()) is told


def test_the_cap_is_said_even_without_a_console(capsys: pytest.CaptureFixture[str]):
    train_tokenizer(TokenizerConfig(algorithm="char", max_training_bytes=4), ["abcdef"])
    assert "the rest was not used" in capsys.readouterr().err


def test_a_path_is_used_instead_of_training(tmp_path):
    CharTokenizer("é").save(tmp_path)

    def texts():
        raise AssertionError("the texts must not be read")
        yield ""

    tokenizer = train_tokenizer(TokenizerConfig(path=str(tmp_path)), texts())
    assert tokenizer.fingerprint() == CharTokenizer("é").fingerprint()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"vocab_size": 259}, "vocab_size = 259: a bpe vocabulary needs at least 260"),
        ({"algorithm": "char", "vocab_size": 127}, "vocab_size = 127: a char vocabulary needs at least 128"),
        ({"algorithm": "words"}, "algorithm = 'words'"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"max_training_bytes": 0}, "max_training_bytes = 0"),
        ({"vocabsize": 300}, "vocabsize: unknown key. Did you mean vocab_size?"),
    ],
)
def test_settings_out_of_range_are_refused(tree: dict[str, object], message: str):
    with pytest.raises(ConfigError) as raised:
        validate(TokenizerConfig, tree)
    assert message in str(raised.value)


def test_a_byte_level_vocabulary_below_the_alphabet_is_refused():
    with pytest.raises(TokenizerError, match="at least 260 tokens"):
        ByteLevelBPE.train(["abc"], 259)


def test_importing_the_package_loads_no_heavy_library():
    code = (
        "import sys, sheepop.tokenizer; print([m for m in ('torch', 'tokenizers', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_further_special_tokens_take_the_last_ids_and_change_no_other(source_texts: list[str], tmp_path):
    names = ("<|fim_prefix|>", "<|tool call|>")
    config = TokenizerConfig(vocab_size=502)
    tokenizer = train_tokenizer(config, source_texts, console=Console.silent(), special_tokens=names)
    without = ByteLevelBPE.train(source_texts, 500)
    assert tokenizer.vocab_size == 502
    assert tokenizer.special_tokens == {**without.special_tokens, names[0]: 500, names[1]: 501}
    assert [tokenizer.token_bytes(i) for i in range(500)] == [without.token_bytes(i) for i in range(500)]
    text = source_texts[2] + "<|fim_prefix|> <|tool call|>"
    assert tokenizer.encode(text) == without.encode(text)
    assert tokenizer.encode("a<|tool call|>b", allow_special=True) == [
        *without.encode("a"),
        501,
        *without.encode("b"),
    ]

    tokenizer.save(tmp_path)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs("a<|tool call|>b<|fim_prefix|>")["input_ids"] == tokenizer.encode(
        "a<|tool call|>b<|fim_prefix|>", allow_special=True
    )
    loaded = train_tokenizer(TokenizerConfig(path=str(tmp_path)), [], special_tokens=names)
    assert loaded.fingerprint() == tokenizer.fingerprint()


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        (TokenizerConfig(vocab_size=300), ("<eos>",), "'<eos>' cannot be an additional special token"),
        (TokenizerConfig(vocab_size=300), ("<x>", "<x>"), "'<x>' cannot be an additional special token"),
        (TokenizerConfig(vocab_size=300), (" x",), "cannot be an additional special token"),
        (TokenizerConfig(vocab_size=263), ("abc",), "'abc' is part of ordinary text"),
        (TokenizerConfig(vocab_size=260), ("<x>",), r"at least 261 tokens \(5 special tokens and 256 bytes\)"),
        (TokenizerConfig(algorithm="char"), ("<x>",), r"no special tokens except .* Set tokenizer\.algorithm=bpe"),
    ],
)
def test_a_special_token_that_cannot_be_is_refused(config: TokenizerConfig, names: tuple[str, ...], message: str):
    with pytest.raises(TokenizerError, match=message):
        train_tokenizer(config, ["abc abc abc"], console=Console.silent(), special_tokens=names)


def test_a_given_tokenizer_without_a_special_token_that_is_needed_is_refused(tmp_path):
    CharTokenizer("é").save(tmp_path)
    with pytest.raises(TokenizerError, match=r"has no special token <x>\. Leave out tokenizer\.path"):
        train_tokenizer(TokenizerConfig(path=str(tmp_path)), [], special_tokens=("<eos>", "<x>"))


# As Meta has published it in Llama 3's tokenizer.json.
PUBLISHED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("pattern", ["llama3", "gpt2"])
def test_a_pattern_of_others_gives_the_vocabulary_and_ids_of_theirs(pattern: str):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    texts = ["it's a sheep's fleece:  12345 tufts\n\n", "don'T count 12345 sheep", "fleece, fleece,\n  tufts"] * 3
    found = train_tokenizer(TokenizerConfig(vocab_size=290, pattern=pattern), texts, console=Console(quiet=True))
    library = Tokenizer(models.BPE())
    by_regex = pre_tokenizers.Split(Regex(PUBLISHED), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern == "gpt2")
    library.pre_tokenizer = as_bytes if pattern == "gpt2" else pre_tokenizers.Sequence([by_regex, as_bytes])
    library.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=290,
            min_frequency=1,
            special_tokens=["<pad>", "<unk>", "<bos>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    for text in (*texts, "  two  spaces\tand 99999's \n \n\n eos", "naïve 漢字 ١٢٣ we'LL \u2028 it's"):
        assert found.encode(text) == library.encode(text).ids
        assert found.decode(found.encode(text)) == text


def test_a_pattern_that_no_algorithm_reads_is_refused():
    with pytest.raises(ConfigError, match="pattern: gpt2 is for algorithm: bpe, not unigram"):
        validate(TokenizerConfig, {"algorithm": "unigram", "pattern": "gpt2"})
