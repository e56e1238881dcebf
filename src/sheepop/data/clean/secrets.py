"""Replaces keys, tokens and passwords in code, configuration and text.

The patterns of detect-secrets are exact but slow, and some take quadratic time on hostile text, so each is tried only
on a short segment that has the right shape. A shape may be wider than the detector's pattern but not narrower, except
that it must not begin inside a word; tests compare both on examples of every detector.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sheepop.data.clean.assigned_secrets import DUMMY_PASSWORD, assigned_secrets
from sheepop.data.clean.config import SecretsConfig
from sheepop.data.clean.stage import Finding, Replacement
from sheepop.data.documents import Draft


class Shape(NamedTuple):
    """The form of a segment to pass to a detector; the secret is the group `value`, or the whole segment.

    Text without any of `hints` has no such segment. If detect-secrets has no detector of this name, the shape alone
    decides, and the account counts under `name`.
    """

    name: str
    hints: tuple[str, ...]
    segment: re.Pattern[str]


def _shape(name: str, hints: str, segment: str) -> Shape:
    return Shape(name, tuple(hints.split()), re.compile(segment, re.ASCII))


# The shapes in RUN_SHAPES contain a run of at least this many letters, digits, hyphens and underscores.
SHORTEST_RUN = 20
LONGEST_RUN = 2048
_T = r"[A-Za-z0-9_\-]"
RUN_SHAPES = (
    _shape("AWSKeyDetector", "AKIA ASIA ABIA ACCA A3T", r"A(?:3T[A-Z0-9]|BIA|CCA|KIA|SIA)[0-9A-Z]{16}(?![0-9A-Za-z])"),
    _shape("DiscordBotTokenDetector", ".", rf"(?<!{_T})[MNO]{_T}{{23,25}}\.{_T}{{6}}\.{_T}{{27}}(?!{_T})"),
    _shape("GitHubTokenDetector", "ghp_ gho_ ghu_ ghs_ ghr_", r"gh[pousr]_[A-Za-z0-9_]{36,255}"),
    _shape(
        "GitLabTokenDetector",
        "glpat- gldt- glft- glsoat- glrt- glcbt- glimt- glptt- glagent- gloas- GR1348941",
        rf"(?:gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas)-|GR1348941){_T}{{20,1024}}",
    ),
    _shape("MailchimpDetector", "-us", r"(?<![0-9a-z])[0-9a-z]{32}-us[0-9]{1,2}(?![0-9A-Za-z])"),
    _shape("OpenAIDetector", "T3BlbkFJ", rf"(?<![A-Za-z0-9])sk-{_T}{{20,300}}"),
    _shape("PypiTokenDetector", "pypi-AgE", rf"pypi-AgE{_T}{{70,1024}}"),
    _shape("SendGridDetector", "SG.", r"SG\.[a-zA-Z0-9_-]{22}\.[a-zA-Z0-9_-]{43}"),
    _shape(
        "SoftlayerDetector", "/soap/ /SOAP/", r"(?i:https?://api.softlayer.com/soap/v3(?:.1)?/(?P<value>[a-z0-9]{64}))"
    ),
    _shape("SquareOAuthDetector", "sq0csp-", r"sq0csp-[0-9A-Za-z\\\-_]{43}"),
    _shape("StripeDetector", "k_live_", r"[rs]k_live_[0-9a-zA-Z]{24,128}"),
    _shape("TelegramBotTokenDetector", ":", rf"(?<![0-9])[0-9]{{8,10}}:{_T}{{35}}(?!{_T})"),
    _shape("TwilioKeyDetector", "AC SK", r"(?<![A-Za-z0-9+/])(?:AC|SK)[a-z0-9]{32}(?![A-Za-z0-9+/])"),
    _shape("Google API Key", "AIza", rf"(?<!{_T})AIza{_T}{{35}}(?!{_T})"),
    _shape("GitHub Fine-Grained Token", "github_pat_", r"github_pat_[A-Za-z0-9_]{60,255}"),
    _shape("Hugging Face Token", "hf_", r"(?<![A-Za-z0-9_])hf_[A-Za-z0-9]{34,40}(?![A-Za-z0-9_])"),
    _shape("Anthropic API Key", "sk-ant-", rf"sk-ant-{_T}{{60,200}}"),
    _shape("NPM Access Token", "npm_", r"(?<![A-Za-z0-9_])npm_[A-Za-z0-9]{36}(?![A-Za-z0-9_])"),
    _shape("DigitalOcean Token", "_v1_", r"do[opr]_v1_[a-f0-9]{64}"),
)

# A run without digits is examined only if it begins like this.
RUN_PREFIX = re.compile(r"A3T|ABIA|ACCA|AKIA|ASIA|gh[pousr]_|gl[a-z]{2,5}-|GR13|sk-|sk_live|rk_live|AIza|hf_|npm_")

# Detectors that examine the name to which the secret is assigned.
ASSIGNED = ("CloudantDetector", "IbmCloudIamDetector", "IbmCosHmacDetector", "SoftlayerDetector")
ASSIGNED_LENGTHS = frozenset((24, 44, 48, 64))
ASSIGNMENT = re.compile(r"(?:key|pwd|pw|password|pass|token)[\"']?\]? {0,16}(?::=|=>|::|=|:| ) {0,16}[\"']?\Z", re.I)

# Shapes that are found by a hint in the whole text; hints are in lower case, because the search lowers the text.
TEXT_SHAPES = (
    _shape("ArtifactoryDetector", "akc", r"AKC[a-zA-Z0-9]{10,200}"),
    _shape("ArtifactoryDetector", "ap", r"AP[0-9A-F][a-zA-Z0-9]{8,200}"),
    _shape("AWSKeyDetector", "aws", r"(?i:aws)[^\n'\"]{0,60}['\"](?P<value>[0-9a-zA-Z/+]{40})['\"]"),
    _shape("AzureStorageKeyDetector", "accountkey=", r"AccountKey=(?P<value>[a-zA-Z0-9+/=]{88})"),
    _shape(
        "BasicAuthDetector",
        "://",
        r"://[^\s:/?#\[\]@!$&'()*+,;=]{1,128}:(?P<value>[^\s:/?#\[\]@!$&'()*+,;=]{1,256})@(?=[A-Za-z0-9\[{<%$])",
    ),
    _shape(
        "JwtTokenDetector",
        "eyj",
        rf"(?<!{_T})eyJ[A-Za-z0-9_=-]{{8,2048}}\.[A-Za-z0-9_=-]{{2,8192}}(?:\.[A-Za-z0-9_.+/=-]{{0,4096}})?",
    ),
    _shape("NpmDetector", "_authtoken=", r"//[^\s]{1,200}/:_authToken=[ \t]*(?P<value>[A-Za-z0-9_-]{8,200})"),
    _shape("SlackDetector", "xox", r"(?i:xox[abpors])-(?:[0-9]{1,20}-){1,6}[A-Za-z0-9]{8,256}"),
    _shape("SlackDetector", "hooks.slack.com", r"(?i:https://hooks\.slack\.com/services/)[A-Za-z0-9_/]{3,256}"),
)

# Private keys are replaced as a whole.
KEY_BEGINS = re.compile(r"-{4,5} ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
KEY_ENDS = re.compile(r"-{4,5} ?END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
KEY_BODY = re.compile(r"[A-Za-z0-9+/=]{40,}|(?:[A-Za-z0-9+/=]{16,}[\s\\nr\"'+,#*/]{1,40}){2,}")
LONGEST_KEY = 2**15
PUTTY_KEY = re.compile(
    r"PuTTY-User-Key-File-[23]: [^\n]{1,100}\n(?:[^\n]{0,200}\n){1,200}?Private-MAC: ?[0-9a-f]{16,128}"
)

_BEFORE, _AFTER = 64, 2
_LONGEST_LINE = 2000
_TOKEN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
_BREAKS = bytes(code not in _TOKEN for code in range(256))
_HAS_DIGIT = re.compile(r"[0-9]")
_NOT_KEY_MATERIAL = re.compile(r"[^A-Za-z0-9+/=]+")
_CONFIGURABLE = {"entropy": ("Base64HighEntropyString", "HexHighEntropyString"), "keyword": ("KeywordDetector",)}


class SecretsReplacement(Replacement):
    """Replaces every secret that a detector of detect-secrets finds.

    Some detectors are made stricter: a random token must contain a digit, and a password in a URL must not be a word
    that is common in examples. Private keys are replaced from their first line to their last.
    """

    name = "secrets"
    config: SecretsConfig

    def findings(self, text: str, document: Draft) -> list[Finding]:
        """The secrets in a segment of the document."""
        found = find_secrets(text)
        if self.config.detectors:
            names = [name for choice in self.config.detectors for name in _CONFIGURABLE[choice]]
            found = _without_overlaps([*found, *_in_lines(text, names)])
        return found


def find_secrets(text: str) -> list[Finding]:
    """The secrets in `text`, in order and without overlaps."""
    lower = text.lower() if text.isascii() else text.encode("ascii", "replace").decode("ascii").lower()
    found = list(_private_keys(text))
    for shape in TEXT_SHAPES:
        if shape.hints[0] in lower:
            for match in shape.segment.finditer(text):
                found += _confirmed(text, match, shape)
    found += [_secret(text, *assigned) for assigned in assigned_secrets(text, lower)]
    return _without_overlaps([*found, *_by_run(text)])


def _secret(text: str, start: int, end: int, title: str) -> Finding:
    return Finding(start, end, "SECRET", title, text[start:end])


def _without_overlaps(found: list[Finding]) -> list[Finding]:
    chosen: list[Finding] = []
    for secret in sorted(found, key=lambda secret: (secret.start, -secret.end)):
        if not chosen or secret.start >= chosen[-1].end:
            chosen.append(secret)
    return chosen


def _private_keys(text: str) -> Iterator[Finding]:
    begin = KEY_BEGINS.search(text) if "PRIVATE KEY" in text else None
    end = KEY_ENDS.search(text) if begin else None
    while begin:
        start, following = begin.end(), KEY_BEGINS.search(text, begin.end())
        limit = min(start + LONGEST_KEY, following.start() if following else len(text))
        if end and end.start() < start:
            end = KEY_ENDS.search(text, start)
        key_end = end.end() if end and end.start() <= limit else _key_lines(text, start, limit)
        if KEY_BODY.search(text, start, key_end):
            yield _secret(text, begin.start(), key_end, "Private Key")
        begin = following
    for match in PUTTY_KEY.finditer(text) if "PuTTY-User-Key-File-" in text else ():
        yield _secret(text, match.start(), match.end(), "Private Key")


def _key_lines(text: str, start: int, limit: int) -> int:
    """The end of a truncated key: the last line that contains only key material and perhaps quotes."""
    end = start
    for line in text[start:limit].splitlines(keepends=True):
        material = _NOT_KEY_MATERIAL.sub("", line)
        if line.strip() and (len(material) < 16 or " " in line.strip()):
            break
        end += len(line)
    return start + len(text[start:end].rstrip())


def _by_run(text: str) -> Iterator[Finding]:
    """Yields the secrets around long runs of letters, digits, hyphens and underscores, which are rare in text."""
    codes = np.frombuffer(b"".join((b"\n", text.encode("ascii", "replace"), b"\n")).translate(_BREAKS), dtype=bool)
    breaks = np.flatnonzero(codes)
    long = np.flatnonzero(np.diff(breaks) > SHORTEST_RUN)
    for start, end in zip(breaks[long].tolist(), (breaks[long + 1] - 1).tolist(), strict=True):
        if end - start <= LONGEST_RUN:
            yield from _around(text, start, end)


def _around(text: str, start: int, end: int) -> Iterator[Finding]:
    before = max(0, start - _BEFORE)
    if _HAS_DIGIT.search(text, start, end) or RUN_PREFIX.match(text, start, end):
        near = text[before : end + _AFTER]
        for shape in RUN_SHAPES:
            for hint in shape.hints:
                if hint in near:
                    for match in shape.segment.finditer(text, before, end + _AFTER):
                        yield from _confirmed(text, match, shape)
                    break
    if end - start in ASSIGNED_LENGTHS and ASSIGNMENT.search(text[before:start]):
        run = text[start:end]
        for name in ASSIGNED:
            detector = _detectors()[name]
            found = run in detector.analyze_string(text[before : end + 1])
            if found and (name == "CloudantDetector" or _HAS_DIGIT.search(run)):
                yield _secret(text, start, end, detector.secret_type)
                return


def _confirmed(text: str, match: re.Match[str], shape: Shape) -> Iterator[Finding]:
    start, end = match.span("value" if "value" in shape.segment.groupindex else 0)
    detector = _detectors().get(shape.name)
    if not detector:
        yield _secret(text, start, end, shape.name)
        return
    if shape.name == "BasicAuthDetector":
        is_real = not DUMMY_PASSWORD.fullmatch(text, start, end)
    else:
        is_real = _HAS_DIGIT.search(text, start, end) is not None
    # Unlike `analyze_line`, `analyze_string` never asks a server whether a secret is valid.
    if is_real and any(True for _ in detector.analyze_string(text[max(0, match.start() - 1) : match.end() + 1])):
        yield _secret(text, start, end, detector.secret_type)


def _in_lines(text: str, names: list[str]) -> Iterator[Finding]:
    """Yields what the named detectors find line by line; lines of more than 2,000 characters are data and skipped."""
    position = 0
    for line in text.splitlines(keepends=True):
        for detector in (_detectors()[name] for name in names if len(line) <= _LONGEST_LINE):
            # Only analyze_line compares the entropy of a string with the limit; it returns a set, which has no order.
            found = detector.analyze_line(filename="", line=line)
            for value in sorted(str(secret.secret_value) for secret in found):
                if value and value in line:
                    start = position + line.index(value)
                    yield _secret(text, start, start + len(value), detector.secret_type)
        position += len(line)


@cache
def _detectors() -> Mapping[str, Any]:
    from detect_secrets.settings import default_settings, get_plugins

    with default_settings():
        return {type(plugin).__name__: plugin for plugin in get_plugins()}
