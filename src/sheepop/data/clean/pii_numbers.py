"""Finds numbers that identify a person: national identity numbers, payment cards, bank accounts.

Most text has few digits, so the patterns run only near runs of digits. python-stdnum
(https://arthurdejong.org/python-stdnum/) checks check digits, dates and ranges that were never issued.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from stdnum import get_cc_module, iban, luhn
from stdnum.no import fodselsnummer

from sheepop.data.clean.stage import Finding

# Maps digits to 0, capitals to A, and separators inside numbers to a space (a dot stays). Non-ASCII characters, here
# question marks, are separators too, as the narrow space of French typography. A literal 0 is fastest to find.
_SHAPES = bytes.maketrans(b"123456789-/()?BCDEFGHIJKLMNOPQRSTUVWXYZbcdef", b"0" * 9 + b" " * 5 + b"A" * 25 + b"a" * 5)
_RUN = re.compile(
    rb"0(?<!0.)(?<!0\..)(?:"
    # Six digits or more that are not a decimal fraction.
    rb"(?!0*\.0++(?![ .]{1,3}0))(?:[ .]{0,3}0){5,}+|"
    # Fewer are part of an address, or follow two capital letters.
    rb"0?(?:\.00?){3}|(?<=AA0)0|[0Aa]{3}:)"
)
_DOT = re.compile(rb"0\.(?=0)")
_GOES_ON = re.compile(r" ?[A-Z]|[a-f]{0,3}:")


class Run(NamedTuple):
    """A run of digits: its span, its digits, the dots between them, and whether it follows two capital letters."""

    start: int
    end: int
    digits: int
    dots: int
    is_lettered: bool


def find_runs(text: str) -> list[Run]:
    """The runs of digits in `text` around which the patterns for numbers must search."""
    runs = []
    shapes = text.encode("ascii", "replace").translate(_SHAPES)
    for match in _RUN.finditer(shapes):
        (start, end), shape = match.span(), match.group()
        digits, dots = shape.count(b"0"), len(_DOT.findall(shape)) if b"." in shape else 0
        is_lettered = shapes[max(0, start - 2) : start + 2] == b"AA00"
        goes_on = digits == 6 and _GOES_ON.match(text, end)
        if digits >= 7 or dots >= 3 or is_lettered or goes_on or shape.endswith(b":"):
            runs.append(Run(start, end, digits, dots, is_lettered))
    return runs


_CONTEXT_BEFORE, _CONTEXT_AFTER = 48, 16
_LEAP_YEAR = 2000
_SEPARATORS = str.maketrans("", "", " .-+")


def _whole(*spellings: str) -> re.Pattern[str]:
    """Compiles a pattern for any of the spellings, if not part of a longer number or word; # stands for a digit."""
    either = "|".join(f"({spelling.replace('#', '[0-9]')})" for spelling in spellings)
    return re.compile(rf"(?<![A-Za-z0-9_+])(?<![0-9][.,/-])(?:{either})(?![A-Za-z0-9_])(?![.,/-][0-9])")


def _is_date(day: str, month: str) -> bool:
    """Whether the date exists; a Swedish coordination number adds 60 to the day."""
    return 1 <= int(month) <= 12 and 1 <= int(day) % 60 <= monthrange(_LEAP_YEAR, int(month))[1]


def _is_nric(value: str) -> bool:
    """Whether `value` is a valid Singapore identity number: a weighted sum modulo 11 gives the last letter."""
    total = sum(int(digit) * weight for digit, weight in zip(value[1:8], (2, 7, 6, 5, 4, 3, 2), strict=True))
    letters = "JZIHGFEDCBA" if value[0] in "ST" else "XWUTRQPNMLK"
    return letters[(total + 4 * (value[0] in "TG")) % 11] == value[8]


# Numbers that stdnum lacks; those for which it is too strict, as it refuses numbers used as examples; and those for
# which it checks that the date of birth is in the past: a corpus must not depend on the day of the build.
_CHECKS: dict[str, Callable[[str], object]] = {
    "us_ssn": re.compile(r"(?!000|666|9)[0-9]{3}(?!00)[0-9]{2}(?!0000)[0-9]{4}").fullmatch,
    "uk_nino": bool,
    "ca_sin": lambda value: len(set(value)) > 2 and luhn.is_valid(value),
    "sg_nric": _is_nric,
    "se_personnummer": lambda value: _is_date(value[-6:-4], value[-8:-6]) and luhn.is_valid(value[-10:]),
    "dk_cpr": lambda value: _is_date(value[:2], value[2:4]),
    "no_fodselsnummer": lambda value: (
        value[9:] == fodselsnummer.calc_check_digit1(value) + fodselsnummer.calc_check_digit2(value)
    ),
    "be_rrn": lambda value: int(value[9:]) in (97 - int(century + value[:9]) % 97 for century in ("", "2")),
}

