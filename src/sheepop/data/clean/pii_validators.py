"""Check digits and structure of numbers that name persons: cards, accounts, national identification numbers.

Each function takes the number without separators, letters in upper case, and tells whether it can be genuine. The
rules are those that the issuing authorities publish; Luhn is ISO/IEC 7812-1 annex B, mod 97 and mod 11,10 are
ISO/IEC 7064, Verhoeff is the dihedral check of J. Verhoeff, "Error detecting decimal codes", 1969.
"""

from __future__ import annotations

from collections.abc import Sequence

_LUHN_DOUBLED = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)
_DAYS_IN_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_ALPHANUMERIC = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def weighted_sum(digits: str, weights: Sequence[int]) -> int:
    """The scalar product of the first digits with the weights."""
    return sum(int(digit) * weight for digit, weight in zip(digits, weights, strict=False))


def is_luhn(digits: str) -> bool:
    """Whether the last digit is the Luhn check digit of the others."""
    values = [ord(digit) - 48 for digit in reversed(digits)]
    return (sum(values[0::2]) + sum(_LUHN_DOUBLED[value] for value in values[1::2])) % 10 == 0


def is_date(year: int, month: int, day: int) -> bool:
    """Whether the day exists; a leap year is assumed only where `year` is one."""
    if not 1 <= month <= 12 or not 1 <= day <= _DAYS_IN_MONTH[month - 1]:
        return False
    return (month, day) != (2, 29) or (year % 4 == 0 and (year % 100 != 0 or year % 400 == 0))


def is_day_and_month(day: int, month: int) -> bool:
    """Whether the day exists in some year."""
    return is_date(2000, month, day)


# Cards and accounts


def is_card(digits: str) -> bool:
    """A payment card: a known issuer's prefix with the length that issuer uses, and a Luhn check digit."""
    return len(digits) in _card_lengths(digits) and is_luhn(digits) and len(set(digits)) > 1


def _card_lengths(digits: str) -> Sequence[int]:
    two, three, four = int(digits[:2]), int(digits[:3]), int(digits[:4])
    if digits[0] == "4":
        return (13, 16, 19)
    if 51 <= two <= 55 or 2221 <= four <= 2720:
        return (16,)
    if two in (34, 37):
        return (15,)
    if two in (36, 38, 39) or 300 <= three <= 305:
        return range(14, 20)
    if two == 35 or two == 62 or two == 65 or four == 6011 or 644 <= three <= 649:
        return range(16, 20)
    if two in (50, 56, 57, 58, 63, 67) or three in (604, 636):
        return range(13, 20)
    return ()


# Lengths of the IBAN registry (ISO 13616).
IBAN_LENGTHS = {
    country: length
    for length, countries in {
        15: "NO",
        16: "BE",
        18: "DK FI FK FO GL NL SD",
        19: "MK SI",
        20: "AT BA EE KZ LT LU MN XK",
        21: "CH HR LI LV",
        22: "BG BH CR DE GB GE IE ME RS VA",
        23: "AE GI IL IQ OM SO TL",
        24: "AD CZ ES MD PK RO SA SE SK TN VG",
        25: "LY PT ST",
        26: "IS TR",
        27: "BI DJ FR GR IT MC MR SM",
        28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
        29: "BR EG PS QA UA",
        30: "JO KW MU YE",
        31: "MT SC",
        32: "LC",
        33: "RU",
    }.items()
    for country in countries.split()
}


def is_iban(value: str) -> bool:
    """An account number of the length that its country uses, with valid check digits."""
    if len(value) != IBAN_LENGTHS.get(value[:2]):
        return False
    number = "".join(str(_ALPHANUMERIC.index(char)) for char in value[4:] + value[:4])
    return int(number) % 97 == 1


# National identification numbers, by country


def is_us_ssn(value: str) -> bool:
    """United States social security number: areas 000, 666 and from 900, group 00 and serial 0000 are never issued."""
    return value[:3] not in ("000", "666") and value[0] != "9" and value[3:5] != "00" and value[5:] != "0000"


def is_us_itin(value: str) -> bool:
    """United States individual taxpayer number: area from 900, groups 50-65, 70-88, 90-92 and 94-99."""
    group = int(value[3:5])
    return value[0] == "9" and (50 <= group <= 65 or 70 <= group <= 88 or 90 <= group <= 92 or 94 <= group <= 99)


def is_uk_nino(value: str) -> bool:
    """British national insurance number: the prefixes that are never issued are excluded."""
    return value[:2] not in ("BG", "GB", "NK", "KN", "TN", "NT", "ZZ")


