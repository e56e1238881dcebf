"""Payment cards and bank accounts in text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sheepop.data.clean.pii_scan import Candidates, Finding
from sheepop.data.clean.pii_validators import IBAN_LENGTHS, is_card, is_iban

_FEWEST_CARD_DIGITS = 13
_NOT_INSIDE = r"(?<![A-Za-z0-9_+])(?<![0-9][.,/-])"
_NOT_GOING_ON = r"(?![A-Za-z0-9_])(?![.,/-][0-9])"
_CARD = re.compile(
    _NOT_INSIDE
    # Groups of four, the last of one to four; four, six and five or four (Amex, Diners); no groups.
    + r"(?:[0-9]{4}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{1,4}(?:\1[0-9]{1,3})?|"
    + r"[0-9]{4}([ -])[0-9]{6}\2[0-9]{4,5}|[0-9]{13,19})"
    + _NOT_GOING_ON
)
_CARD_WORDS = re.compile(
    r"card|visa|amex|american express|master|maestro|diners|discover|pan(?![a-z])|karte|carte|tarjeta", re.I
)
_CONTEXT = 40
_SEPARATORS = str.maketrans("", "", " -")
_IBAN = re.compile(r"(?<![A-Za-z0-9_])[A-Z]{2}[0-9]{2}(?:[ \u00a0-]?[A-Z0-9]){8,30}")
_LONGEST_PRINTED_IBAN = 48


def find_cards(text: str, candidates: Candidates, *, is_code: bool) -> Iterator[Finding]:
    """Card numbers with a known prefix and a valid check digit.

    In code, where long integers are common, digits without separators must stand in quotes or near a word that
    names a card.
    """
    for run in candidates.runs:
        if run.digits < _FEWEST_CARD_DIGITS:
            continue
        for match in _CARD.finditer(text, run.start, run.end + 2):
            digits = match.group().translate(_SEPARATORS)
            is_bare = len(digits) == match.end() - match.start()
            if is_card(digits) and not (is_code and is_bare and not _is_announced(text, match)):
                yield Finding(match.start(), match.end(), "card", "card", digits)


def _is_announced(text: str, match: re.Match[str]) -> bool:
    quote = text[match.start() - 1 : match.start()]
    if quote in ("'", '"') and text.startswith(quote, match.end()):
        return True
    return _CARD_WORDS.search(text, max(0, match.start() - _CONTEXT), match.start()) is not None


def find_ibans(text: str, candidates: Candidates) -> Iterator[Finding]:
    """International bank account numbers of the right length with valid check digits, printed in groups or not."""
    for digits in candidates.lettered:
        start = digits - 2
        if text[start:digits] not in IBAN_LENGTHS:
            continue
        match = _IBAN.match(text, start, start + _LONGEST_PRINTED_IBAN)
        end = match and _end_of_iban(text, start, match.end())
        if end:
            value = _compact(text[start:end])
            if is_iban(value):
                yield Finding(start, end, "iban", "iban", value)


def _end_of_iban(text: str, start: int, limit: int) -> int | None:
    """Where the characters that the country's account numbers have come to an end, if the text has a break there."""
    left = IBAN_LENGTHS[text[start : start + 2]]
    for position in range(start, limit):
        left -= text[position].isalnum()
        if left == 0:
            following = text[position + 1 : position + 2]
            return None if following.isalnum() or following == "_" else position + 1
    return None


def _compact(text: str) -> str:
    return "".join(char for char in text if char.isalnum())
