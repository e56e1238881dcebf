"""Terms are explained alike on the pages and in the documentation, and a report's labels carry their meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from sheepop.report import Page
from sheepop.report.glossary import GLOSSARY, meaning

DOCUMENT = Path(__file__).parents[2] / "docs" / "glossary.md"


def test_the_documentation_explains_every_term_in_the_same_words() -> None:
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    assert rows == [f"| {term} | {GLOSSARY[term]} |" for term in sorted(GLOSSARY)]


@pytest.mark.parametrize(
    ("label", "term"),
    [("Perplexity", "Perplexity"), ("Bits per byte of held-out text", "Bits per byte"), ("Layers", None)],
)
def test_a_label_means_what_the_term_it_begins_with_means(label: str, term: str | None) -> None:
    assert meaning(label) == (None if term is None else GLOSSARY[term])


def test_labels_of_facts_and_titles_of_charts_explain_themselves() -> None:
    page = Page("A page")
    page.add_facts({"Perplexity": 4.5, "Layers": 2})
    html = page.to_html()
    assert f'<dt title="{GLOSSARY["Perplexity"]}">Perplexity</dt>' in html
    assert "<dt>Layers</dt>" in html
