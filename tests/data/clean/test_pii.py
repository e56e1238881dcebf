"""Personal values of every kind are replaced wherever they stand, and ordinary prose and code are not touched."""

from __future__ import annotations

import json
import re
import string
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.data.clean.account import Account
from sheepop.data.clean.config import PiiConfig
from sheepop.data.clean.pii import PiiReplacement, find_personal
from sheepop.data.documents import Draft

EVERYTHING = PiiConfig()

# Specimens that authorities, standards and encyclopedias publish, and numbers kept free for films and documents.
PLANTED = [
    ("email", "email", "Write to {} before noon.", "john.doe@gmail.com"),
    ("email", "email", "Mail (<{}>) bounced.", "a.b+c_d@mail.uni-bonn.de"),
    ("email", "email", "Contact: {}.", "josé.garcía@correo.es"),
    ("email", "email", "mailto:{}?subject=hi", "Someone@Sub.Domain.CO.UK"),
    ("email", "email", "Пишите на {} сегодня.", "иван.петров@почта.рф"),
    ("phone", "phone", "Call {} now.", "+1 (212) 555-0123"),
    ("phone", "phone", "Call {} now.", "(212) 555-0123"),
    ("phone", "phone", "Call {} now.", "212-555-0123"),
    ("phone", "phone", "Or {}, extension 5.", "212.555.0123"),
    ("phone", "phone", "Toll free: {}!", "1-800-555-0199"),
    ("phone", "phone", "London office, {}.", "+44 20 7946 0018"),
    ("phone", "phone", "London office, {}.", "020 7946 0018"),
    ("phone", "phone", "Mobile {} please", "07700 900123"),
    ("phone", "phone", "The shop ({}) is shut", "(01632) 960 018"),
    ("phone", "phone", "Rufen Sie {} an.", "+49 (0)30 23125 014"),
    ("phone", "phone", "Rufen Sie {} an.", "(+49) 30 23125014"),
    ("phone", "phone", "Rufen Sie {} an.", "0049 30 23125014"),
    ("phone", "phone", "Rufen Sie {} an.", "030/23125014"),
    ("phone", "phone", "Rufen Sie {} an.", "089 / 99 99 12 34"),
    ("phone", "phone", "Rufen Sie {} an.", "0171 3920012"),
    ("phone", "phone", "Appelez le {}, merci.", "01 99 00 12 34"),
    ("phone", "phone", "Appelez le {}, merci.", "06\u202f39\u202f98\u202f12\u202f34"),
    ("phone", "phone", "Appelez le {}, merci.", "+33 1 99 00 12 34"),
    ("phone", "phone", "Tel: {} (Madrid)", "91 123 45 67"),
    ("phone", "phone", "电话：{}。", "13912345678"),
    ("phone", "phone", "Tokyo {} is open", "+81 3-1234-5678"),
    ("ip", "ipv4", "Connected to {} at last.", "91.198.174.192"),
    ("ip", "ipv4", "Connected to {}:443 at last.", "8.8.8.8"),
    ("ip", "ipv6", "It resolves to {} today.", "2001:4860:4860::8888"),
    ("ip", "ipv6", "http://[{}]:80/", "2A00:1450:4001:0C02:0000:0000:0000:0064"),
    ("card", "card", "Visa {} expires soon.", "4111 1111 1111 1111"),
    ("card", "card", "Paid with {}.", "5555-5555-5555-4444"),
    ("card", "card", "Paid with {}.", "378282246310005"),
    ("card", "card", "Paid with {}.", "3782 822463 10005"),
    ("card", "card", "Paid with {}.", "6011111111111117"),
    ("iban", "iban", "Transfer to {} today", "GB82 WEST 1234 5698 7654 32"),
    ("iban", "iban", "Transfer to {}.", "DE89370400440532013000"),
    ("iban", "iban", "Virement : {}", "FR14 2004 1010 0505 0001 3M02 606"),
    ("iban", "iban", "Konto {}, danke", "NO93 8601 1117 947"),
    ("iban", "iban", "Rekening {}.", "MT84 MALT 0110 0001 2345 MTLC AST0 01S"),
    ("national_id", "us_ssn", "Her SSN is {}.", "078-05-1120"),
    ("national_id", "us_ssn", "Social Security {}", "078051120"),
    ("national_id", "us_itin", "Number {} on the form", "911-70-1234"),
    ("national_id", "uk_nino", "National Insurance {}.", "AB 12 34 56 C"),
    ("national_id", "uk_nino", "Nino {}.", "AB123456C"),
    ("national_id", "uk_nhs", "NHS number {}", "943 476 5919"),
    ("national_id", "de_steuer_id", "Steuer-ID: {}", "86 095 742 719"),
    ("national_id", "de_steuer_id", "IdNr {} liegt bei", "86095742719"),
    ("national_id", "fr_nir", "Numéro de sécu {}", "2 95 10 99 126 111 93"),
    ("national_id", "es_dni", "con DNI {} y", "54362315K"),
    ("national_id", "es_nie", "con NIE {} y", "X2482300W"),
    ("national_id", "it_codice_fiscale", "codice fiscale {}", "RSSMRA85T10A562S"),
    ("national_id", "nl_bsn", "BSN {}", "111222333"),
    ("national_id", "pl_pesel", "PESEL {}", "44051401359"),
    ("national_id", "br_cpf", "portador do CPF {}", "390.533.447-05"),
    ("national_id", "br_cpf", "CPF: {}", "39053344705"),
    ("national_id", "in_aadhaar", "Aadhaar {}", "2341 2341 2346"),
    ("national_id", "in_pan", "PAN {}", "ACUPA7085R"),
    ("national_id", "se_personnummer", "personnummer {}", "880320-0016"),
    ("national_id", "fi_hetu", "hetu {}", "131052-308T"),
    ("national_id", "dk_cpr", "CPR {}", "211062-5629"),
    ("national_id", "no_fodselsnummer", "Fødselsnummer {}", "151086 95088"),
    ("national_id", "be_rrn", "rijksregister {}", "85.07.30-033.28"),
    ("national_id", "ch_ahv", "AHV {}", "756.9217.0769.85"),
    ("national_id", "at_svnr", "SVNr {}", "1237 010180"),
    ("national_id", "pt_nif", "contribuinte {}", "501442600"),
    ("national_id", "ca_sin", "Social insurance {}", "046 454 286"),
    ("national_id", "au_tfn", "Tax File Number {}", "123 456 782"),
    ("national_id", "kr_rrn", "RRN {}", "971013-9019902"),
    ("national_id", "cn_resident_id", "身份证 {}", "11010519491231002X"),
    ("national_id", "mx_curp", "CURP {}", "BOXW310820HNERXN09"),
    ("national_id", "za_id", "ID number {}", "8001015009087"),
    ("national_id", "sg_nric", "NRIC {}", "S1234567D"),
    ("national_id", "tr_kimlik", "T.C. Kimlik {}", "17291716060"),
]


