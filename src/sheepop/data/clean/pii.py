"""Replaces personal data, and finds e-mail addresses and IP addresses of internet hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network

from sheepop.data.clean.config import PiiConfig
from sheepop.data.clean.pii_numbers import Run, find_cards, find_ibans, find_national_ids, find_runs
from sheepop.data.clean.pii_phone import find_phones
from sheepop.data.clean.stage import Finding, Replacement
from sheepop.data.documents import Draft

_LONGEST_LOCAL, _LONGEST_HOST = 64, 253
# Alphabets whose words are separated by spaces; in others the start of an address is unclear.
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

# Mailboxes that nobody reads, and the login accounts of version control.
_IMPERSONAL = re.compile(r"(?:no|do-?not|dont)[-_.]?reply|git|hg|svn|bzr|cvs|anonymous|anoncvs", re.IGNORECASE)
_EXAMPLE_HOST = re.compile(r"(?:.*\.)?(?:example\.(?:com|org|net|edu)|noreply\..*|localhost\..*)", re.IGNORECASE)
# RFC 2606, RFC 6761, RFC 8375 and convention: names that no public name server knows.
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
    """Yields e-mail addresses, except those in examples, of version control and of no-reply robots.

    In code, where ``a@b.dot(c)`` is a matrix product, the top-level domain must be a common one.
    """
    at = text.find("@", 1)
    while at >= 0:
        # This rules out the most common other uses: decorators, and signs between spaces.
        if text[at - 1] not in _NEVER_BEFORE_AT:
            finding = _address_at(text, at, is_code)
            if finding:
                yield finding
        at = text.find("@", at + 1)


def _address_at(text: str, at: int, is_code: bool) -> Finding | None:
    """The address around the at sign at `at`, or None if mail could not reach its host."""
    backwards = _LOCAL_BACKWARDS.match(text[max(0, at - _LONGEST_LOCAL - 1) : at][::-1])
    if not backwards or backwards.end() > _LONGEST_LOCAL:
        return None
    begins = _LOCAL_BEGINS.search(text, at - backwards.end(), at)
    match = _HOST.match(text, at + 1, at + 1 + _LONGEST_HOST)
    # A label has at most 63 characters.
    if not begins or not match or _LOCAL_BEGINS.match(text, match.end()):
        return None
    host = match.group()
    labels = host.split(".")
    known = next((count for count in range(len(labels), 1, -1) if _is_common(labels[count - 1])), 0)
    if is_code or known:
        # In "write to a@b.org.Thanks" only a space is missing; in code, a.b@c.de.f is not an address.
        if not known or (is_code and (known < len(labels) or _IN_CODE_GOES_ON.match(text, match.end()))):
            return None
        host = ".".join(labels[:known])
    last = host.rpartition(".")[2]
    if not _TOP_LEVEL.match(last) or last.lower() in _PRIVATE_DOMAINS or _EXAMPLE_HOST.fullmatch(host):
        return None
    is_file_name = last.lower() in _FILE_SUFFIXES and (last.lower() not in _TOP_LEVELS or host.count(".") == 1)
    start, end = begins.start(), at + 1 + len(host)
    is_user = _IMPERSONAL.fullmatch(text, start, at) or _USER_OF_URL.search(text, max(0, start - _LONGEST_LOCAL), start)
    if is_file_name or is_user or text[end : end + 1] == "@" or _REMOTE_PATH.match(text, end):
        return None
    return Finding(start, end, "email", "email", text[start:end].lower())


def _is_common(label: str) -> bool:
    return (label.islower() or label.isupper()) and (label.lower() in _TOP_LEVELS or label.startswith("xn--"))


_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = re.compile(
    rf"(?<![A-Za-z0-9_.\-+])({_OCTET}(?:\.{_OCTET}){{3}})(?::[0-9]{{2,5}})?(?![A-Za-z0-9_+]|[.-][A-Za-z0-9])"
)
_IPV6 = re.compile(r"[0-9A-Fa-f:]{2,39}(?:(?<=:)[0-9.]{7,15})?")
_ANY_IPV6 = re.compile(r"(?<![A-Za-z0-9_:.])(?:[0-9A-Fa-f]{1,4}:|::)[0-9A-Fa-f:]{1,38}(?![A-Za-z0-9_:])")
# Global unicast addresses begin with 2 or 3 (RFC 4291).
_PUBLIC_IPV6 = re.compile(r"[23](?<![A-Za-z0-9_].)[0-9A-Fa-f]{3}:")
_INDEX = re.compile(r"[A-Za-z0-9_\])]\[\Z")
_VERSION_WORDS = re.compile(
    r"(?:version|versions|release|released|ver\.?|v\.?|firmware|build|revision|specification|spec|section|sec\.|§|chapter|appendix|clause|"
    r"table|figure|fig\.|rfc[0-9 ]*|oid|==|>=|<=|~=|!=)[\"':\s=(]*$",
    re.IGNORECASE,
)
_DECIMAL_BEFORE = re.compile(r"(?:\A|[^0-9.])[0-9]*\.[0-9]+[ -]\Z")
_CONTEXT = 24
_SMALL_OCTET = 64
_FEWEST_IPV6_GROUPS = 3
# ITU-T X.660: iso.member-body, iso.identified-organization, joint-iso-itu-t.ds and .country.
_IDENTIFIERS = frozenset((bytes((1, 2)), bytes((1, 3)), bytes((2, 5)), bytes((2, 16))))

# RFC 6890 with its updates, RFC 5737 and RFC 3849: ranges without hosts on the internet.
_RESERVED = (
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 "
    "192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3"
)
_RESERVED_V4 = tuple(IPv4Network(network) for network in _RESERVED.split())
_RESERVED_V6 = tuple(IPv6Network(network) for network in ("2001:db8::/32", "3fff::/20", "2001:10::/28", "2001:2::/48"))


def find_addresses(text: str, runs: list[Run], *, every: bool) -> Iterator[Finding]:
    """Yields IP addresses of internet hosts; with `every`, also private, loopback, and other reserved ones."""
    for run in runs:
        if run.dots >= 3:
            for match in _IPV4.finditer(text, run.start, run.end + 7):
                if _is_host(text, match, every):
                    yield Finding(match.start(1), match.end(1), "ip", "ipv4", match.group(1))
        if not every and text.find(":", run.end - 1, run.end + 4) >= 0:
            for match in _PUBLIC_IPV6.finditer(text, max(run.start, run.end - 5), run.end + 4):
                yield from _ipv6_at(text, match.start(), every)
    for match in _ANY_IPV6.finditer(text) if every else ():
        yield from _ipv6_at(text, match.start(), every)


def _is_host(text: str, match: re.Match[str], every: bool) -> bool:
    if match.end() == match.endpos < len(text):
        return False
    address = IPv4Address(match.group(1))
    before = text[max(0, match.start() - _CONTEXT) : match.start()]
    if _VERSION_WORDS.search(before):
        return False
    if every:
        return True
    octets = address.packed
    # Addresses that end in 0 are networks; four small numbers, or two zeros, are more likely a version or a section;
    # object identifiers begin as in _IDENTIFIERS; and in the paths of vector graphics decimals touch.
    looks_like_version = len(set(octets)) > 1 and (max(octets) < _SMALL_OCTET or octets.count(0) > 1)
    if octets[3] == 0 or looks_like_version or octets[:2] in _IDENTIFIERS or _DECIMAL_BEFORE.search(before):
        return False
    return not any(address in network for network in _RESERVED_V4)


def _ipv6_at(text: str, start: int, every: bool) -> Iterator[Finding]:
    match = _IPV6.match(text, start)
    if not match or (start and text[start - 1] in ":.") or _INDEX.search(text[max(0, start - 2) : start]):
        return
    literal, following = match.group(), text[match.end() : match.end() + 1]
    if literal.endswith(":") and not literal.endswith("::"):
        literal = literal[:-1]
    try:
        address = IPv6Address(literal)
    except AddressValueError:
        return
    groups = sum(bool(group) for group in literal.split(":"))
    is_public = groups >= _FEWEST_IPV6_GROUPS and not any(address in network for network in _RESERVED_V6)
    if (every or is_public) and not following.isalnum() and following != "_":
        yield Finding(start, start + len(literal), "ip", "ipv6", address.compressed)


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
