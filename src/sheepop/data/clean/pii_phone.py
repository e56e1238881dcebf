"""Telephone numbers in text: international ones, and national ones as they are written in the United States and
Canada, the United Kingdom, Germany and France; in other forms where a word such as "Tel." stands before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sheepop.data.clean.pii_scan import Candidates, Run
from sheepop.data.clean.placeholders import Finding

_FEWEST_DIGITS, _MOST_DIGITS = 7, 15
_CONTEXT = 24

# Country codes of ITU-T E.164 by the least and the greatest number of digits that follow.
_NATIONAL_LENGTHS = {
    code: lengths
    for lengths, codes in {
        (5, 7): "247 290 298 299 500 672 676 677 678 681 682 686 687 688 690",
        (6, 10): "40 53 63 95 98 252 352 358 359 376 421 508 597 685 880",
        (6, 12): "39 43 49 62 381",
        (7, 8): "230 238 239 241 246 248 267 269 291 297 372 501 507 592 599 670 673 674 675 679 680 683 691 692 960 "
        "961 975",
        (7, 10): "46 48 220 231 243 254 265 353 354 423 595 967",
        (8, 8): "45 47 65 216 222 223 226 227 228 232 235 236 253 257 266 268 350 356 357 370 371 373 374 382 386 389 "
        "502 503 504 505 506 509 591 598 689 852 853 965 968 973 974 993",
        (8, 10): "20 32 36 51 57 60 64 66 82 213 224 250 258 264 355 377 378 383 385 387 593 850 855 856 886 962 963 "
        "964 970 971 972 976 977",
        (9, 9): "27 33 34 41 56 61 93 94 211 212 218 221 233 237 240 242 244 245 249 251 255 256 260 261 262 263 351 "
        "375 380 420 590 594 596 966 992 994 995 996 998",
        (9, 10): "31 44 81 84 92",
        (10, 10): "1 7 30 52 58 90 91 225 229 234",
        (10, 11): "54 55",
        (8, 11): "86",
    }.items()
    for code in codes.split()
}
_FEWEST_WITHOUT_JOINTS = 9

_SPACE = " \u00a0\u2009\u202f"
_JOINTS = frozenset(
    f"{before}{sign}{after}"
    for sign in (*_SPACE, *".-/\u2010\u2011\u2013()", "-(", ")-", ")/", ").", "/(", ".(", ")(")
    for before in ("", " ")
    for after in ("", " ")
    if len(before + sign + after) <= 3 and not (sign in _SPACE and before + after)
) | {") (", " (0)", "(0)", " (0) "}
_JOINT = rf"[{_SPACE}.\-/\u2010\u2011\u2013()]{{1,3}}"
_BEGINS = r"(?<![A-Za-z0-9_+*^])(?<![0-9)\]][.\-/=])"
_INTERNATIONAL = re.compile(
    rf"{_BEGINS}(?:\(\+(?=[0-9]{{1,3}}\))|\+\(?|(?<![.,\-])00)"
    rf"[1-9][0-9]{{0,14}}\)?(?:{_JOINT}[0-9]{{1,14}}){{0,8}}"
)
_GOES_ON = re.compile(r"[A-Za-z0-9_@]|[.,][0-9]")
_PARTS = re.compile(r"[0-9]+|[^0-9]+")

_S = rf"[{_SPACE}]"
_ALONE_BEFORE = rf"(?<![A-Za-z0-9_+])(?<![0-9][{_SPACE}.\-/,:])(?<![./\-])"
_ALONE_AFTER = rf"(?![A-Za-z0-9_])(?![{_SPACE}.\-/,:]?[0-9])"
_NORTH_AMERICAN = re.compile(
    r"(?<![A-Za-z0-9_+.\-/])(?:1[-. ])?"
    rf"(?:\([2-9][0-9]{{2}}\){_S}?[2-9][0-9]{{2}}[-.{_SPACE}]|[2-9][0-9]{{2}}([-.])[2-9][0-9]{{2}}\1)[0-9]{{4}}"
    r"(?![A-Za-z0-9_])(?![.\-/][0-9])"
)
_BRITISH = (
    rf"\(?02[0-9]\)?{_S}[0-9]{{4}}{_S}?[0-9]{{4}}|\(?0(?:1[0-9]{{2}}|[38][0-9]{{2}})\)?{_S}[0-9]{{3}}{_S}?[0-9]{{4}}|"
    rf"\(?01[0-9]{{3}}\)?{_S}(?:[0-9]{{5,6}}|[0-9]{{3}}{_S}[0-9]{{3}})|"
    rf"07[0-9]{{3}}{_S}?(?:[0-9]{{6}}|[0-9]{{3}}{_S}[0-9]{{3}})|07[0-9]{{2}}{_S}[0-9]{{4}}{_S}[0-9]{{4}}"
)
_GERMAN = (
    rf"(?:\(0[1-9][0-9]{{1,4}}\){_S}?|0[1-9][0-9]{{1,4}}(?:{_S}?/{_S}?|[-{_SPACE}\u2013]))"
    rf"(?:[0-9]{{4,9}}|[0-9]{{2,3}}(?:{_S}[0-9]{{2,3}}){{1,3}})(?:-[0-9]{{1,4}})?"
)
_FRENCH = rf"0[1-9]([.\-{_SPACE}])[0-9]{{2}}(?:\1[0-9]{{2}}){{3}}"
_TRUNK_ZERO = re.compile(f"{_ALONE_BEFORE}(?:{_FRENCH}|{_BRITISH}|{_GERMAN}){_ALONE_AFTER}")

_WORDS = (
    "phone telefon telefono telefone telefoon telefax tel tlf fax mobile mobil movil móvil cell cellular portable "
    "handy whatsapp hotline sms call dial rufnummer téléphone tél teléfono telefonu тел телефон 電話 电话 手机 전화"
)
_ANNOUNCES = re.compile(
    rf"(?<![A-Za-z])(?:(?:tele)?(?:{_WORDS.replace(' ', '|')})|"
    r"(?:call|reach) (?:me|us)(?: at| on)?|(?:call|dial) (?:at|on))"
    r"(?:[ _-]?(?:number|nummer|numarası|no|nr|num)s?)?\Z",
    re.IGNORECASE,
)
# How those end, which is quickly asked.
_LAST_LETTERS = tuple(sorted({word[-1] for word in f"{_WORDS} number numbers no num at on us me numarası".split()}))
_PUNCTUATION = " \t\u00a0\"'=:.#*()[]>+（：-"
_QUOTED = re.compile(r"[\"'`>]\(?\Z|tel:\Z|callto:\Z", re.IGNORECASE)
_COLON = re.compile(r"[:：] ?\(?\Z")
_YEAR, _DAY = r"(?:19|20)[0-9]{2}", r"[0-9]{1,2}"
_DATE = re.compile(rf"{_YEAR}[-./ ]{_DAY}[-./ ]{_DAY}|{_DAY}[-./ ]{_DAY}[-./ ]{_YEAR}|{_YEAR} ?[-\u2013/] ?{_YEAR}")
_ZIP = re.compile(r"[0-9]{5}-[0-9]{4}")


def find_phones(text: str, candidates: Candidates, *, is_code: bool) -> Iterator[Finding]:
    """Telephone numbers. In code, one without separators must stand in quotes or after a word that announces it."""
    for run in candidates.runs:
        if run.digits < _FEWEST_DIGITS:
            continue
        found = False
        before, is_bare = text[max(0, run.start - 2) : run.start], run.end - run.start == run.digits
        if "+" in before or text.startswith("00", run.start):
            for finding in _international(text, run, is_code):
                found = True
                yield finding
        if not is_bare or (run.digits == 11 and text.startswith("07", run.start)):
            for finding in _national(text, run, is_code):
                found = True
                yield finding
        if not found:
            yield from _announced(text, run, is_code)


def _international(text: str, run: Run, is_code: bool) -> Iterator[Finding]:
    for match in _INTERNATIONAL.finditer(text, max(0, run.start - 2), run.end):
        is_proven = _is_quoted(text, match.start()) or _is_announced(text, match.start())
        has_plus = match.group().startswith("+")
        for end, digits in _international_ends(match):
            if _GOES_ON.match(text, end):
                continue
            has_joints = not text[match.start() : end].removeprefix("+").isdigit()
            is_plain = has_joints or (has_plus and len(digits) >= _FEWEST_WITHOUT_JOINTS and not is_code)
            if is_plain or is_proven:
                yield Finding(match.start(), end, "phone", "phone", "+" + digits)
                break


def _international_ends(match: re.Match[str]) -> Iterator[tuple[int, str]]:
    """Where the number can end, the longest first, with its digits: a figure that follows may not belong to it."""
    parts = _PARTS.findall(match.group())
    ends: list[tuple[int, str]] = []
    position, digits = match.start(), ""
    for index, part in enumerate(parts):
        position += len(part)
        if part.isdigit():
            # The trunk zero in "+49 (0) 30" is not dialled from abroad.
            is_trunk_zero = part == "0" and parts[index - 1].endswith("(")
            digits += "" if is_trunk_zero else part
            ends.append((position, digits))
        elif index > 0 and part not in _JOINTS and part.strip(_SPACE) not in ("(", ")"):
            break
    for end, number in reversed(ends):
        plain = number[2:] if match.group().startswith("00") else number
        if _is_international(plain):
            yield end, plain


def _is_international(digits: str) -> bool:
    if digits[0] == "1":
        return len(digits) == 11 and digits[1] in "23456789" and digits[4] in "23456789"
    for length in (1, 2, 3):
        lengths = _NATIONAL_LENGTHS.get(digits[:length])
        if lengths:
            fewest, most = lengths
            national = digits[length:]
            # Some write the trunk zero without brackets.
            possible = {len(national), len(national.removeprefix("0"))}
            return any(fewest <= count <= most for count in possible) and len(set(national)) > 1
    return False


def _national(text: str, run: Run, is_code: bool) -> Iterator[Finding]:
    start = max(0, run.start - 1)
    for match in _NORTH_AMERICAN.finditer(text, start, run.end + 2):
        yield _finding(match)
    for match in _TRUNK_ZERO.finditer(text, start, run.end + 2):
        digits = _digits(match.group())
        is_counting = digits in "01234567890123" and not match.group(1)
        if not 9 <= len(digits) <= 12 or is_counting or len(set(digits)) < 3 or _ZIP.fullmatch(match.group()):
            continue
        if is_code and not _is_quoted(text, match.start()) and not _is_announced(text, match.start()):
            continue
        yield _finding(match)


def _announced(text: str, run: Run, is_code: bool) -> Iterator[Finding]:
    """A run of digits after a word such as "Tel."."""
    start = run.start - 1 if text[run.start - 1 : run.start] == "(" else run.start
    if run.digits > _MOST_DIGITS or run.dots == 3 or not _is_announced(text, start):
        return
    literal = text[run.start : run.end]
    following = text[run.end : run.end + 1]
    if following.isalnum() or following == "_":
        return
    # In code, "phone = 5551234567" is a number, but "phone: 5551234567" a value.
    if (
        is_code
        and literal.isdigit()
        and not _is_quoted(text, start)
        and not _COLON.search(text[max(0, start - 3) : start])
    ):
        return
    joints_fit = all(part.isdigit() or part in _JOINTS for part in _PARTS.findall(literal))
    if joints_fit and not _DATE.match(literal):
        yield Finding(start if ")" in literal else run.start, run.end, "phone", "phone", _digits(literal))


def _is_announced(text: str, start: int) -> bool:
    """Whether a word such as "Tel." stands before, with nothing but punctuation between."""
    before = text[max(0, start - _CONTEXT) : start].rstrip(_PUNCTUATION).lower()
    return before.endswith(_LAST_LETTERS) and _ANNOUNCES.search(before) is not None


def _is_quoted(text: str, start: int) -> bool:
    return _QUOTED.search(text[max(0, start - 8) : start]) is not None


def _finding(match: re.Match[str]) -> Finding:
    return Finding(match.start(), match.end(), "phone", "phone", _digits(match.group()))


def _digits(text: str) -> str:
    return "".join(char for char in text if "0" <= char <= "9")