def names_and_values(text: str, *, is_code: bool = False, config: PiiConfig = EVERYTHING) -> list[tuple[str, str, str]]:
    return [(f.kind, f.name, text[f.start : f.end]) for f in find_personal(text, config, is_code=is_code)]


def replaced(text: str, kind: str = "prose", **settings: object) -> str:
    seed = settings.pop("seed", 1)
    stage = PiiReplacement(Account(1), PiiConfig.model_validate(settings), seed=seed)  # type: ignore[arg-type]
    document = Draft(text, "a.txt", 0, kind)
    (document,) = stage.run([document])
    return document.text


@pytest.mark.parametrize(("kind", "name", "sentence", "value"), PLANTED, ids=lambda value: str(value)[:30])
def test_a_planted_value_is_found_exactly_and_replaced_by_its_type(kind: str, name: str, sentence: str, value: str):
    text = sentence.format(value)
    assert names_and_values(text) == [(kind, name, value)]
    assert re.fullmatch(re.escape(sentence).replace(r"\{\}", f"<{kind.upper()}_[0-9a-f]{{4}}>"), replaced(text))


@pytest.mark.parametrize(("kind", "name", "sentence", "value"), PLANTED, ids=lambda value: str(value)[:30])
def test_a_planted_value_is_found_in_code_when_it_is_quoted_and_announced(
    kind: str, name: str, sentence: str, value: str
):
    announced = sentence.format(value) if kind in ("national_id", "phone") else value
    text = f"def load():\n    return {{'number': '{value}'}}  # {announced}\n"
    assert (kind, name, value) in names_and_values(text, is_code=True)