# For each number its module in stdnum (None if the check is in `_CHECKS`), and words that announce it.
_IDS = {
    "us_ssn": (None, r"ssns?(?![a-z])|social security|soc\.? sec"),
    "us_itin": ("us.itin", r"itin(?![a-z])|taxpayer"),
    "uk_nino": (None, r"national insurance|nino(?![a-z])|ni (?:no|number)"),
    "uk_nhs": ("gb.nhs", r"nhs(?![a-z])"),
    "de_steuer_id": ("de.idnr", r"steuer-?(?:id|nr|nummer)|steuerliche id|idnr|tax id|tin(?![a-z])"),
    "fr_nir": ("fr.nir", r"nir(?![a-z])|s[ée]curit[ée] sociale|num[ée]ro de s[ée]cu|insee"),
    "es_dni": ("es.dni", r"dni(?![a-z])|nif(?![a-z])|documento|identidad"),
    "es_nie": ("es.nie", r"nie(?![a-z])|nif(?![a-z])|extranjero|identidad"),
    "it_codice_fiscale": ("it.codicefiscale", r"codice fiscale|c\.?f\."),
    "nl_bsn": ("nl.bsn", r"bsn(?![a-z])|burgerservice|sofi-?n"),
    "pl_pesel": ("pl.pesel", r"pesel"),
    "br_cpf": ("br.cpf", r"cpf(?![a-z])"),
    "in_aadhaar": ("in.aadhaar", r"aadha?ar|uidai|आधार"),
    "in_pan": ("in.pan", r"pan(?![a-z])|permanent account"),
    "se_personnummer": (None, r"person(?:al identity )?(?:nummer|nr|number)"),
    "fi_hetu": ("fi.hetu", r"hetu(?![a-z])|henkilötunnus"),
    "dk_cpr": (None, r"cpr(?![a-z])|personnummer"),
    "no_fodselsnummer": (None, r"f(?:ø|o|oe)dselsn|personnummer|national identity"),
    "be_rrn": (None, r"rijksregister|registre national|national register|niss|insz"),
    "ch_ahv": ("ch.ssn", r"(?:ahv|avs|oasi)(?![a-z])"),
    "at_svnr": ("at.vnr", r"svnr|sv-?n|sozialversicherung"),
    "pt_nif": ("pt.nif", r"nif(?![a-z])|contribuinte"),
    "ca_sin": (None, r"(?-i:SIN|NAS)(?![a-z])|social insurance"),
    "au_tfn": ("au.tfn", r"tfn(?![a-z])|tax file"),
    "kr_rrn": ("kr.rrn", r"rrn(?![a-z])|resident registration|주민등록"),
    "cn_resident_id": ("cn.ric", r"身份证|resident id"),
    "mx_curp": ("mx.curp", r"curp"),
    "za_id": ("za.idnr", r"south african|id (?:no|number)|identity"),
    "sg_nric": (None, r"nric|fin(?![a-z])"),
    "tr_kimlik": ("tr.tckimlik", r"kimlik|t\.?c\.?(?![a-z])|tckn"),
}
_WORDS = {name: re.compile(rf"(?<![a-z])(?:{words})", re.IGNORECASE) for name, (_, words) in _IDS.items()}

