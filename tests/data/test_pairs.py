"""Pairs of source and target: how they lie in a corpus, and the batches that are made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DataError
from sheepop.data import BatchSchedule, Corpus, DataConfig, PairBatches, TokenSplit, batch_hash, build_corpus
from sheepop.data.batch_schedule import MixtureSchedule, RowSource, SampleOrder, Stages
from sheepop.data.batches import PairBatch
from sheepop.data.config import pair_settings
from sheepop.data.documents import Pair
from sheepop.tokenizer import TokenizerConfig

PAD, BOS, EOS = 0, 2, 3
# Documents as they lie in a split: source <eos> <bos> target <eos>.
DOCUMENTS = ([10, 11, 12, EOS, BOS, 20, EOS], [13, EOS, BOS, 21, 22, 23, EOS], [14, 15, EOS, BOS, 24, 25, EOS])

Build = Callable[..., Corpus]
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: not text.isspace())


def batches(*documents: list[int], max_length: int = 9, **settings: Any) -> PairBatches:
    split = TokenSplit.from_documents(documents)
    return PairBatches(split, max_length=max_length, pad_id=PAD, eos_id=EOS, **settings)


def test_a_batch_by_hand() -> None:
    made = batches(*DOCUMENTS)
    batch = made.batch(np.array([1, 0]))
    assert batch.source_ids.tolist() == [[13, EOS, PAD, PAD], [10, 11, 12, EOS]]
    assert batch.source_mask.tolist() == [[True, True, False, False], [True] * 4]
    assert batch.input_ids.tolist() == [[BOS, 21, 22, 23], [BOS, 20, PAD, PAD]]
    assert batch.labels.tolist() == [[21, 22, 23, EOS], [20, EOS, -100, -100]]
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert batch.inputs().keys() == {"input_ids", "source_ids", "source_mask"}
    assert batch.num_labels == 6
    assert (made.num_samples, made.max_length, made.num_left_out) == (3, 4, 0)
    assert made.tokens_per_sample == pytest.approx((2 + 4 + 3) / 3)
    assert made.token_range(1) == (7, 14)


def test_chosen_rows_are_padded_to_the_longest_of_them_and_joined_ones_too() -> None:
    whole = batches(*DOCUMENTS).batch(np.array([0, 1, 2]))
    last = whole.rows(slice(2, 3))
    assert last.source_ids.tolist() == [[14, 15, EOS]]
    assert last.input_ids.tolist() == [[BOS, 24, 25]]
    assert last.labels.tolist() == [[24, 25, EOS]]
    again = PairBatch.joined([whole.rows(np.array([row])) for row in range(3)])
    assert batch_hash(again) == batch_hash(whole)
    for name in ("source_mask", "positions", "document_ids"):
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))


def test_the_hash_of_a_batch_covers_both_sides() -> None:
    first, *_ = DOCUMENTS
    hashes = {
        batch_hash(batches(document).batch(np.array([0]))) for document in (first, [9, *first[1:]], [*first[:5], 9, 3])
    }
    assert len(hashes) == 3


def test_a_batch_is_never_cut() -> None:
    batch = batches(*DOCUMENTS).batch(np.array([0, 1]))
    assert batch.cut(4) is batch
    with pytest.raises(ValueError, match="rows of 4 tokens cannot be cut into rows of 2"):
        batch.cut(2)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(4, 9), max_size=6), st.lists(st.integers(4, 9), max_size=6)),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 5),
    st.data(),
)
def test_every_pair_comes_back_whole(found: list[tuple[list[int], list[int]]], block: int, data: st.DataObject) -> None:
    """Blocks of a few tokens cut the split anywhere."""
    split = TokenSplit.from_documents([[*source, EOS, BOS, *target, EOS] for source, target in found])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sheepop.data.batches._BLOCK_TOKENS", block)
        made = PairBatches(split, max_length=7, pad_id=PAD, eos_id=EOS)
    chosen = data.draw(st.lists(st.integers(0, len(found) - 1), min_size=1, max_size=5))
    batch = made.batch(np.array(chosen))
    for row, number in enumerate(chosen):
        source, target = found[number]
        assert batch.source_ids[row][batch.source_mask[row]].tolist() == [*source, EOS]
        supervised = batch.labels[row] != -100
        assert batch.labels[row][supervised].tolist() == [*target, EOS]
        assert batch.input_ids[row][supervised].tolist() == [BOS, *target]
        assert (batch.input_ids[row][~supervised] == PAD).all()
        np.testing.assert_array_equal(batch.document_ids[row] == 1, ~supervised)


def test_pairs_that_are_too_long_are_refused_or_left_out_and_counted() -> None:
    with pytest.raises(DataError) as caught:
        batches(*DOCUMENTS, max_length=3)
    message = str(caught.value)
    assert "2 of 3 pairs are longer than the 3 tokens" in message
    assert "longest source has 4, the longest target 4" in message
    assert "model.max_seq_len (and data.max_length, where it is set) to 4, or leave them out" in message
    made = batches(*DOCUMENTS, max_length=3, leave_out_long=True)
    assert (made.num_samples, made.num_left_out) == (1, 2)
    assert made.batch(np.array([0])).source_ids.tolist() == [[14, 15, EOS]]
    with pytest.raises(IndexError):
        made.batch(np.array([1]))
    with pytest.raises(DataError, match=r"3 of 3 pairs .* to 4\.$"):
        batches(*DOCUMENTS, max_length=2, leave_out_long=True)


@pytest.mark.parametrize("document", [[10, 11, 12], [10, EOS], [10, EOS, BOS]], ids=str)
def test_a_document_that_is_no_pair_is_named(document: list[int]) -> None:
    with pytest.raises(DataError, match="Document 1 of the corpus is not a pair"):
        batches(DOCUMENTS[0], document)


def test_a_step_of_a_mixture_is_padded_across_its_sources() -> None:
    short, long = batches(DOCUMENTS[0]), batches(DOCUMENTS[1], [*range(4, 9), EOS, BOS, 30, EOS])
    sizes = Stages((), 4)
    schedule = BatchSchedule(
        [RowSource(source, SampleOrder(source.num_samples, 0)) for source in (short, long)],
        sizes,
        Stages((), 6),
        seed=0,
        mixture=MixtureSchedule([[(0, 1.0)], [(0, 1.0)]], sizes),
    )
    assert (schedule.max_length, schedule.pieces(0)) == (6, 1)
    batch = schedule.batch(0)
    sources = sorted(batch.source_ids[row][batch.source_mask[row]].tolist() for row in range(4))
    assert sources == sorted([[10, 11, 12, EOS], [10, 11, 12, EOS], [13, EOS], [4, 5, 6, 7, 8, EOS]])


@pytest.fixture
def build_pairs(tmp_path: Path) -> Build:
    def build(records: list[Any] | str, *, name: str = "pairs.jsonl", **settings: Any) -> Corpus:
        (tmp_path / "input").mkdir()
        lines = records if isinstance(records, str) else "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "input" / name).write_text(lines, encoding="utf-8")
        algorithm = settings.pop("algorithm", "char")
        given = DataConfig.model_validate({"paths": [str(tmp_path / "input")], **settings})
        return build_corpus(
            pair_settings(given, given),
            TokenizerConfig(algorithm=algorithm, vocab_size=300),
            tmp_path / "corpus",
            seed=0,
            console=Console.silent(),
        )

    return build


def all_pairs(corpus: Corpus) -> dict[str, list[Pair]]:
    return {name: [Pair.of(document) for document in corpus.documents(name)] for name in ("train", "validation")}


MANY = [{"source": f"count to {number}", "target": " ".join(map(str, range(number)))} for number in range(1, 41)]


@pytest.mark.parametrize("algorithm", ["char", "bpe"])
def test_a_corpus_holds_every_pair_once_with_its_tokens(build_pairs: Build, algorithm: str) -> None:
    # What looks like a special token is text.
    records = [*MANY, {"source": "say <eos>", "target": "<eos><bos>"}, MANY[3]]
    corpus = build_pairs(records, algorithm=algorithm, validation_fraction=0.2)
    assert corpus.holds_pairs
    tokenizer = corpus.tokenizer()
    found = all_pairs(corpus)
    assert len(found["validation"]) > 1
    everything = [pair for split in found.values() for pair in split]
    expected = {(record["source"], record["target"]) for record in records}
    assert set(everything) == expected
    assert len(everything) == len(expected)
    for split, documents in ((corpus.train, found["train"]), (corpus.validation, found["validation"])):
        for number, pair in enumerate(documents):
            source, target = tokenizer.encode(pair.source), tokenizer.encode(pair.target)
            ids = [*source, tokenizer.eos_id, tokenizer.bos_id, *target, tokenizer.eos_id]
            assert split.tokens(*split.offsets[number : number + 2]).tolist() == ids
            assert tokenizer.decode(source) == pair.source
    assert corpus.manifest["documents"]["removed"] == {"exact_duplicates": 1}


def test_equal_text_parted_elsewhere_is_another_pair(build_pairs: Build) -> None:
    records = [{"source": "abc", "target": "de"}, {"source": "ab", "target": "cde"}, {"source": "abc", "target": "de"}]
    corpus = build_pairs(records, validation_fraction=0.0)
    assert set(all_pairs(corpus)["train"]) == {("abc", "de"), ("ab", "cde")}


def test_no_cleaning_stage_touches_pairs_unless_it_is_asked_for(build_pairs: Build) -> None:
    record = {"source": "call 030 901820 or mail jo@example.org  ", "target": "0123456789 0123456789 \u200b"}
    corpus = build_pairs([record, {"source": "a", "target": "b"}], validation_fraction=0.0)
    assert (record["source"], record["target"]) in set(all_pairs(corpus)["train"])


def test_a_stage_that_is_asked_for_changes_each_side_by_itself_and_removes_pairs_with_nothing_left(
    build_pairs: Build,
) -> None:
    records = [{"source": "a\u200bb", "target": "c\u200bd"}, {"source": "still here", "target": "\u200b"}]
    corpus = build_pairs(records, validation_fraction=0.0, clean={"preset": "none", "stages": ["formatting"]})
    assert all_pairs(corpus)["train"] == [("ab", "cd")]
    assert corpus.manifest["documents"]["removed"] == {"formatting": 1}


def test_of_a_few_pairs_the_last_are_held_out_and_none_is_cut(build_pairs: Build) -> None:
    records = [{"source": f"line {n}\nand another", "target": f"answer\nto {n}\n"} for n in range(6)]
    corpus = build_pairs(records, validation_fraction=0.3, clean={"stages": ["exact_duplicates"], "shuffle": False})
    found = all_pairs(corpus)
    in_order = [(record["source"], record["target"]) for record in records]
    assert found == {"train": in_order[:4], "validation": in_order[4:]}


def test_a_single_pair_is_not_split(build_pairs: Build) -> None:
    with pytest.raises(DataError, match="A single pair cannot be split"):
        build_pairs([{"source": "a", "target": "b"}])


HOSTILE = """\
{"source": "good", "target": "fine"}
{"source": "no target"}
{"target": "no source"}
{"source": "a number", "target": 3}
{"source": null, "target": "null"}
{"source": ["a list"], "target": "x"}
{"source": "empty", "target": ""}
{"source": " \\n", "target": "blank source"}
{"source": "twice", "source": "twice", "target": "x"}
["a", "b"]
"source"
{"source": "cut off", "tar
{"source": "half \\ud83d", "target": "x"}

{"source": "more keys", "target": "are no harm", "id": 7}
"""


def test_every_line_that_is_no_pair_is_refused_with_its_reason_and_counted(build_pairs: Build) -> None:
    corpus = build_pairs(HOSTILE, validation_fraction=0.0)
    assert set(all_pairs(corpus)["train"]) == {("good", "fine"), ("more keys", "are no harm")}
    lines = [json.loads(line) for line in (corpus.directory / "quarantine.jsonl").read_text().splitlines()]
    assert {line["place"]: line["reason"] for line in lines} == {
        "line 2": "missing",
        "line 3": "missing",
        "line 4": "invalid",
        "line 5": "invalid",
        "line 6": "invalid",
        "line 7": "empty",
        "line 8": "empty",
        "line 9": "invalid",
        "line 10": "invalid",
        "line 11": "invalid",
        "line 12": "invalid",
        "line 13": "undecodable",
    }
    details = {line["place"]: line["detail"] for line in lines}
    assert details["line 2"] == "there is no column 'target' among 'source'"
    assert details["line 4"] == "its field 'target' is a number, but a pair needs two texts"
    assert details["line 7"] == "its field 'target' is empty"
    assert corpus.manifest["files"]["refused_parts"] == {"empty": 2, "invalid": 7, "missing": 2, "undecodable": 1}


def test_a_pair_over_the_longest_document_is_refused_and_not_cut(build_pairs: Build) -> None:
    records = [{"source": "x" * 600, "target": "y" * 600}, {"source": "x" * 500, "target": "y" * 500}]
    corpus = build_pairs(records, validation_fraction=0.0, extract={"max_document_bytes": 1024})
    assert all_pairs(corpus)["train"] == [("x" * 500, "y" * 500)]
    assert corpus.manifest["files"]["refused_parts"] == {"oversized": 1}


def test_other_files_of_records_and_other_names_of_fields_do_as_well(build_pairs: Build) -> None:
    table = "en,de,note\nthe dog,der Hund,1\nthe cat,die Katze,2\n"
    corpus = build_pairs(table, name="words.csv", validation_fraction=0.0, extract={"pair": ["en", "de"]})
    assert set(all_pairs(corpus)["train"]) == {("the dog", "der Hund"), ("the cat", "die Katze")}


@pytest.mark.parametrize(
    ("content", "name"),
    [("Just a text.\n", "notes.txt"), ('{"text": "a record of text"}\n', "records.jsonl"), ("a,b\n1,2\n", "table.csv")],
)
def test_text_in_place_of_pairs_is_refused_in_words(build_pairs: Build, content: str, name: str) -> None:
    with pytest.raises(DataError) as caught:
        build_pairs(content, name=name)
    assert "give JSON lines, or another file of records, with the fields 'source' and 'target'" in str(caught.value)


def test_pairs_in_place_of_text_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in MANY))
    config = DataConfig(paths=(str(tmp_path / "pairs.jsonl"),))
    with pytest.raises(
        DataError, match=r"pair 40\. Pairs of source and target are for model\.architecture=encoder_decoder"
    ):
        build_corpus(config, TokenizerConfig(algorithm="char"), tmp_path / "corpus", seed=0, console=Console.silent())


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"packing": True}, "packing=true"),
        ({"packing": False, "stride": 4}, "stride"),
        ({"extract": {"column": "text"}}, "extract.column"),
        ({"infilling": {"rate": 0.5}}, "infilling.rate"),
    ],
)
def test_settings_that_pairs_cannot_have_are_refused(settings: dict[str, Any], name: str) -> None:
    given = DataConfig.model_validate(settings)
    with pytest.raises(ConfigError, match=f"data.{name} is for text"):
        pair_settings(given, given)


@given(texts, texts)
def test_the_marks_of_a_pair_part_its_text_where_it_was_joined(source: str, target: str) -> None:
    from sheepop.data.documents import Document
    from sheepop.data.extract.template import RecordFormat

    made = RecordFormat(pair=("a", "b")).document({"a": source, "b": target}, "line 1", 2**20)
    document = Document.of(made.text, "x", 0, kind=made.kind, marks=made.marks).stored().document()
    assert Pair.of(document) == (source, target)