def test_all_planted_values_are_found_together_in_a_long_text():
    filler = "\nIt was a bright cold day in April, and the clocks were striking thirteen. " * 3
    text = filler.join(sentence.format(value) for _, _, sentence, value in PLANTED)
    assert [(kind, name, value) for kind, name, _, value in PLANTED] == names_and_values(text)


ORDINARY_PROSE = """
# Release 2.31.0 (2023-05-22)

Version 1.2.3.4 fixes issue #10234 and needs Python>=3.11.7, numpy==1.26.4.post1 or v5.10.0.0. See RFC 2616,
section 4.2.1.1
and table 3.4.5.6; the OID is 1.3.6.1.4.1.311.21.20 (2.5.4.3 is commonName). ISBN 978-3-16-148410-0, ISSN
0378-5955, doi
10.1000/182, arXiv:2005.14165v4, order 12345678 of 24.12.2023, 14:30:05, 2024-01-31T23:59:59.123456+01:00.
From 1914-1918 and 1939 - 1945 some 60,000,000 people died; 1 000 000 000 is 10^9, pi is 3.14159265358979, e
2.718281828.
He paid $1,234,567.89 (1.234.567,89 EUR) for 1600 m2 in MA 02110-1301. Coordinates 48.858222, 2.2945; 12 34 56 78
90 12.
UUID 123e4567-e89b-12d3-a456-426614174000, commit 1234567890abcdef1234567890abcdef12345678, md5
d41d8cd98f00b204e9800998ecf8427e, sha 00000000 11111111 22222222 33333333, MAC 00:1B:44:11:3A:B7, part AB-1234-56.
Serve on 127.0.0.1:8000, 0.0.0.0, 10.0.0.1, 192.168.1.254/24, ::1, fe80::1, 2001:db8::8a2e:370:7334 or 198.51.100.7.
Write to user@example.com, foo@bar.example.org, root@localhost, noreply@github.com, git@github.com:user/repo.git,
ssh://deploy@host.company.com/srv, https://user:secret@host.company.com/path; scp a@server.company.com:/etc/hosts .
Use @pytest.mark.parametrize, npm install @types/node@20.1.0, react@18.2.0 and left-pad@1.3.0, icon@2x.png; @media
rules.
Follow @handle or @user.name. In 2 of 10 cases 5-10 were right; call 911, dial 112. The score was 21-14 21-19. Bus
4711.
Serial 4111111111111112, 1234 5678 9012 3456 and GB00 WEST 1234 5698 7654 32 have wrong check digits; 000-12-3456,
900-12-3456.
0123456789 is counting, 0x7fffffffffffffff and 18446744073709551615 are limits, 1e10 a float, 1/3 a fraction, +5 or
-5 a sign.
Lines: 01 02 03 04 05 06 07 08, 00 11 22 33 44 55; dump 0000020 0001234 0456701; 0.1 0.25 0.125 0.0625; 10-20-30-40.
"""

ORDINARY_CODE = """
import numpy as np
MAX = 4611686018427387904; MIN = -9223372036854775808; SEED = 20240131; MASK = 0xFFFFFFFF; BIG = 4532015112830366
PRIMES = (1000000007, 998244353, 2147483647, 4294967291, 1234567890123)
table = [0.0625, 3.14159265, 1.4142135623730951, 6.02214076e23, 1_000_000]
TIMES = {"epoch": 1700000000, "day": 86400000, "from": "19700101", "z": "20210304Z"}
L = 12345678L; U = 10000000U; F = 12345678F
__version__ = "1.2.3.4"; requires = ["pkg==4.0.3.2", "tool>=10.1.2.3"]
HOST, PORT = "127.0.0.1", 8080; BIND = "0.0.0.0"; DOC = "203.0.113.9"; NET = "93.184.216.0/24"; V6 = "::1"
q = W@x.T + A@B.transpose(0, 1) + self.w@self.h.to(device) + a@b.dot(c) + K@v.mT
x[2048::2]; y[2000:3000:4]; std::vector<int>::iterator it; ns::a::b::c
@decorator.name
@app.route("/users/<int:id>")
def f(x: int = 2_000_000) -> "Foo@Bar": ...
# phone = 5551234567 would be a name; tel = get(phone, 1234567890)
.icon@2x { width: 100.5px } @media (min-width: 1024px) and (max-width: 1280.98px) {}
<path d="M2.98.75 1.59.28 59 0 1.01-.06 1.44-.19.43-.3 10.5.5.25"/> plot(3782.822,463.10005)
"lodash": "^4.17.21",
"resolved": "https://registry.npmjs.org/lodash/-/lodash-4.17.21.tgz#679591c564c3bffaae8454cf0b3df370c3d6911c"
oid = "1.2.840.113549.1.1.11"; curve = "1.3.132.0.34"; attr = "2.5.29.17"
static const uint8_t k[] = {0x30, 0x31, 11, 22, 33, 44, 55, 66}; // 01 23 45 67 89 ab cd ef
diff --git a/x b/x
index 0123456..7890123 100644
@@ -2110,13 +2111,13 @@ class A
+12345678901
-1234567-8
"""


