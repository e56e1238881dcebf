from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from sheepop.core.errors import UsageError
from sheepop.data import Corpus
from sheepop.data.corpus import trace_tokens

Tree = Callable[..., Path]
Build = Callable[..., Corpus]


def test_every_token_is_traced_to_the_document_that_holds_it(tree: Tree, build: Build) -> None:
    files = {f"{n:02}.txt": f"This is text {n}.\n" * (1 + n % 3) for n in range(40)}
    corpus = build(tree(files), clean={"preset": "none"}, validation_fraction=0.2)
    tokens = corpus.train
    origins = list(trace_tokens(corpus, "train", 0, tokens.num_tokens))
    assert [origin.document for origin in origins] == list(range(tokens.num_documents))
    assert origins[0].start == 0 and origins[-1].stop == tokens.num_tokens
    assert all(a.stop == b.start for a, b in pairwise(origins))
    eos = corpus.tokenizer().decode([corpus.tokenizer().eos_id])
    for origin in origins:
        assert origin.text == files[origin.file] + eos
        assert (origin.pages, origin.place, origin.kind) == ((), "", "prose")


def test_a_range_inside_documents_gives_their_parts(tree: Tree, build: Build) -> None:
    corpus = build(tree({f"{n:02}.txt": f"text {n:02}\n" for n in range(30)}), validation_fraction=0)
    # Characters are tokens: eight of text and the end of each document.
    first, second = trace_tokens(corpus, "train", 5, 9 + 4)
    assert (first.file, first.text.startswith("00\n"), first.start, first.stop) == ("00.txt", True, 5, 9)
    assert (second.file, second.text, second.start, second.stop) == ("01.txt", "text", 9, 13)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 3), (0, 10**9)])
def test_a_range_outside_of_the_split_is_refused(tree: Tree, build: Build, start: int, stop: int) -> None:
    corpus = build(tree({"a.txt": "one\ntwo\n"}))
    with pytest.raises(UsageError, match="Give a range A:B"):
        list(trace_tokens(corpus, "train", start, stop))


def test_a_slide_is_named(tree: Tree, build: Build, tmp_path: Path) -> None:
    pptx = pytest.importorskip("pptx")
    presentation = pptx.Presentation()
    for words in ("Sheep graze in the meadow", "Wool keeps people warm"):
        slide = presentation.slides.add_slide(presentation.slide_layouts[5])
        slide.shapes.title.text = words
    root = tree({"a.txt": "plain\n"})
    presentation.save(str(root / "talk.pptx"))
    corpus = build(root, validation_fraction=0)
    text = next(d.text for d in corpus.documents("train") if d.source == "talk.pptx")
    begin = 7 + text.index("Wool")  # after the six characters of the first document and its end
    (origin,) = trace_tokens(corpus, "train", begin, begin + 4)
    assert (origin.file, origin.pages, origin.text) == ("talk.pptx", ("slide 2",), "Wool")