def is_uk_nhs(value: str) -> bool:
    """British health service number: weights 10 to 2, modulo 11."""
    return (11 - weighted_sum(value, range(10, 1, -1)) % 11) % 11 == int(value[9]) and len(set(value)) > 1


def is_de_steuer_id(value: str) -> bool:
    """German tax identification number: one digit stands twice or thrice in the first ten; mod 11,10."""
    counts = sorted(value[:10].count(digit) for digit in set(value[:10]))
    if value[0] == "0" or counts not in ([1] * 8 + [2], [1] * 7 + [3]):
        return False
    product = 10
    for digit in value[:10]:
        product = (int(digit) + product) % 10 or 10
        product = product * 2 % 11
    return (11 - product) % 10 == int(value[10])


def is_fr_nir(value: str) -> bool:
    """French social security number: the key is 97 less the number modulo 97; 2A and 2B (Corsica) count as 19, 18."""
    number = value[:13].replace("2A", "19").replace("2B", "18")
    month = int(value[3:5])
    return number.isdigit() and (1 <= month <= 12 or month >= 20) and 97 - int(number) % 97 == int(value[13:15])


def is_es_dni(value: str) -> bool:
    """Spanish identity number: the letter is that of the number modulo 23; X, Y, Z (foreigners) count as 0, 1, 2."""
    number = value[:-1].translate({ord("X"): "0", ord("Y"): "1", ord("Z"): "2"})
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number) % 23] == value[-1]


_IT_ODD_VALUES = (1, 0, 5, 7, 9, 13, 15, 17, 19, 21)
_IT_ODD = dict(
    zip(
        _ALPHANUMERIC,
        # Digits, then letters, whose first ten have the values of the digits.
        (*_IT_ODD_VALUES, *_IT_ODD_VALUES, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23),
        strict=True,
    )
)
_IT_EVEN = {char: int(char) if char.isdigit() else ord(char) - 65 for char in _ALPHANUMERIC}


def is_it_codice_fiscale(value: str) -> bool:
    """Italian tax code: the last letter is the sum of two tables, by odd and even place, modulo 26."""
    total = sum(_IT_ODD[char] for char in value[0:15:2]) + sum(_IT_EVEN[char] for char in value[1:15:2])
    return chr(65 + total % 26) == value[15]


def is_nl_bsn(value: str) -> bool:
    """Dutch citizen service number: weights 9 to 2 and -1, modulo 11."""
    return int(value) > 0 and weighted_sum(value, (9, 8, 7, 6, 5, 4, 3, 2, -1)) % 11 == 0


def is_pl_pesel(value: str) -> bool:
    """Polish PESEL: a birth date whose month carries the century, weights 1 3 7 9, modulo 10."""
    day_exists = is_day_and_month(int(value[4:6]), int(value[2:4]) % 20)
    return day_exists and weighted_sum(value, (1, 3, 7, 9, 1, 3, 7, 9, 1, 3, 1)) % 10 == 0


def is_br_cpf(value: str) -> bool:
    """Brazilian CPF: two check digits, modulo 11."""
    first = weighted_sum(value, range(10, 1, -1)) * 10 % 11 % 10
    second = weighted_sum(value, range(11, 1, -1)) * 10 % 11 % 10
    return value[9:] == f"{first}{second}" and len(set(value)) > 1


def _dihedral(left: int, right: int) -> int:
    """The product in the dihedral group of ten elements: five rotations, then five reflections."""
    rotation = (left % 5 - right % 5) % 5 if left >= 5 else (left + right) % 5
    return rotation + 5 * ((left >= 5) != (right >= 5))


_VERHOEFF_STEP = (1, 5, 7, 6, 2, 8, 3, 0, 9, 4)


def is_in_aadhaar(value: str) -> bool:
    """Indian Aadhaar: does not begin with 0 or 1; Verhoeff check digit."""
    total = 0
    for place, digit in enumerate(reversed(value)):
        permuted = int(digit)
        for _ in range(place % 8):
            permuted = _VERHOEFF_STEP[permuted]
        total = _dihedral(total, permuted)
    return value[0] not in "01" and total == 0


def is_se_personnummer(value: str) -> bool:
    """Swedish personal number, 10 digits or 12 with the century; the day of a coordination number is 60 higher."""
    short = value[-10:]
    return is_day_and_month(int(short[4:6]) % 60, int(short[2:4])) and is_luhn(short)


def is_fi_hetu(value: str) -> bool:
    """Finnish personal identity code: the last character is that of birth date and number modulo 31."""
    number = int(value[:6] + value[-4:-1])
    return (
        is_day_and_month(int(value[:2]), int(value[2:4]))
        and "0123456789ABCDEFHJKLMNPRSTUVWXY"[number % 31] == value[-1]
    )


