"""National identification numbers: how each is written, what announces it, and when the format alone is proof.

Check digits, dates and ranges that were never issued are judged by python-stdnum
(https://arthurdejong.org/python-stdnum/).
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from functools import cache
from typing import Any

from stdnum import get_cc_module, luhn
from stdnum.no import fodselsnummer

from sheepop.data.clean.pii_scan import Candidates, Run
from sheepop.data.clean.placeholders import Finding

_CONTEXT_BEFORE, _CONTEXT_AFTER = 48, 16
_LEAP_YEAR = 2000


class Proof(IntEnum):
    """What is needed beside the check: nothing, prose instead of code, or a word near that names the number."""

    FORMAT = 0
    PROSE = 1
    CONTEXT = 2


# For each number the module of stdnum that checks it, unless the check is in _CHECKS, and the words that announce it.
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
_NINO = r"(?!BG|GB|NK|KN|TN|NT|ZZ)"
_P, _F, _C = Proof.PROSE, Proof.FORMAT, Proof.CONTEXT
# How a number is written, with # for a digit, and whose it can be. Where several fit, the first one counts.
_SPELLINGS: tuple[tuple[str, tuple[tuple[str, Proof], ...]], ...] = (
    (r"#{3}-#{2}-#{4}", (("us_ssn", _F), ("us_itin", _F))),
    (r"#{3} #{2} #{4}", (("us_ssn", _C), ("us_itin", _C))),
    (r"#{3}[ -]#{3}[ -]#{4}", (("uk_nhs", _C),)),
    (r"#{3}[ -]#{3}[ -]#{3}", (("ca_sin", _C), ("au_tfn", _C), ("pt_nif", _C), ("nl_bsn", _C))),
    (r"#{2} #{3} #{3} #{3}", (("de_steuer_id", _C),)),
    (r"#{3}\.#{3}\.#{3}-#{2}", (("br_cpf", _F),)),
    (r"756\.#{4}\.#{4}\.#{2}", (("ch_ahv", _F),)),
    (r"#{2}\.#{2}\.#{2}-#{3}\.#{2}", (("be_rrn", _F),)),
    (r"[1-8] #{2} #{2} (?:#{2}|2[AB]) #{3} #{3} #{2}", (("fr_nir", _F),)),
    (r"#{4}[ -]#{4}[ -]#{4}", (("in_aadhaar", _C),)),
    (r"#{6}[-+]#{4}", (("fi_hetu", _F), ("se_personnummer", _P), ("dk_cpr", _C))),
    (r"#{4}[01]#{3}[-+]#{4}", (("se_personnummer", _P),)),
    (r"#{2}[01]#{3}-#{7}", (("kr_rrn", _P),)),
    (r"#{6} #{5}", (("no_fodselsnummer", _C),)),
    (r"#{4} #{6}", (("at_svnr", _C),)),
    (r"#{6}[-+A-FU-Y]#{3}[0-9A-Y]", (("fi_hetu", _F),)),
    (r"#{17}X", (("cn_resident_id", _F),)),
    (r"#{8}-?[A-Z]", (("es_dni", _P),)),
    (r"[XYZ]-?#{7}-?[A-Z]", (("es_nie", _P),)),
    (r"[STFG]#{7}[A-Z]", (("sg_nric", _P),)),
    (_NINO + r"[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] #{2} #{2} #{2} [A-D]", (("uk_nino", _F),)),
    (_NINO + r"[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z]#{6}[A-D]", (("uk_nino", _P),)),
    (r"[A-Z]{6}#{2}[ABCDEHLMPRST]#{2}[A-Z]#{3}[A-Z]", (("it_codice_fiscale", _F),)),
    (r"[A-Z]{4}#{6}[HMX][A-Z]{5}[0-9A-Z]#", (("mx_curp", _F),)),
    (r"[A-Z]{5}#{4}[A-Z]", (("in_pan", _C),)),
)
# Without separators; a word must announce these.
_BARE = {
    9: ("us_ssn", "us_itin", "nl_bsn", "pt_nif", "ca_sin", "au_tfn"),
    10: ("uk_nhs", "at_svnr", "se_personnummer", "dk_cpr"),
    11: ("de_steuer_id", "pl_pesel", "no_fodselsnummer", "tr_kimlik", "br_cpf", "be_rrn"),
    12: ("in_aadhaar", "se_personnummer"),
    13: ("za_id", "ch_ahv", "kr_rrn"),
    15: ("fr_nir",),
    18: ("cn_resident_id",),
}
_CANDIDATES = tuple(candidates for _, candidates in _SPELLINGS)
_ALL = re.compile(
    r"(?<![A-Za-z0-9_+])(?<![0-9][.,/-])(?:"
    + "|".join(f"({spelling.replace('#', '[0-9]')})" for spelling, _ in _SPELLINGS)
    + r")(?![A-Za-z0-9_])(?![.,/-][0-9])",
)
_SEPARATORS = str.maketrans("", "", " .-+")
# The furthest that a number reaches to either side of the digits that led to it.
_REACH_BEFORE, _REACH_AFTER = 7, 20
_WORD_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_+")
_TOUCHES = re.compile(r"[A-Za-z_]|[.,/-][0-9]")
_LETTER_BEFORE, _LETTER_AFTER = re.compile(r"[A-Z]|[0-9A-Za-z]-"), re.compile(r"[ -]?[A-Z]|[-+]")


def find_national_ids(text: str, candidates: Candidates, *, is_code: bool) -> Iterator[Finding]:
    """The national identification numbers at the candidates; in code, a checksum alone is less often proof."""
    for run in candidates.runs:
        has_letters_before = bool(_LETTER_BEFORE.search(text[max(0, run.start - 2) : run.start]))
        has_letters_after = bool(_LETTER_AFTER.match(text, run.end))
        is_bare = run.end - run.start == run.digits
        if is_bare:
            yield from _bare(text, run)
        if run.digits >= 6 and not (is_bare and not has_letters_before and not has_letters_after):
            before, after = has_letters_before * _REACH_BEFORE, has_letters_after * _REACH_AFTER
            yield from _find_between(text, run.start - before, run.end + after + 2, is_code)
    for start in candidates.lettered:
        yield from _find_between(text, start - _REACH_BEFORE, start + _REACH_AFTER + 2, is_code)


def _bare(text: str, run: Run) -> Iterator[Finding]:
    """A run of digits that nothing divides, and that a word announces."""
    names = _BARE.get(run.digits, ())
    if not names or _TOUCHES.match(text, run.end) or text[run.start - 1 : run.start] in _WORD_CHARACTERS:
        return
    value = text[run.start : run.end]
    for name in names:
        if _is_announced(text, run.start, run.end, name) and _is_valid(name, value):
            yield Finding(run.start, run.end, "national_id", name, value)
            return


def _find_between(text: str, start: int, end: int, is_code: bool) -> Iterator[Finding]:
    for match in _ALL.finditer(text, max(0, start), end):
        if end - 2 < match.end() < len(text):
            continue  # what follows was not seen; a number that goes on there has a candidate of its own
        value = match.group()
        for name, proof in _CANDIDATES[(match.lastindex or 1) - 1]:
            needs_word = proof == Proof.CONTEXT or (proof == Proof.PROSE and is_code)
            if needs_word and not _is_announced(text, match.start(), match.end(), name):
                continue
            if _is_valid(name, value):
                compact = value.translate(_SEPARATORS)
                yield Finding(match.start(), match.end(), "national_id", name, compact)
                break


def _is_announced(text: str, start: int, end: int, name: str) -> bool:
    before = text[max(0, start - _CONTEXT_BEFORE) : start]
    return bool(_WORDS[name].search(before) or _WORDS[name].search(text, end, end + _CONTEXT_AFTER))


def _is_valid(name: str, value: str) -> bool:
    module, _ = _IDS[name]
    compact = value.translate(_SEPARATORS)
    if module is None:
        return _CHECKS[name](compact)
    # A number of one digit throughout passes some checks, and is nobody's.
    return len(set(compact)) > 1 and bool(_checker(module).is_valid(value))


def _is_date(day: str, month: str) -> bool:
    """Whether the day exists; that of a Swedish coordination number is 60 higher."""
    return 1 <= int(month) <= 12 and 1 <= int(day) % 60 <= monthrange(_LEAP_YEAR, int(month))[1]


def _is_nric(value: str) -> bool:
    """Singapore's identity card number: a weighted sum modulo 11 gives the letter at its end, by series."""
    total = sum(int(digit) * weight for digit, weight in zip(value[1:8], (2, 7, 6, 5, 4, 3, 2), strict=True))
    letters = "JZIHGFEDCBA" if value[0] in "ST" else "XWUTRQPNMLK"
    return letters[(total + 4 * (value[0] in "TG")) % 11] == value[8]


# Those that stdnum does not have or is stricter about, refusing numbers that stand in texts as examples; and those of
# which it asks whether the person is born yet: a corpus must not depend on the day on which it is built.
_CHECKS: Mapping[str, Callable[[str], bool]] = {
    "us_ssn": lambda value: (
        value[:3] not in ("000", "666") and value[0] != "9" and value[3:5] != "00" and value[5:] != "0000"
    ),
    "uk_nino": lambda value: True,
    "ca_sin": lambda value: len(set(value)) > 2 and luhn.is_valid(value),
    "sg_nric": _is_nric,
    "se_personnummer": lambda value: _is_date(value[-6:-4], value[-8:-6]) and luhn.is_valid(value[-10:]),
    "dk_cpr": lambda value: _is_date(value[:2], value[2:4]),
    "no_fodselsnummer": lambda value: (
        value[9:] == fodselsnummer.calc_check_digit1(value) + fodselsnummer.calc_check_digit2(value)
    ),
    "be_rrn": lambda value: int(value[9:]) in (97 - int(century + value[:9]) % 97 for century in ("", "2")),
}


@cache
def _checker(module: str) -> Any:
    country, _, number = module.partition(".")
    return get_cc_module(country, number)
