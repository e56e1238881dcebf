"""National identification numbers: how each is written, what announces it, and when the format alone is proof.

Check digits, dates and ranges that were never issued are judged by python-stdnum
(https://arthurdejong.org/python-stdnum/).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from importlib import import_module
from typing import Any

from sheepop.data.clean.pii_scan import Candidates, Finding, Run

_CONTEXT_BEFORE, _CONTEXT_AFTER = 48, 16


class Proof(IntEnum):
    """What is needed beside the check: nothing, prose instead of code, or a word near that names the number."""

    FORMAT = 0
    PROSE = 1
    CONTEXT = 2


# For each number the module of stdnum that checks it, and the words that announce it.
_IDS = {
    "us_ssn": ("us.ssn", r"ssns?(?![a-z])|social security|soc\.? sec"),
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
    "in_aadhaar": ("in_.aadhaar", r"aadha?ar|uidai|आधार"),
    "in_pan": ("in_.pan", r"pan(?![a-z])|permanent account"),
    "se_personnummer": ("se.personnummer", r"person(?:al identity )?(?:nummer|nr|number)"),
    "fi_hetu": ("fi.hetu", r"hetu(?![a-z])|henkilötunnus"),
    "dk_cpr": ("dk.cpr", r"cpr(?![a-z])|personnummer"),
    "no_fodselsnummer": ("no.fodselsnummer", r"f(?:ø|o|oe)dselsn|personnummer|national identity"),
    "be_rrn": ("be.nn", r"rijksregister|registre national|national register|niss|insz"),
    "ch_ahv": ("ch.ssn", r"(?:ahv|avs|oasi)(?![a-z])"),
    "at_svnr": ("at.vnr", r"svnr|sv-?n|sozialversicherung"),
    "pt_nif": ("pt.nif", r"nif(?![a-z])|contribuinte"),
    "ca_sin": ("ca.sin", r"(?-i:SIN|NAS)(?![a-z])|social insurance"),
    "au_tfn": ("au.tfn", r"tfn(?![a-z])|tax file"),
    "kr_rrn": ("kr.rrn", r"rrn(?![a-z])|resident registration|주민등록"),
    "cn_resident_id": ("cn.ric", r"身份证|resident id"),
    "mx_curp": ("mx.curp", r"curp"),
    "za_id": ("za.idnr", r"south african|id (?:no|number)|identity"),
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
    # A number of one digit throughout passes some checks, and is nobody's.
    return len(set(value.translate(_SEPARATORS))) > 1 and (module is None or bool(_checker(module).is_valid(value)))


@cache
def _checker(module: str) -> Any:
    return import_module(f"stdnum.{module}")