def is_dk_cpr(value: str) -> bool:
    """Danish CPR number: it begins with a birth date; its check digit was given up in 2007."""
    return is_day_and_month(int(value[:2]), int(value[2:4]))


def is_no_fodselsnummer(value: str) -> bool:
    """Norwegian birth number: two check digits, modulo 11."""
    first = weighted_sum(value, (3, 7, 6, 1, 8, 9, 4, 5, 2, 1)) % 11
    return first == 0 and weighted_sum(value, (5, 4, 3, 2, 7, 6, 5, 4, 3, 2, 1)) % 11 == 0


def is_be_rrn(value: str) -> bool:
    """Belgian national number: 97 less the number modulo 97, with a 2 in front for the born since 2000."""
    key = int(value[9:])
    return int(value[2:4]) % 20 <= 12 and key in (97 - int(value[:9]) % 97, 97 - int("2" + value[:9]) % 97)


def is_ch_ahv(value: str) -> bool:
    """Swiss social security number: an EAN-13 that begins with 756."""
    return value.startswith("756") and weighted_sum(value, (1, 3) * 6 + (1,)) % 10 == 0


def is_at_svnr(value: str) -> bool:
    """Austrian insurance number: the fourth digit checks the rest, modulo 11; a birth date ends it."""
    check = weighted_sum(value[:3] + value[4:], (3, 7, 9, 5, 8, 4, 2, 1, 6)) % 11
    return value[0] != "0" and check == int(value[3]) and 1 <= int(value[4:6]) <= 31


def is_pt_nif(value: str) -> bool:
    """Portuguese tax number: weights 9 to 2, modulo 11."""
    check = 11 - weighted_sum(value, range(9, 1, -1)) % 11
    return value[0] != "0" and (0 if check >= 10 else check) == int(value[8])


def is_ca_sin(value: str) -> bool:
    """Canadian social insurance number: Luhn."""
    return is_luhn(value) and len(set(value)) > 2


def is_au_tfn(value: str) -> bool:
    """Australian tax file number: weighted sum modulo 11."""
    return weighted_sum(value, (1, 4, 3, 7, 5, 8, 6, 9, 10)) % 11 == 0


def is_kr_rrn(value: str) -> bool:
    """South Korean registration number: birth date and weighted check digit."""
    check = (11 - weighted_sum(value, (2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5)) % 11) % 10
    return is_day_and_month(int(value[4:6]), int(value[2:4])) and check == int(value[12])


def is_cn_resident_id(value: str) -> bool:
    """Chinese resident identity number (GB 11643): birth date, and ISO 7064 mod 11-2 with X for ten."""
    if not is_date(int(value[6:10]), int(value[10:12]), int(value[12:14])) or value[6:8] not in ("18", "19", "20"):
        return False
    remainder = sum(int(digit) * pow(2, 17 - place, 11) for place, digit in enumerate(value[:17])) % 11
    return "10X98765432"[remainder] == value[17]


def is_mx_curp(value: str) -> bool:
    """Mexican CURP: birth date, and a last digit that is a weighted sum modulo 10."""
    alphabet = "0123456789ABCDEFGHIJKLMNÑOPQRSTUVWXYZ"
    total = sum(alphabet.index(char) * (18 - place) for place, char in enumerate(value[:17]))
    return is_day_and_month(int(value[8:10]), int(value[6:8])) and (10 - total % 10) % 10 == int(value[17])


def is_za_id(value: str) -> bool:
    """South African identity number: birth date, citizenship 0 or 1, Luhn."""
    return is_day_and_month(int(value[4:6]), int(value[2:4])) and value[10] in "012" and is_luhn(value)


def is_tr_kimlik(value: str) -> bool:
    """Turkish identification number: two check digits, modulo 10."""
    digits = [int(digit) for digit in value]
    tenth = (sum(digits[0:9:2]) * 7 - sum(digits[1:8:2])) % 10
    return digits[0] != 0 and digits[9] == tenth and digits[10] == sum(digits[:10]) % 10


def is_sg_nric(value: str) -> bool:
    """Singaporean NRIC and FIN: the last letter is a weighted sum modulo 11; T and G, from 2000, add 4."""
    total = weighted_sum(value[1:8], (2, 7, 6, 5, 4, 3, 2)) + (4 if value[0] in "TG" else 0)
    return ("JZIHGFEDCBA" if value[0] in "ST" else "XWUTRQPNMLK")[total % 11] == value[8]


def is_in_pan(value: str) -> bool:
    """Indian permanent account number: the fourth letter is the kind of holder."""
    return value[3] in "ABCFGHJLPT"
