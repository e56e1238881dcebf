"""The stage that removes documents too bad to learn from, by rules that know what kind of document they judge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sheepop.data.clean import gopher
from sheepop.data.clean.config import QualityConfig
from sheepop.data.clean.garbage import code_quality, prose_quality, table_quality
from sheepop.data.clean.line_rules import KeptLines, fineweb_quality, kept_lines
from sheepop.data.clean.stage import FilterStage, Removal
from sheepop.data.clean.words import Tokens, tokens_of_all
from sheepop.data.documents import Draft

# Cutting many short texts into words at once takes a tenth of the time of cutting them one by one.
_READ_AHEAD_DOCUMENTS = 256
_READ_AHEAD_CHARACTERS = 2**18


class QualityFilter(FilterStage):
    """Removes garbage; with the preset ``web`` also what the rules for web crawls and public code would remove."""

    name = "quality"
    config: QualityConfig

    def run(self, documents: Iterable[Draft]) -> Iterator[Draft]:
        """The documents that stay, in order; a few are read ahead, because judging many at once is faster."""
        for batch in _batches(documents):
            for document, removal in zip(batch, self.removals(batch), strict=True):
                if removal is None:
                    yield document
                else:
                    self.ledger.removed(self.name, document, removal.reason, removal.detail)

    def removal(self, document: Draft) -> Removal | None:
        """Why the document goes, or None when it stays."""
        return self.removals([document])[0]

    def removals(self, documents: list[Draft]) -> list[Removal | None]:
        """For each document why it goes, or None."""
        found = [self._by_kind(document) for document in documents]
        if self.config.preset == "web":
            self._judge_as_web_pages(documents, found)
        return found

    def _by_kind(self, document: Draft) -> Removal | None:
        kind = document.kind
        if kind == "code":
            return code_quality(document.text, document.source, self.config.code)
        if kind == "table":
            return table_quality(document.text, self.config.table)
        return prose_quality(document.text, self.config.garbage)

    def _judge_as_web_pages(self, documents: list[Draft], found: list[Removal | None]) -> None:
        """Adds to `found` what the rules of Gopher, C4 and FineWeb remove of the prose that is left."""
        left = [n for n, document in enumerate(documents) if found[n] is None and document.kind == "prose"]
        tokens = dict(zip(left, tokens_of_all([documents[n].text for n in left]), strict=True))
        kept: dict[int, KeptLines] = {}
        for n in left:
            lines = self._judge_lines(documents[n].text, tokens[n])
            if isinstance(lines, Removal):
                found[n] = lines
            else:
                kept[n] = lines
        texts = [documents[n].text for n in kept]
        repeated = gopher.repeated_runs(texts, [tokens[n] for n in kept], self.config.repetition)
        for n, removal in zip(kept, repeated, strict=True):
            found[n] = removal
            if removal is None and self.config.c4.drop_lines:
                self._drop_lines(documents[n], kept[n])

    def _judge_lines(self, text: str, tokens: Tokens) -> Removal | KeptLines:
        """Why the text goes, or the lines of it that C4 keeps, by which FineWeb's rules judge it."""
        config = self.config
        if found := gopher.quality(text, tokens, config.gopher) or gopher.repeated_lines(text, config.repetition):
            return found
        kept = kept_lines(text, config.c4)
        if isinstance(kept, Removal):
            return kept
        return fineweb_quality(kept.text, config.fineweb) or kept

    def _drop_lines(self, document: Draft, kept: KeptLines) -> None:
        before, marks = document.text, document.marks
        document.text = kept.text
        if marks:
            document.marks = kept.moved(before, marks)
        if document.text != before:
            dropped = len(before.splitlines()) - len(kept.lines)
            self.ledger.changed(self.name, before, document.text, {"lines dropped": dropped})


def _batches(documents: Iterable[Draft]) -> Iterator[list[Draft]]:
    batch: list[Draft] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if len(batch) >= _READ_AHEAD_DOCUMENTS or size >= _READ_AHEAD_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
