"""E-mail addresses in text, told apart from the other uses of the at sign."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sheepop.data.clean.pii_scan import Finding

_LONGEST_LOCAL, _LONGEST_HOST = 64, 253
# Alphabets whose words are set apart by spaces; of others the beginning of an address could not be told.
_LETTERS = r"A-Za-z\u00c0-\u024f\u0370-\u03ff\u0400-\u052f"
_LOCAL_BACKWARDS = re.compile(rf"[{_LETTERS}0-9._%+'-]+")
_LOCAL_BEGINS = re.compile(rf"[{_LETTERS}0-9]")
_LABEL = rf"[{_LETTERS}0-9](?:[{_LETTERS}0-9-]{{0,61}}[{_LETTERS}0-9])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL}){{1,8}}")
_TOP_LEVEL = re.compile(rf"(?:[{_LETTERS}]{{2,24}}|xn--[a-z0-9-]{{2,59}})\Z")
_NEVER_BEFORE_AT = frozenset(' \n\t\r.,;:!?()[]{}<>"@/\\')
_USER_OF_URL = re.compile(r"://[^\s/@]*\Z")
_REMOTE_PATH = re.compile(r":(?:[~/]|[\w.-]+/)")
_IN_CODE_GOES_ON = re.compile(r"[\w(\[=]|\.\w")

# Nobody reads what is sent there; or it is the account that version control logs in with.
_IMPERSONAL = re.compile(r"(?:no|do-?not|dont)[-_.]?reply|git|hg|svn|bzr|cvs|anonymous|anoncvs", re.IGNORECASE)
_EXAMPLE_HOST = re.compile(r"(?:.*\.)?(?:example\.(?:com|org|net|edu)|noreply\..*|localhost\..*)", re.IGNORECASE)
# RFC 2606, RFC 6761, RFC 8375 and custom: names that no public name server knows.
_PRIVATE = "test example invalid localhost local localdomain internal intranet lan corp home arpa"
_FILES = (
    "png jpg jpeg gif svg webp bmp ico css scss less js mjs cjs jsx ts tsx json xml html htm txt pdf py pyc rb java "
    "class jar exe dll zip gz tar tgz whl rst md cfg ini toml yaml yml lock log conf service socket target timer "
    "mount slice scope device path swap"
)
_COUNTRIES = (
    "ac ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bm bn bo br bs bt bw by bz ca cc "
    "cd cf cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg er es et eu fi fj fk fm fo fr ga "
    "gd ge gf gg gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im in io iq ir is it je jm jo jp "
    "ke kg kh ki km kn kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md me mg mh mk ml mm mn mo mp mq mr ms "
    "mt mu mv mw mx my mz na nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pm pn pr ps pt pw py qa re ro "
    "rs ru rw sa sb sc sd se sg sh si sk sl sm sn so sr ss st su sv sx sy sz tc td tf tg th tj tk tl tm tn to tr tt "
    "tv tw tz ua ug uk us uy uz va vc ve vg vi vn vu wf ws ye yt za zm zw рф укр бел срб"
)
_GENERIC = (
    "com org net edu gov mil int info biz name pro aero coop museum jobs mobi travel tel cat asia post xyz online "
    "site tech store shop app dev cloud blog email agency digital media studio design art life live world today news "
    "space website company group global international academy university school foundation institute consulting "
    "solutions services systems software technology network engineering science health care clinic law legal finance "
    "bank capital money ventures partners associates team work works top club vip one me io london berlin paris "
    "amsterdam wien hamburg koeln bayern ruhr nyc tokyo moscow google"
)
_TOP_LEVELS = frozenset(f"{_COUNTRIES} {_GENERIC}".split())
_PRIVATE_DOMAINS, _FILE_SUFFIXES = frozenset(_PRIVATE.split()), frozenset(_FILES.split())


def find_emails(text: str, *, is_code: bool) -> Iterator[Finding]:
    """E-mail addresses, save those of examples, of version control and of robots that nobody can answer.

    In code, where ``a@b.dot(c)`` is a product of matrices, the top-level domain must be a common one.
    """
    at = text.find("@", 1)
    while at >= 0:
        # The commonest other uses, decorators and signs set apart by spaces, end here.
        if text[at - 1] not in _NEVER_BEFORE_AT:
            finding = _address_at(text, at, is_code)
            if finding:
                yield finding
        at = text.find("@", at + 1)


def _address_at(text: str, at: int, is_code: bool) -> Finding | None:
    lowest = max(0, at - _LONGEST_LOCAL - 1)
    backwards = _LOCAL_BACKWARDS.match(text[lowest:at][::-1])
    if not backwards or backwards.end() > _LONGEST_LOCAL:
        return None
    start = at - backwards.end()
    begins = _LOCAL_BEGINS.search(text, start, at)
    host = _host_at(text, at + 1, is_code)
    if not begins or not host:
        return None
    start, end = begins.start(), at + 1 + len(host)
    if _IMPERSONAL.fullmatch(text, start, at) or _USER_OF_URL.search(text, max(0, start - _LONGEST_LOCAL), start):
        return None
    if text[end : end + 1] == "@" or _REMOTE_PATH.match(text, end):
        return None
    return Finding(start, end, "email", "email", text[start:end].lower())


def _host_at(text: str, start: int, is_code: bool) -> str | None:
    """The host name at `start` when mail could reach it."""
    match = _HOST.match(text, start, start + _LONGEST_HOST)
    if not match or _LOCAL_BEGINS.match(text, match.end()):
        return None  # a label of more than 63 characters is none
    host = match.group()
    labels = host.split(".")
    known = next((count for count in range(len(labels), 1, -1) if _is_common(labels[count - 1])), 0)
    if is_code or known:
        # "write to a@b.org.Thanks" lacks a space; in code, a.b@c.de.f is no address at all.
        if not known or (is_code and (known < len(labels) or _IN_CODE_GOES_ON.match(text, match.end()))):
            return None
        host = ".".join(labels[:known])
    last = host.rpartition(".")[2]
    if not _TOP_LEVEL.match(last) or last.lower() in _PRIVATE_DOMAINS or _EXAMPLE_HOST.fullmatch(host):
        return None
    is_file_name = last.lower() in _FILE_SUFFIXES and (last.lower() not in _TOP_LEVELS or host.count(".") == 1)
    return None if is_file_name else host


def _is_common(label: str) -> bool:
    return (label.islower() or label.isupper()) and (label.lower() in _TOP_LEVELS or label.startswith("xn--"))
