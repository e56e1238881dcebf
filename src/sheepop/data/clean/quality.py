"""The stage that removes documents too bad to learn from, by rules that know what kind of document they judge."""

from __future__ import annotations

from sheepop.data.clean import gopher
from sheepop.data.clean.garbage import code_quality, prose_quality, table_quality
from sheepop.data.clean.ledger import Ledger
from sheepop.data.clean.line_rules import KeptLines, fineweb_quality, kept_lines
from sheepop.data.clean.quality_config import QualityConfig
from sheepop.data.clean.stage import FilterStage, Removal
from sheepop.data.clean.words import tokens_of
from sheepop.data.documents import Draft


class QualityFilter(FilterStage):
    """Removes garbage; with the preset ``web`` also what the rules for web crawls and public code would remove."""

    name = "quality"

    def __init__(self, ledger: Ledger, config: QualityConfig) -> None:
        super().__init__(ledger)
        self.config = config

    def removal(self, document: Draft) -> Removal | None:
        """Why the document goes, or None when it stays."""
        found = self._by_kind(document)
        if found is None and self.config.preset == "web" and document.kind == "prose":
            return self._as_web_page(document)
        return found

    def _by_kind(self, document: Draft) -> Removal | None:
        kind = document.kind
        if kind == "code":
            return code_quality(document.text, document.source, self.config.code)
        if kind == "table":
            return table_quality(document.text, self.config.table)
        return prose_quality(document.text, self.config.garbage)

    def _as_web_page(self, document: Draft) -> Removal | None:
        """What the rules of C4, FineWeb and Gopher say, those first that need no words, because they are the quickest.

        FineWeb's judge the lines that C4 keeps.
        """
        config, text = self.config, document.text
        kept = kept_lines(text, config.c4)
        if isinstance(kept, Removal):
            return kept
        if found := fineweb_quality(kept.text, config.fineweb) or gopher.repeated_lines(text, config.repetition):
            return found
        tokens = tokens_of(text)
        found = gopher.quality(text, tokens, config.gopher)
        found = found or gopher.repeated_runs(len(text), tokens, config.repetition)
        if found is None and config.c4.drop_lines:
            self._drop_lines(document, kept)
        return found

    def _drop_lines(self, document: Draft, kept: KeptLines) -> None:
        before, marks = document.text, document.marks
        document.text = kept.text
        if marks:
            document.marks = kept.moved(before, marks)
        if document.text != before:
            dropped = len(before.splitlines()) - len(kept.lines)
            self.ledger.changed(self.name, before, document.text, {"lines dropped": dropped})
