"""Payment cards and bank accounts in text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from stdnum import iban, luhn

from sheepop.data.clean.pii_scan import Candidates
from sheepop.data.clean.placeholders import Finding

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
_SHORTEST_IBAN, _LONGEST_PRINTED_IBAN = 15, 48


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
            if _is_card(digits) and not (is_code and is_bare and not _is_announced(text, match)):
                yield Finding(match.start(), match.end(), "card", "card", digits)


def _is_announced(text: str, match: re.Match[str]) -> bool:
    quote = text[match.start() - 1 : match.start()]
    if quote in ("'", '"') and text.startswith(quote, match.end()):
        return True
    return _CARD_WORDS.search(text, max(0, match.start() - _CONTEXT), match.start()) is not None


def _is_card(digits: str) -> bool:
    """A known issuer's prefix with the length that issuer uses, and a check digit (ISO/IEC 7812-1)."""
    return len(digits) in _card_lengths(digits) and luhn.is_valid(digits) and len(set(digits)) > 1


def _card_lengths(digits: str) -> Sequence[int]:
    two, three, four = int(digits[:2]), int(digits[:3]), int(digits[:4])
    if digits[0] == "4":
        return (13, 16, 19)
    if 51 <= two <= 55 or 2221 <= four <= 2720:
        return (16,)
    if two in (34, 37):
        return (15,)
    if two in (36, 38, 39) or 300 <= three <= 305:
        return range(14, 20)
    if two == 35 or two == 62 or two == 65 or four == 6011 or 644 <= three <= 649:
        return range(16, 20)
    if two in (50, 56, 57, 58, 63, 67) or three in (604, 636):
        return range(13, 20)
    return ()


def find_ibans(text: str, candidates: Candidates) -> Iterator[Finding]:
    """International bank account numbers (ISO 13616) with valid check digits, printed in groups or not."""
    for digits in candidates.lettered:
        match = _IBAN.match(text, digits - 2, digits - 2 + _LONGEST_PRINTED_IBAN)
        for end in _ends(text, match) if match else ():
            value = "".join(char for char in text[digits - 2 : end] if char.isalnum())
            if len(value) >= _SHORTEST_IBAN and iban.is_valid(value):
                yield Finding(digits - 2, end, "iban", "iban", value)
                break


def _ends(text: str, match: re.Match[str]) -> Iterator[int]:
    """Where what was matched can end, the longest first: a word that follows may not belong to it."""
    for end in range(match.end(), match.start(), -1):
        following = text[end : end + 1]
        if text[end - 1].isalnum() and not following.isalnum() and following != "_":
            yield end
