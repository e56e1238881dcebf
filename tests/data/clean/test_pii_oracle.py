"""Patterns and check digits against what others wrote: presidio's recognizers and Google's library of numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sheepop.data.clean.config import PiiConfig
from sheepop.data.clean.pii import find_personal

DIGITS = "0123456789"


@pytest.fixture(scope="module")
def presidio() -> Any:
    # It imports torch, so that this module alone does it.
    recognizers = pytest.importorskip("presidio_analyzer.predefined_recognizers", reason="presidio is not installed")
    tldextract = pytest.importorskip("tldextract")
    # The plain extractor would download the list of suffixes.
    tldextract.extract = tldextract.TLDExtract(suffix_list_urls=())
    return recognizers


# Examples of the registry of account numbers, printed as there.
IBANS = """
GB33BUKB20201555555555 DE75512108001245126199 FR7630006000011234567890189 NL02ABNA0123456789 ES7921000813610123456789
IT60X0542811101000000123456 PL10105000997603123456789123 BE71096123456769 CH5604835012345678009 AT483200000012345864
SE7280000810340009783242 NO8330001234567 FI1410093000123458 DK9520000123456789 PT50002700000001234567833
GR9608100010000001234567890 BR1500000000000010932840814P2 SA4420000001234567891234 AE070331234567890123456
"""


def is_found(value: str) -> bool:
    return [finding.value for finding in find_personal(value, PiiConfig(), is_code=False)] == [value]


def test_account_numbers_and_their_misprints_are_judged_as_presidio_does(presidio: Any):
    stream, other = random.Random(1), presidio.IbanRecognizer()
    for value in IBANS.split():
        assert is_found(value)
        assert other.validate_result(value)
        for _ in range(50):
            place = stream.randrange(2, len(value))
            changed = value[:place] + stream.choice(DIGITS) + value[place + 1 :]
            assert is_found(changed) == bool(other.validate_result(changed)), changed


def test_planted_values_are_found_where_presidio_finds_them(presidio: Any):
    values = {
        "EMAIL_ADDRESS": ["john.doe@gmail.com", "a.b-c+d@mail.uni-bonn.de", "x_y@sub.domain.co.uk"],
        "CREDIT_CARD": ["4012888888881881", "5555 5555 5555 4444", "3714-496353-98431", "6011000990139424"],
        "IBAN_CODE": ["GB33BUKB20201555555555", "DE75 5121 0800 1245 1261 99", "FR7630006000011234567890189"],
        "IP_ADDRESS": ["91.198.174.192", "140.82.121.4", "2001:4860:4860::8888"],
    }
    others = [
        presidio.EmailRecognizer(),
        presidio.CreditCardRecognizer(),
        presidio.IbanRecognizer(),
        presidio.IpRecognizer(),
    ]
    text = ""
    for number in range(4):
        for entity in values:
            if number < len(values[entity]):
                text += f"Here stands {values[entity][number]} and so on.\n"
    theirs = set()
    for recognizer in others:
        for result in recognizer.analyze(text, recognizer.supported_entities, None):
            if result.score >= 0.5:
                theirs.add((result.start, result.end))
    # A card can be read into the digits of an account.
    theirs -= {(a, b) for a, b in theirs for c, d in theirs if (a, b) != (c, d) and c <= a and b <= d}
    ours = {(finding.start, finding.end) for finding in find_personal(text, PiiConfig(), is_code=False)}
    assert len(ours) == sum(map(len, values.values()))
    assert ours == theirs


def test_example_numbers_of_all_countries_are_found_in_international_form():
    numbers = pytest.importorskip("phonenumbers")
    config, missed, count = PiiConfig(kinds=("phone",)), [], 0
    for region in sorted(numbers.SUPPORTED_REGIONS):
        for kind in (numbers.PhoneNumberType.FIXED_LINE, numbers.PhoneNumberType.MOBILE):
            example = numbers.example_number_for_type(region, kind)
            for form in (numbers.PhoneNumberFormat.INTERNATIONAL, numbers.PhoneNumberFormat.E164) if example else ():
                printed = numbers.format_number(example, form)
                text = f"You can reach us under {printed}, or write."
                found = [text[item.start : item.end] for item in find_personal(text, config, is_code=False)]
                # Small islands have numbers as short as four digits.
                if len(printed) >= 10:
                    count += 1
                    missed += [] if found == [printed] else [printed]
    assert count > 900
    assert len(missed) <= 0.02 * count, missed


@pytest.mark.parametrize("region", ["US", "GB", "DE", "FR"])
def test_random_numbers_of_these_countries_are_found_as_they_are_written_there(region: str):
    numbers = pytest.importorskip("phonenumbers")
    stream, config = random.Random(region), PiiConfig(kinds=("phone",))
    example = numbers.example_number_for_type(region, numbers.PhoneNumberType.FIXED_LINE)
    code, length, count, missed = example.country_code, len(str(example.national_number)), 0, []
    for _ in range(3000):
        national = str(example.national_number)[:3] + "".join(stream.choice(DIGITS) for _ in range(length - 3))
        number = numbers.parse(f"+{code}{national}")
        if numbers.is_valid_number(number):
            count += 1
            printed = numbers.format_number(number, numbers.PhoneNumberFormat.NATIONAL)
            text = f"Reach us under {printed} or write."
            found = [text[item.start : item.end] for item in find_personal(text, config, is_code=False)]
            missed += [] if found == [printed] else [printed]
    assert count > 300
    assert missed == []