# Prefixes that were never issued.
_NINO = r"(?!BG|GB|NK|KN|TN|NT|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z]"
# Each spelling with the numbers that it may be; the first that is valid counts. A nearby word must announce those with
# a question mark, and in code also those with a tilde.
_SPELLINGS = (
    (r"#{3}-#{2}-#{4}", "us_ssn us_itin"),
    (r"#{3} #{2} #{4}", "us_ssn? us_itin?"),
    (r"#{3}[ -]#{3}[ -]#{4}", "uk_nhs?"),
    (r"#{3}[ -]#{3}[ -]#{3}", "ca_sin? au_tfn? pt_nif? nl_bsn?"),
    (r"#{2} #{3} #{3} #{3}", "de_steuer_id?"),
    (r"#{3}\.#{3}\.#{3}-#{2}", "br_cpf"),
    (r"756\.#{4}\.#{4}\.#{2}", "ch_ahv"),
    (r"#{2}\.#{2}\.#{2}-#{3}\.#{2}", "be_rrn"),
    (r"[1-8] #{2} #{2} (?:#{2}|2[AB]) #{3} #{3} #{2}", "fr_nir"),
    (r"#{4}[ -]#{4}[ -]#{4}", "in_aadhaar?"),
    (r"#{6}[-+]#{4}", "fi_hetu se_personnummer~ dk_cpr?"),
    (r"#{4}[01]#{3}[-+]#{4}", "se_personnummer~"),
    (r"#{2}[01]#{3}-#{7}", "kr_rrn~"),
    (r"#{6} #{5}", "no_fodselsnummer?"),
    (r"#{4} #{6}", "at_svnr?"),
    (r"#{6}[-+A-FU-Y]#{3}[0-9A-Y]", "fi_hetu"),
    (r"#{17}X", "cn_resident_id"),
    (r"#{8}-?[A-Z]", "es_dni~"),
    (r"[XYZ]-?#{7}-?[A-Z]", "es_nie~"),
    (r"[STFG]#{7}[A-Z]", "sg_nric~"),
    (_NINO + r" #{2} #{2} #{2} [A-D]", "uk_nino"),
    (_NINO + r"#{6}[A-D]", "uk_nino~"),
    (r"[A-Z]{6}#{2}[ABCDEHLMPRST]#{2}[A-Z]#{3}[A-Z]", "it_codice_fiscale"),
    (r"[A-Z]{4}#{6}[HMX][A-Z]{5}[0-9A-Z]#", "mx_curp"),
    (r"[A-Z]{5}#{4}[A-Z]", "in_pan?"),
)
# Without separators.
_BARE = {
    9: "us_ssn? us_itin? nl_bsn? pt_nif? ca_sin? au_tfn?",
    10: "uk_nhs? at_svnr? se_personnummer? dk_cpr?",
    11: "de_steuer_id? pl_pesel? no_fodselsnummer? tr_kimlik? br_cpf? be_rrn?",
    12: "in_aadhaar? se_personnummer?",
    13: "za_id? ch_ahv? kr_rrn?",
    15: "fr_nir?",
    18: "cn_resident_id?",
}
_SPELLED = _whole(*(spelling for spelling, _ in _SPELLINGS))
_LETTER_BEFORE, _LETTER_AFTER = re.compile(r"[A-Z]|[0-9A-Za-z]-"), re.compile(r"[ -]?[A-Z]|[-+]")
_ENDS_WORD, _TOUCHES = re.compile(r"[A-Za-z_+]"), re.compile(r"[A-Za-z_]|[.,/-][0-9]")
# The most characters of a number before and after its run of digits.
_REACH_BEFORE, _REACH_AFTER = 7, 20


def find_national_ids(text: str, runs: list[Run], *, is_code: bool) -> Iterator[Finding]:
    """Yields the national identity numbers at the runs; in code, more kinds need a word that announces them."""
    for run in runs:
        for start, end, names in _written(text, run):
            for name in names.split():
                needs_word = name.endswith("?") or (is_code and name.endswith("~"))
                name = name.rstrip("?~")
                if (not needs_word or _is_announced(text, start, end, name)) and _is_valid(name, text[start:end]):
                    yield Finding(start, end, "national_id", name, text[start:end].translate(_SEPARATORS))
                    break


def _written(text: str, run: Run) -> Iterator[tuple[int, int, str]]:
    """Yields the spans around a run that are spelled like a number, and the kinds that they may be."""
    is_bare = run.end - run.start == run.digits
    if is_bare and run.digits in _BARE:
        is_part = _TOUCHES.match(text, run.end) or _ENDS_WORD.match(text[run.start - 1 : run.start])
        if not is_part:
            yield run.start, run.end, _BARE[run.digits]
    has_letters_before = bool(_LETTER_BEFORE.search(text[max(0, run.start - 2) : run.start]))
    has_letters_after = bool(_LETTER_AFTER.match(text, run.end))
    if run.is_lettered or (run.digits >= 6 and (not is_bare or has_letters_before or has_letters_after)):
        start = max(0, run.start - has_letters_before * _REACH_BEFORE)
        end = max(run.end + has_letters_after * _REACH_AFTER, run.start + run.is_lettered * _REACH_AFTER)
        for match in _SPELLED.finditer(text, start, end + 2):
            # The search did not see what follows a later end; a number that continues there has its own run.
            if match.end() <= end or match.end() == len(text):
                yield match.start(), match.end(), _SPELLINGS[(match.lastindex or 1) - 1][1]