def test_a_page_of_ordinary_prose_is_unchanged():
    assert names_and_values(ORDINARY_PROSE) == []
    assert replaced(ORDINARY_PROSE) == ORDINARY_PROSE


def test_a_page_of_ordinary_code_is_unchanged():
    assert names_and_values(ORDINARY_CODE, is_code=True) == []
    assert replaced(ORDINARY_CODE, "code") == ORDINARY_CODE


NAMES = (
    "argparse ast base64 calendar codecs colorsys configparser csv datetime decimal difflib dis enum fractions heapq"
)
MODULES = NAMES.split()


def test_modules_of_the_standard_library_lose_nothing_but_addresses_of_their_authors():
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = {
        value
        for module in MODULES
        for value in names_and_values((folder / f"{module}.py").read_text(encoding="utf-8"), is_code=True)
    }
    assert {name for _, name, _ in found} <= {"email"}
    assert all(re.fullmatch(r"[\w.+-]+@[\w.-]+\.[a-z]+", value) for _, _, value in found)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Mail John.Doe@Gmail.com", "john.doe@gmail.com wrote"),
        ("4111 1111 1111 1111", "the card 4111-1111-1111-1111 is"),
        ("GB82 WEST 1234 5698 7654 32", "(GB82WEST12345698765432)"),
        ("2001:4860:4860:0:0:0:0:8888", "host 2001:4860:4860::8888"),
        ("+49 (0) 30 23125 014", "Tel. 0049-30-23125014"),
    ],
)
def test_all_spellings_of_a_value_get_the_same_placeholder(first: str, second: str):
    (one,), (other,) = (PLACEHOLDER.findall(replaced(text)) for text in (first, second))
    assert one == other


def test_placeholders_depend_on_the_seed_and_the_salt_and_not_on_what_else_is_read():
    text = "Ask jane.roe@gmail.com or +1 212-555-0123."
    assert (
        replaced(text, seed=1)
        == replaced(text, seed=1)
        == "Ask <EMAIL_{}> or <PHONE_{}>.".format(
            *re.findall(r"_([0-9a-f]{4})>", replaced("jane.roe@gmail.com +1 212-555-0123", seed=1))
        )
    )
    assert len({replaced(text, seed=1), replaced(text, seed=2), replaced(text, seed=1, salt="pepper")}) == 3
    # Known for ever: what one build replaced another must replace alike.
    assert replaced("jane.roe@gmail.com", seed=1) == KNOWN_PLACEHOLDER


PLACEHOLDER = re.compile(r"<[A-Z]+(?:_[A-Z]+)*_[0-9a-f]{4}>")
KNOWN_PLACEHOLDER = "<EMAIL_db7e>"


def test_many_values_share_a_placeholder_so_that_none_can_be_read_off():
    numbers = [f"+1 212-555-{number:04d}" for number in range(10000)]
    found = PLACEHOLDER.findall(replaced("\n".join(numbers)))
    assert len(found) == 10000
    # 10,000 draws of 65,536 give 65,536 (1 - exp(-10,000 / 65,536)) = 9,273 different ones.
    assert 9150 < len(set(found)) < 9400


def test_what_was_replaced_is_counted_and_placeholders_are_not_replaced_again():
    account = Account(1)
    stage = PiiReplacement(account, EVERYTHING, seed=1)
    text = "a.b@gmail.com, c.d@gmail.com, SSN 078-05-1120, 91.198.174.192."
    document = Draft(text, "a.txt", 0)
    (document,) = stage.run([document])
    counts = account.stage("pii").as_record()
    assert counts["changes"] == {"email": 2, "ipv4": 1, "us_ssn": 1}
    assert counts["changed_documents"] == 1
    assert counts["added_bytes"] == len(document.text) - len(text)
    assert replaced(document.text) == document.text


