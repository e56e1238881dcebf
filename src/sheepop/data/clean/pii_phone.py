"""Finds telephone numbers: international, of the US, Canada, the UK, Germany, France, or after a word like "Tel."."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sheepop.data.clean.pii_numbers import Run
from sheepop.data.clean.stage import Finding

_FEWEST_DIGITS, _MOST_DIGITS = 7, 15
_CONTEXT = 24

# Country codes of ITU-T E.164 by the fewest and the most digits that follow.
_NATIONAL_LENGTHS = {
    "5,7": "247 290 298 299 500 672 676 677 678 681 682 686 687 688 690",
    "6,10": "40 53 63 95 98 252 352 358 359 376 421 508 597 685 880",
    "6,12": "39 43 49 62 381",
    "7,8": "230 238 239 241 246 248 267 269 291 297 372 501 507 592 599 670 673 674 675 679 680 683 691 692 960 "
    "961 975",
    "7,10": "46 48 220 231 243 254 265 353 354 423 595 967",
    "8,8": "45 47 65 216 222 223 226 227 228 232 235 236 253 257 266 268 350 356 357 370 371 373 374 382 386 389 "
    "502 503 504 505 506 509 591 598 689 852 853 965 968 973 974 993",
    "8,10": "20 32 36 51 57 60 64 66 82 213 224 250 258 264 355 377 378 383 385 387 593 850 855 856 886 962 963 "
    "964 970 971 972 976 977",
    "9,9": "27 33 34 41 56 61 93 94 211 212 218 221 233 237 240 242 244 245 249 251 255 256 260 261 262 263 351 "
    "375 380 420 590 594 596 966 992 994 995 996 998",
    "9,10": "31 44 81 84 92",
    "10,10": "7 30 52 58 90 91 225 229 234",
    "10,11": "54 55",
    "8,11": "86",
}
_COUNTRIES = "|".join(
    # Some write the trunk zero without brackets.
    rf"(?:{codes.replace(' ', '|')})(?=0?[0-9]{{{lengths}}}\Z)"
    for lengths, codes in _NATIONAL_LENGTHS.items()
)
_E164 = re.compile(rf"1[2-9][0-9]{{2}}[2-9][0-9]{{6}}|(?:{_COUNTRIES})(?!([0-9])\1*\Z)[0-9]+")
_FEWEST_WITHOUT_JOINTS = 9

_SPACE = " \u00a0\u2009\u202f"
_SIGN = r"[.\-/\u2010\u2011\u2013]|-\(|\)[\-/.(]|[/.]\("
_JOINT = rf"(?:[{_SPACE}]| ?(?:{_SIGN}) ?|[{_SPACE}]{{0,2}}[()][{_SPACE}]{{0,2}}|\) \()"
_GROUPS = re.compile(rf"[0-9]+(?:{_JOINT}[0-9]+)*")
_BEGINS = r"(?<![A-Za-z0-9_+*^])(?<![0-9)\]][.\-/=])"
_INTERNATIONAL = re.compile(
    rf"{_BEGINS}(?:\(\+(?=[0-9]{{1,3}}\))|\+\(?|(?<![.,\-])00)[1-9][0-9]{{0,14}}(?:{_JOINT}[0-9]{{1,14}}){{0,8}}"
)
_GOES_ON = re.compile(r"[A-Za-z0-9_@]|[.,][0-9]")
_ZERO_IN_BRACKETS = re.compile(r"\(0(?![0-9])")
_DIGITS = re.compile(r"[0-9]+")

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
# The last letters of these words, for a quick check.
_LAST_LETTERS = tuple(sorted({word[-1] for word in f"{_WORDS} number numbers no num at on us me numarası".split()}))
_PUNCTUATION = " \t\u00a0\"'=:.#*()[]>+（：-"
_QUOTED = re.compile(r"[\"'`>]\(?\Z|tel:\Z|callto:\Z", re.IGNORECASE)
_QUOTED_OR_COLON = re.compile(_QUOTED.pattern + r"|[:：] ?\(?\Z", re.IGNORECASE)
_YEAR, _DAY = r"(?:19|20)[0-9]{2}", r"[0-9]{1,2}"
_DATE = re.compile(rf"{_YEAR}[-./ ]{_DAY}[-./ ]{_DAY}|{_DAY}[-./ ]{_DAY}[-./ ]{_YEAR}|{_YEAR} ?[-\u2013/] ?{_YEAR}")
_ZIP = re.compile(r"[0-9]{5}-[0-9]{4}")


def find_phones(text: str, runs: list[Run], *, is_code: bool) -> Iterator[Finding]:
    """Yields telephone numbers; in code, one without separators must be quoted or follow a word such as "phone"."""
    for run in runs:
        if run.digits >= _FEWEST_DIGITS:
            found = [*_international(text, run, is_code), *_national(text, run, is_code)]
            yield from found or _announced(text, run, is_code)


def _international(text: str, run: Run, is_code: bool) -> Iterator[Finding]:
    first = max(0, run.start - 2)
    if "+" not in text[first : run.start] and not text.startswith("00", run.start):
        return
    for match in _INTERNATIONAL.finditer(text, first, run.end):
        start = match.start()
        is_proven = _is_quoted(text, start) or _is_announced(text, start)
        # The longest first: a number that follows may not belong to it.
        for end in reversed([group.end() for group in _DIGITS.finditer(text, start, match.end())]):
            # The trunk zero in "+49 (0) 30" is not dialled from abroad.
            digits = _digits(_ZERO_IN_BRACKETS.sub("", text[start:end])).removeprefix("00")
            if not _E164.fullmatch(digits) or _GOES_ON.match(text, end):
                continue
            has_joints = not text[start:end].removeprefix("+").isdigit()
            is_plain = text[start] != "0" and len(digits) >= _FEWEST_WITHOUT_JOINTS and not is_code
            if has_joints or is_plain or is_proven:
                yield Finding(start, end, "phone", "phone", "+" + digits)
                break


def _national(text: str, run: Run, is_code: bool) -> Iterator[Finding]:
    is_bare = run.end - run.start == run.digits
    if is_bare and not (run.digits == 11 and text.startswith("07", run.start)):
        return
    for pattern in (_NORTH_AMERICAN, _TRUNK_ZERO):
        for match in pattern.finditer(text, max(0, run.start - 1), run.end + 2):
            start, digits = match.start(), _digits(match.group())
            if pattern is _TRUNK_ZERO:
                is_counting = "01234567890123".startswith(digits) and not match.group(1)
                if not 9 <= len(digits) <= 12 or is_counting or len(set(digits)) < 3 or _ZIP.fullmatch(match.group()):
                    continue
                if is_code and not _is_quoted(text, start) and not _is_announced(text, start):
                    continue
            yield Finding(start, match.end(), "phone", "phone", digits)


def _announced(text: str, run: Run, is_code: bool) -> Iterator[Finding]:
    """Yields a run of digits that follows a word such as "Tel."."""
    start = run.start - 1 if text[run.start - 1 : run.start] == "(" else run.start
    literal, following = text[run.start : run.end], text[run.end : run.end + 1]
    if run.digits > _MOST_DIGITS or run.dots == 3 or following.isalnum() or following == "_":
        return
    # In code, "phone = 5551234567" is an integer, but "phone: 5551234567" a telephone number.
    if is_code and literal.isdigit() and not _QUOTED_OR_COLON.search(text[max(0, start - 8) : start]):
        return
    if _is_announced(text, start) and _GROUPS.fullmatch(literal) and not _DATE.match(literal):
        yield Finding(start if ")" in literal else run.start, run.end, "phone", "phone", _digits(literal))


def _is_announced(text: str, start: int) -> bool:
    """Whether a word such as "Tel." comes before, with only punctuation between."""
    before = text[max(0, start - _CONTEXT) : start].rstrip(_PUNCTUATION).lower()
    return before.endswith(_LAST_LETTERS) and _ANNOUNCES.search(before) is not None


def _is_quoted(text: str, start: int) -> bool:
    return _QUOTED.search(text[max(0, start - 8) : start]) is not None


def _digits(text: str) -> str:
    return "".join(_DIGITS.findall(text))