def _is_announced(text: str, start: int, end: int, name: str) -> bool:
    before = text[max(0, start - _CONTEXT_BEFORE) : start]
    return bool(_WORDS[name].search(before) or _WORDS[name].search(text, end, end + _CONTEXT_AFTER))


def _is_valid(name: str, value: str) -> bool:
    compact = value.translate(_SEPARATORS)
    if name in _CHECKS:
        return bool(_CHECKS[name](compact))
    # Some checks accept a number of one repeated digit, which belongs to nobody.
    return len(set(compact)) > 1 and bool(_checker(name).is_valid(value))


@cache
def _checker(name: str) -> Any:
    country, _, number = str(_IDS[name][0]).partition(".")
    return get_cc_module(country, number)


_FEWEST_CARD_DIGITS = 13
_CARD = _whole(
    # Groups of four, the last of one to four; four, six and five or four (Amex, Diners); no groups.
    r"#{4}(?P<four>[ -])#{4}(?P=four)#{4}(?P=four)#{1,4}(?:(?P=four)#{1,3})?",
    r"#{4}(?P<six>[ -])#{6}(?P=six)#{4,5}",
    r"#{13,19}",
)
# A known issuer's prefix with the lengths that this issuer uses (ISO/IEC 7812-1).
_ISSUED = re.compile(
    r"4(?:[0-9]{12}|[0-9]{15}|[0-9]{18})\Z"
    r"|(?=[0-9]{16}\Z)(?:5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720)"
    r"|(?=[0-9]{15}\Z)3[47]"
    r"|(?=[0-9]{14,19}\Z)(?:3[689]|30[0-5])"
    r"|(?=[0-9]{16,19}\Z)(?:35|62|65|6011|64[4-9])"
    r"|(?=[0-9]{13,19}\Z)(?:5[0678]|6[37]|604)"
)
_CARD_WORDS = re.compile(
    r"card|visa|amex|american express|master|maestro|diners|discover|pan(?![a-z])|karte|carte|tarjeta", re.I
)
_CARD_CONTEXT = 40


def find_cards(text: str, runs: list[Run], *, is_code: bool) -> Iterator[Finding]:
    """Yields cards with a known prefix and a valid check digit; in code, bare digits must be quoted or announced."""
    for run in runs:
        if run.digits < _FEWEST_CARD_DIGITS:
            continue
        for match in _CARD.finditer(text, run.start, run.end + 2):
            start, end = match.span()
            digits = match.group().translate(_SEPARATORS)
            if is_code and len(digits) == end - start:
                quote = text[start - 1 : start]
                is_quoted = quote in ("'", '"') and text.startswith(quote, end)
                if not is_quoted and not _CARD_WORDS.search(text, max(0, start - _CARD_CONTEXT), start):
                    continue
            if _ISSUED.match(digits) and luhn.is_valid(digits) and len(set(digits)) > 1:
                yield Finding(start, end, "card", "card", digits)


_IBAN = re.compile(r"(?<![A-Za-z0-9_])[A-Z]{2}[0-9]{2}(?:[ \u00a0-]?[A-Z0-9]){8,30}")
_SHORTEST_IBAN, _LONGEST_PRINTED_IBAN = 15, 48


def find_ibans(text: str, runs: list[Run]) -> Iterator[Finding]:
    """Yields international bank account numbers (ISO 13616) with valid check digits, in groups or not."""
    for start in (run.start - 2 for run in runs if run.is_lettered):
        match = _IBAN.match(text, start, start + _LONGEST_PRINTED_IBAN)
        # Tries the longest first, because a following word may not belong to it.
        for end in range(match.end() if match else start, start, -1):
            following = text[end : end + 1]
            if text[end - 1].isalnum() and not following.isalnum() and following != "_":
                value = "".join(char for char in text[start:end] if char.isalnum())
                if len(value) >= _SHORTEST_IBAN and iban.is_valid(value):
                    yield Finding(start, end, "iban", "iban", value)
                    break