def test_marks_stay_where_their_pages_begin():
    pages = ["Write to a.b@gmail.com.\n", "Call +1 212-555-0123\n", "nothing here\n"]
    marks = [(0, "page 1"), (len(pages[0]), "page 2"), (len(pages[0] + pages[1]), "page 3")]
    document = Draft("".join(pages), "a", 0, marks=marks)
    (document,) = PiiReplacement(Account(1), EVERYTHING, seed=1).run([document])
    starts = [offset for offset, _ in document.marks]
    assert [document.text[start:][:5] for start in starts] == ["Write", "Call ", "nothi"]


def test_only_the_configured_kinds_are_replaced():
    text = "a.b@gmail.com 078-05-1120 91.198.174.192 4111 1111 1111 1111"
    assert [name for _, name, _ in names_and_values(text, config=PiiConfig(kinds=("card",)))] == ["card"]
    assert [name for _, name, _ in names_and_values(text, config=PiiConfig(kinds=()))] == []


def test_all_addresses_are_replaced_when_that_is_asked_for():
    text = "bind 127.0.0.1, 10.1.2.3, 192.0.2.1, ::1, fe80::1, 2001:db8::1 but not version 1.2.3.4 or a[1::2]"
    found = [value for _, _, value in names_and_values(text, config=PiiConfig(addresses="all"))]
    assert found == ["127.0.0.1", "10.1.2.3", "192.0.2.1", "::1", "fe80::1", "2001:db8::1"]


@settings(max_examples=150)
@given(st.lists(st.sampled_from([value for *_, value in PLANTED] + list(" .,-+@:/()_a0é\n\ud800")), max_size=12))
def test_findings_are_in_order_do_not_overlap_and_lie_inside_the_text(pieces: list[str]):
    text = "".join(pieces)
    for is_code in (False, True):
        end = 0
        for finding in find_personal(text, EVERYTHING, is_code=is_code):
            assert end <= finding.start < finding.end <= len(text)
            end = finding.end


@settings(max_examples=150)
@given(st.lists(st.sampled_from([value for *_, value in PLANTED] + [" ", ", ", "AB12", "1.2", "x"]), max_size=8))
def test_a_text_gives_the_same_findings_however_much_text_without_digits_follows(pieces: list[str]):
    text = "".join(pieces) + " "
    alone = find_personal(text, EVERYTHING, is_code=False)
    assert find_personal(text + "\n.\n" * 5000, EVERYTHING, is_code=False) == alone


ADVERSARIAL = [
    "1",
    "0",
    "1 ",
    "1-",
    "1.",
    "+1",
    "+",
    "(0",
    "01 ",
    "0171 ",
    "1.2.3.",
    "255.",
    "@",
    "a@",
    "a@a.",
    "a.b@c-",
    "-",
    "1@1.",
    "2001:",
    "::",
    "AB12",
    "AB 12",
    "DE89 ",
    "DE89370400440532013000",
    "1234-",
    "4111 1111 ",
    "https://",
    "://a",
    "x" * 70 + "@",
    "123-45-",
    "Tel. ",
    "tel:1 ",
    "00",
    "0049 ",
    "\u202f1",
    "é@é.",
    "3782 822463 ",
    "RSSMRA85T10A562",
]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("piece", ADVERSARIAL, ids=[repr(piece)[:20] for piece in ADVERSARIAL])
def test_hostile_text_takes_time_in_proportion_to_its_length(piece: str):
    # 100,000 characters take a fraction of a second; with quadratic time they would run into the limit.
    find_personal(piece * (100_000 // len(piece)), PiiConfig(addresses="all"), is_code=False)


@settings(max_examples=200)
@given(st.text(alphabet=string.ascii_letters + string.digits + " .,;:'\"()[]<>@+-_/\n", max_size=300))
def test_replacing_twice_changes_nothing_more(text: str):
    once = replaced(f"{text}.")
    assert replaced(once) == once


def test_the_settings_are_checked():
    with pytest.raises(ValueError, match="kinds"):
        PiiConfig.model_validate({"kinds": ["name"]})
    assert json.loads(EVERYTHING.model_dump_json())["addresses"] == "public"
