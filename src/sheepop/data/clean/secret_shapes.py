"""What secrets look like: for each of detect-secrets' detectors, the segment of text that it is asked about.

detect-secrets' own patterns are exact but slow, and some take quadratic time on hostile text; so each is tried only
on a short segment that has the right shape. A shape may be wider than the detector's pattern, never narrower, save
that it must not begin in the middle of a word; tests try it on examples of every detector.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Shape(NamedTuple):
    """A segment to show to a detector, and the part of it that is the secret: the group `value`, or all of it.

    Text that holds none of `hints` has no such segment. Without a detector the shape is proof enough; `title` is
    then the name that the account counts by.
    """

    detector: str | None
    title: str
    hints: tuple[str, ...]
    segment: re.Pattern[str]


def _shape(detector: str, hints: str, segment: str, flags: re.RegexFlag = re.ASCII) -> Shape:
    return Shape(detector, detector, tuple(hints.split()), re.compile(segment, flags | re.ASCII))


def _proof(title: str, hint: str, segment: str) -> Shape:
    return Shape(None, title, (hint,), re.compile(segment, re.ASCII))


# Found by a run of at least this many letters, digits, hyphens and underscores, which all of them contain.
SHORTEST_RUN = 20
LONGEST_RUN = 2048
_T = r"[A-Za-z0-9_\-]"
RUN_SHAPES = (
    _shape(
        "AWSKeyDetector",
        "AKIA ASIA ABIA ACCA A3T",
        r"(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])",
    ),
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
        "SoftlayerDetector",
        "/soap/ /SOAP/",
        r"https?://api.softlayer.com/soap/v3(?:.1)?/(?P<value>[a-z0-9]{64})",
        re.IGNORECASE,
    ),
    _shape("SquareOAuthDetector", "sq0csp-", r"sq0csp-[0-9A-Za-z\\\-_]{43}"),
    _shape("StripeDetector", "k_live_", r"[rs]k_live_[0-9a-zA-Z]{24,128}"),
    _shape("TelegramBotTokenDetector", ":", rf"(?<![0-9])[0-9]{{8,10}}:{_T}{{35}}(?!{_T})"),
    _shape("TwilioKeyDetector", "AC SK", r"(?<![A-Za-z0-9+/])(?:AC|SK)[a-z0-9]{32}(?![A-Za-z0-9+/])"),
    _proof("Google API Key", "AIza", rf"(?<!{_T})AIza{_T}{{35}}(?!{_T})"),
    _proof("GitHub Fine-Grained Token", "github_pat_", r"github_pat_[A-Za-z0-9_]{60,255}"),
    _proof("Hugging Face Token", "hf_", r"(?<![A-Za-z0-9_])hf_[A-Za-z0-9]{34,40}(?![A-Za-z0-9_])"),
    _proof("Anthropic API Key", "sk-ant-", rf"sk-ant-{_T}{{60,200}}"),
    _proof("NPM Access Token", "npm_", r"(?<![A-Za-z0-9_])npm_[A-Za-z0-9]{36}(?![A-Za-z0-9_])"),
    _proof("DigitalOcean Token", "_v1_", r"do[opr]_v1_[a-f0-9]{64}"),
)

# The rare run without any digit is worth a look only when it begins like this.
RUN_PREFIX = re.compile(r"A3T|ABIA|ACCA|AKIA|ASIA|gh[pousr]_|gl[a-z]{2,5}-|GR13|sk-|sk_live|rk_live|AIza|hf_|npm_")

# Detectors that look at the word to which the secret is assigned.
ASSIGNED = ("CloudantDetector", "IbmCloudIamDetector", "IbmCosHmacDetector", "SoftlayerDetector")
ASSIGNED_LENGTHS = frozenset((24, 44, 48, 64))
ASSIGNMENT = re.compile(r"(?:key|pwd|pw|password|pass|token)[\"']?\]? {0,16}(?::=|=>|::|=|:| ) {0,16}[\"']?\Z", re.I)

# Found by what the whole text must hold; these hints are in lower case, as the text is made before it is asked.
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

# Private keys are taken whole.
KEY_BEGINS = re.compile(r"-{4,5} ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
KEY_ENDS = re.compile(r"-{4,5} ?END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
KEY_BODY = re.compile(r"[A-Za-z0-9+/=]{40,}|(?:[A-Za-z0-9+/=]{16,}[\s\\nr\"'+,#*/]{1,40}){2,}")
LONGEST_KEY = 2**15
PUTTY_KEY = re.compile(
    r"PuTTY-User-Key-File-[23]: [^\n]{1,100}\n(?:[^\n]{0,200}\n){1,200}?Private-MAC: ?[0-9a-f]{16,128}"
)

# What examples put in the place of a password, and what is filled in later.
DUMMY_PASSWORD = re.compile(
    r".?|pass(?:wor[dt]|wd|phrase|w0rd)?[0-9]{0,3}|pwd?|pswd|my_?password|your_?password|secret|s3cr3t|token|key|api_?key|"
    r"foo|bar|baz|qux|test(?:ing|pass|password)?|changeme|hunter2|admin|root|guest|user(?:name)?|anonymous|postgres|"
    r"mysql|redis|rabbitmq|scott|tiger|[a-z_-]*(?:secret|passw(?:or)?d|token|key)[a-z_-]*|example|dummy|fake|none|null|[x*.\-_]+|\{.*\}|<.*>|%.*%?|.*\{[a-z_.]*\}.*|[a-z]{2,4}",
    re.IGNORECASE,
)
