"""Code with a gap: re-ordered by document and seed alone, and nothing of the text is lost."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sheepop.core.console import Console
from sheepop.core.errors import TokenizerError
from sheepop.data.config import FimConfig
from sheepop.data.documents import Document
from sheepop.data.encoding import SENTINELS, DocumentEncoder, Infilling, Special, sentinel_ids
from sheepop.tokenizer import ByteLevelBPE, CharTokenizer, Tokenizer, TokenizerConfig, train_tokenizer

PREFIX, SUFFIX, MIDDLE = Special.PREFIX, Special.SUFFIX, Special.MIDDLE
CODE = Path(__file__).read_text(encoding="utf-8")
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=60) | st.sampled_from(
    ["<|fim_prefix|>x<|fim_suffix|>", "def f():\r\n\treturn 1\r\n", "e\u0301" * 5, "\U0001f469\u200d\U0001f4bb"]
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    config = TokenizerConfig(vocab_size=600)
    return train_tokenizer(config, [CODE], console=Console.silent(), special_tokens=SENTINELS)


@pytest.fixture(scope="module")
def directory(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(path)
    return str(path)


def undone(segments: list[str | Special]) -> str:
    """The document that the segments came from, read off the sentinels as the paper defines the two orders."""
    marks = [segment for segment in segments if isinstance(segment, Special)]
    if not marks:
        return "".join(map(str, segments))
    assert marks == [PREFIX, SUFFIX, MIDDLE] and segments[0] is PREFIX
    suffix_at, middle_at = segments.index(SUFFIX), segments.index(MIDDLE)
    prefix, suffix = segments[1:suffix_at], segments[suffix_at + 1 : middle_at]
    return "".join(map(str, [*prefix, *segments[middle_at + 1 :], *suffix]))


@given(TEXTS, st.integers(0, 2**40), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=300)
def test_undoing_the_order_gives_the_text_back(text: str, seed: int, rate: float, spm_rate: float):
    segments = Infilling(FimConfig(rate=rate, spm_rate=spm_rate), seed).segments("document", text)
    assert undone(segments) == text


@given(TEXTS, st.integers(0, 2**40), st.floats(0, 1))
@settings(max_examples=200)
def test_decoding_the_tokens_and_undoing_the_order_gives_the_text_back(
    directory: str, tokenizer: Tokenizer, text: str, seed: int, spm_rate: float
):
    encoder = DocumentEncoder(directory, tokenizer.fingerprint(), Infilling(FimConfig(rate=1, spm_rate=spm_rate), seed))
    document = Document.of(text, "a.py", 0, kind="code")
    ((ids, num_bytes),) = encoder([document.stored()])
    assert num_bytes == len(text.encode("utf-8")) and ids.dtype == np.uint32
    assert ids[-1] == tokenizer.eos_id
    sentinels = {token_id: special for special, token_id in sentinel_ids(tokenizer).items()}
    pieces: list[bytes | Special] = []
    for token_id in ids[:-1].tolist():
        pieces.append(sentinels.get(token_id) or tokenizer.token_bytes(token_id))
    marks = [piece for piece in pieces if isinstance(piece, Special)]
    assert marks == [PREFIX, SUFFIX, MIDDLE]
    # Cuts fall between characters, so each piece is UTF-8 by itself.
    first, second = pieces.index(SUFFIX), pieces.index(MIDDLE)
    prefix, suffix, rest = pieces[1:first], pieces[first + 1 : second], pieces[second + 1 :]
    assert "".join(b"".join(part).decode("utf-8") for part in (prefix, rest, suffix)) == text  # type: ignore[arg-type]


def test_a_document_depends_on_its_id_and_the_seed_alone():
    documents = [(f"{i:032x}", CODE[i : i + 200]) for i in range(40)]
    infilling = Infilling(FimConfig(rate=0.5), 7)
    alone = [infilling.segments(*document) for document in documents]
    backwards = [Infilling(FimConfig(rate=0.5), 7).segments(*document) for document in reversed(documents)]
    assert alone == backwards[::-1]
    assert alone != [Infilling(FimConfig(rate=0.5), 8).segments(*document) for document in documents]


def test_raising_the_rate_leaves_chosen_documents_as_they_were():
    few, many = (Infilling(FimConfig(rate=rate), 3) for rate in (0.3, 0.8))
    documents = [(f"{i:032x}", CODE[i : i + 100]) for i in range(200)]
    changed = [document for document in documents if few.segments(*document) != [document[1]]]
    assert all(few.segments(*document) == many.segments(*document) for document in changed)


@pytest.mark.parametrize(("rate", "spm_rate"), [(0.0, 0.5), (0.25, 0.9), (0.5, 0.5), (1.0, 0.0), (1.0, 1.0)])
def test_rates_are_kept(rate: float, spm_rate: float):
    infilling = Infilling(FimConfig(rate=rate, spm_rate=spm_rate), 11)
    found = [infilling.segments(f"{i:032x}", "0123456789") for i in range(4000)]
    changed = [segments for segments in found if len(segments) > 1]
    spm = [segments for segments in changed if segments[:2] == [PREFIX, SUFFIX]]
    # Four standard deviations of a binomial count.
    assert abs(len(changed) - 4000 * rate) <= 4 * (4000 * rate * (1 - rate)) ** 0.5
    assert abs(len(spm) - len(changed) * spm_rate) <= 4 * (len(changed) * spm_rate * (1 - spm_rate)) ** 0.5


def test_cuts_are_uniform_over_the_places_of_the_text():
    # Two independent uniform places among 0..3: P(smaller = i, larger = j) is 1/16 for i = j and 2/16 otherwise.
    counts = np.zeros((4, 4))
    infilling = Infilling(FimConfig(rate=1, spm_rate=0), 5)
    for i in range(16_000):
        _, prefix, _, suffix, _, _ = infilling.segments(f"{i:032x}", "abc")
        counts[len(str(prefix)), 3 - len(str(suffix))] += 1
    expected = np.triu(np.full((4, 4), 2000.0)) - np.diag(np.full(4, 1000.0))
    cells = np.triu_indices(4)
    chi_squared = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    assert counts.sum() == 16_000 and np.tril(counts, -1).sum() == 0
    # The 99.9th percentile of chi squared with 9 degrees of freedom.
    assert chi_squared < 27.9


def test_the_two_orders_of_a_worked_example():
    text = "abcdef"
    psm = Infilling(FimConfig(rate=1, spm_rate=0), 1).segments("x", text)
    spm = Infilling(FimConfig(rate=1, spm_rate=1), 1).segments("x", text)
    prefix, suffix, middle = psm[1], psm[3], psm[5]
    assert psm == [PREFIX, prefix, SUFFIX, suffix, MIDDLE, middle]
    assert spm == [PREFIX, SUFFIX, suffix, MIDDLE, prefix, middle]
    assert f"{prefix}{middle}{suffix}" == text


def test_only_code_is_reordered_and_others_have_the_tokens_they_had(directory: str, tokenizer: Tokenizer):
    documents = [Document.of(CODE, "a", 0, kind=kind).stored() for kind in ("prose", "table", "chat")]
    encoder = DocumentEncoder(directory, tokenizer.fingerprint(), Infilling(FimConfig(rate=1), 1))
    for ids, _ in encoder(documents):
        assert ids.tolist() == [*tokenizer.encode(CODE), tokenizer.eos_id]


def test_text_that_looks_like_a_sentinel_is_no_sentinel(directory: str, tokenizer: Tokenizer):
    text = "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>c"
    encoder = DocumentEncoder(directory, tokenizer.fingerprint(), Infilling(FimConfig(rate=1), 2))
    ((ids, _),) = encoder([Document.of(text, "a.py", 0, kind="code").stored()])
    sentinels = sentinel_ids(tokenizer)
    assert [int((ids == token_id).sum()) for token_id in sentinels.values()] == [1, 1, 1]


def test_no_infilling_gives_the_tokens_it_always_gave(directory: str, tokenizer: Tokenizer):
    document = Document.of(CODE, "a.py", 0, kind="code").stored()
    ((plain, _),) = DocumentEncoder(directory, tokenizer.fingerprint())([document])
    ((off, _),) = DocumentEncoder(directory, tokenizer.fingerprint(), Infilling(FimConfig(rate=0), 1))([document])
    assert plain.tolist() == off.tolist() == [*tokenizer.encode(CODE), tokenizer.eos_id]


@pytest.mark.parametrize("tokenizer", [CharTokenizer(), ByteLevelBPE.train(["ab"], 260)])
def test_a_tokenizer_without_the_sentinels_is_refused_with_a_remedy(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path)
    encoder = DocumentEncoder(str(tmp_path), tokenizer.fingerprint(), Infilling(FimConfig(rate=0.5), 1))
    with pytest.raises(TokenizerError, match=r"lacks <\|fim_prefix\|>.* Leave out tokenizer\.path.*rate=0"):
        encoder([Document.of("x", "a.py", 0, kind="code").stored()])


def test_a_tokenizer_at_the_place_of_another_one_is_read(tmp_path: Path):
    """As after a run was deleted and another one trained to the same directory by one process."""
    document = Document.of(CODE, "a.py", 0, kind="code").stored()
    for tokenizer in (CharTokenizer(), ByteLevelBPE.train([CODE], 300), CharTokenizer()):
        tokenizer.save(tmp_path)
        ((ids, _),) = DocumentEncoder(str(tmp_path), tokenizer.fingerprint())([document])
        assert ids.tolist() == [*tokenizer.encode(CODE), tokenizer.eos_id]


@pytest.mark.parametrize("setting", [{"rate": -0.1}, {"rate": 1.1}, {"spm_rate": 2}, {"rat": 0.5}])
def test_a_rate_that_is_no_share_is_refused(setting: dict[str, float]):
    with pytest.raises(ValidationError):
        FimConfig.model_validate(setting)
