"""Replaces personal data: addresses, telephone numbers, cards, bank accounts, national identity numbers."""

from __future__ import annotations

from sheepop.data.clean.config import PiiConfig
from sheepop.data.clean.pii_hosts import find_addresses, find_emails
from sheepop.data.clean.pii_numbers import find_cards, find_ibans, find_national_ids, find_runs
from sheepop.data.clean.pii_phone import find_phones
from sheepop.data.clean.stage import Finding, Replacement
from sheepop.data.documents import Draft


class PiiReplacement(Replacement):
    """Replaces every personal value of the configured kinds.

    It uses patterns with checks, not a model: names, postal addresses and disguised values ("john at example dot com")
    stay. The account counts the replacements by name.
    """

    name = "pii"
    config: PiiConfig

    def findings(self, text: str, document: Draft) -> list[Finding]:
        """The personal values in a segment of the document."""
        return find_personal(text, self.config, is_code=document.kind == "code")


def find_personal(text: str, config: PiiConfig, *, is_code: bool) -> list[Finding]:
    """The personal values in `text`, in order and without overlaps."""
    found: list[Finding] = []
    kinds = config.kinds
    if "email" in kinds and "@" in text:
        found += find_emails(text, is_code=is_code)
    runs = find_runs(text) if set(kinds) - {"email"} else []
    if "iban" in kinds:
        found += find_ibans(text, runs)
    if "ip" in kinds:
        found += find_addresses(text, runs, every=config.addresses == "all")
    if "card" in kinds:
        found += find_cards(text, runs, is_code=is_code)
    if "national_id" in kinds:
        found += find_national_ids(text, runs, is_code=is_code)
    if "phone" in kinds:
        found += find_phones(text, runs, is_code=is_code)
    # Of two overlapping values, the kind that was searched first wins: its check is stricter.
    chosen: list[tuple[int, Finding]] = []
    for rank, finding in sorted(enumerate(found), key=lambda entry: (entry[1].start, entry[0])):
        if not chosen or finding.start >= chosen[-1][1].end:
            chosen.append((rank, finding))
        elif rank < chosen[-1][0]:
            chosen[-1] = (rank, finding)
    return [finding for _, finding in chosen]
