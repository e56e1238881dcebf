"""IP addresses in text: those of hosts on the internet, told apart from version numbers and from reserved ranges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network

from sheepop.data.clean.pii_scan import Candidates, Finding

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = re.compile(
    rf"(?<![A-Za-z0-9_.\-+])({_OCTET}(?:\.{_OCTET}){{3}})(?::[0-9]{{2,5}})?(?![A-Za-z0-9_+]|[.-][A-Za-z0-9])"
)
_IPV6 = re.compile(r"[0-9A-Fa-f:]{2,39}(?:(?<=:)[0-9.]{7,15})?")
_ANY_IPV6 = re.compile(r"(?<![A-Za-z0-9_:.])(?:[0-9A-Fa-f]{1,4}:|::)[0-9A-Fa-f:]{1,38}(?![A-Za-z0-9_:])")
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

# RFC 6890 with its updates, RFC 5737 and RFC 3849: what names no host on the internet.
_RESERVED = (
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 "
    "192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3"
)
_RESERVED_V4 = tuple(IPv4Network(network) for network in _RESERVED.split())
_PUBLIC_V6 = IPv6Network("2000::/3")
_RESERVED_V6 = tuple(IPv6Network(network) for network in ("2001:db8::/32", "3fff::/20", "2001:10::/28", "2001:2::/48"))


def find_addresses(text: str, candidates: Candidates, *, every: bool) -> Iterator[Finding]:
    """IP addresses of hosts; with `every`, also private, loopback, documentation and other reserved ones."""
    for run in candidates.runs:
        if run.dots >= 3:
            for match in _IPV4.finditer(text, run.start, run.end + 7):
                if _is_host(text, match, every):
                    yield Finding(match.start(1), match.end(1), "ip", "ipv4", match.group(1))
    starts = [match.start() for match in _ANY_IPV6.finditer(text)] if every else candidates.ipv6
    for start in starts:
        finding = _ipv6_at(text, start, every)
        if finding:
            yield finding


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
    # Networks end in 0; four small numbers, or two zeros, are more often a version or a section than an address;
    # object identifiers begin as in _IDENTIFIERS; and in the paths of vector graphics decimals touch.
    looks_like_version = len(set(octets)) > 1 and (max(octets) < _SMALL_OCTET or octets.count(0) > 1)
    if octets[3] == 0 or looks_like_version or octets[:2] in _IDENTIFIERS or _DECIMAL_BEFORE.search(before):
        return False
    return not any(address in network for network in _RESERVED_V4)


def _ipv6_at(text: str, start: int, every: bool) -> Finding | None:
    match = _IPV6.match(text, start)
    if not match or (start and text[start - 1] in ":.") or _INDEX.search(text[max(0, start - 2) : start]):
        return None
    literal = match.group()
    following = text[match.end() : match.end() + 1]
    if following.isalnum() or following == "_":
        return None
    if literal.endswith(":") and not literal.endswith("::"):
        literal = literal[:-1]
    try:
        address = IPv6Address(literal)
    except AddressValueError:
        return None
    groups = sum(bool(group) for group in literal.split(":"))
    if not every:
        is_public = address in _PUBLIC_V6 and not any(address in network for network in _RESERVED_V6)
        if not is_public or groups < _FEWEST_IPV6_GROUPS:
            return None
    return Finding(start, start + len(literal), "ip", "ipv6", address.compressed)
