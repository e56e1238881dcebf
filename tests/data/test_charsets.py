"""Names of encodings, against the standard's table; and encodings that are found, against the text that was encoded."""

from __future__ import annotations

import codecs
import unicodedata

import pytest

from sheepop.data.charsets import codec_of
from sheepop.data.decoding import decode

# Article 1 of the Universal Declaration of Human Rights, and other sentences.
TEXTS = {
    "tr": (
        "cp1254 cp857",
        "Pijamalı hasta yağız şoföre çabucak güvendi. Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar.",
    ),
    "cs": (
        "cp1250 iso8859_2 cp852",
        "Všichni lidé rodí se svobodní a sobě rovní co do důstojnosti a práv. Příliš žluťoučký kůň úpěl ďábelské ódy.",
    ),
    "he": ("cp1255 iso8859_8", "כל בני אדם נולדו בני חורין ושווים בערכם ובזכויותיהם."),
    "th": ("cp874", "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์"),
    "fr": (
        "cp1252 cp437 mac_roman cp850",
        "Élève à l'école : où êtes-vous né ? Ça va très bien. Les forêts françaises sont belles l'été.",
    ),
    "de": (
        "cp1252 cp437 mac_roman cp850",
        "Die Straße führt über die Brücke zum größten Gebäude der Stadt. Äpfel, Öl, Übung.",
    ),
    "es": ("cp1252 cp437 mac_roman cp850", "¿Qué pasó? ¡Mañana será otro día! El niño comió una manzana en el jardín."),
    "pt": ("cp1252 mac_roman cp850", "Formação e Verão: promoção única, só até amanhã. Não há nada como o coração."),
    "short": ("cp1252", "café\n"),
    "sv": ("cp1252 mac_roman cp437", "Å ä ö är på två. Alla människor är födda fria och lika i värde och rättigheter."),
    "pl": ("cp1250 iso8859_2", "Zażółć gęślą jaźń. Wszyscy ludzie rodzą się wolni i równi pod względem swej godności."),
    "hu": (
        "cp1250 iso8859_2 cp852",
        "Minden emberi lény szabadon születik és egyenlő méltósága és joga van. Árvíztűrő tükörfúrógép.",
    ),
    "ro2": (
        "cp1250 iso8859_2",
        "Toate fiinţele umane se nasc libere şi egale în demnitate şi în drepturi. Ele sunt înzestrate cu raţiune.",
    ),
    "hr": (
        "cp1250 iso8859_2",
        "Sva ljudska bića rađaju se slobodna i jednaka u dostojanstvu i pravima. Žut, čaša, šuma, đak.",
    ),
    "lt": ("cp1257", "Visi žmonės gimsta laisvi ir lygūs savo orumu ir teisėmis. Jiems suteiktas protas ir sąžinė."),
    "lv": ("cp1257", "Visi cilvēki piedzimst brīvi un vienlīdzīgi savā pašcieņā un tiesībās."),
    "et": ("cp1257 cp1252", "Kõik inimesed sünnivad vabadena ja võrdsetena oma väärikuselt ja õigustelt. Šokolaad."),
    "is": ("cp1252", "Hver maður er borinn frjáls og jafn öðrum að virðingu og réttindum. Þeir eru gæddir vitsmunum."),
    "ru": (
        "cp1251 koi8_r cp866 iso8859_5 mac_cyrillic",
        "Это русский текст. Москва является столицей России, а Санкт-Петербург стоит на Неве.",
    ),
    "uk": (
        "cp1251 koi8_u iso8859_5",
        "Всі люди народжуються вільними і рівними у своїй гідності та правах. Їхній ґрунт.",
    ),
    "bg": ("cp1251", "Всички хора се раждат свободни и равни по достойнство и права."),
    "sr": ("cp1251 iso8859_5", "Сва људска бића рађају се слободна и једнака у достојанству и правима."),
    "el": ("cp1253 iso8859_7", "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα."),
    "ar": ("cp1256 iso8859_6", "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق."),
    "fa": ("cp1256", "تمام افراد بشر آزاد به دنيا مي آيند و از لحاظ حيثيت و حقوق با هم برابرند"),
    "ja": ("cp932 euc_jp", "これは日本語の文章です。東京は日本の首都であり、多くの人々が住んでいます。"),
    "zh": ("gb18030", "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心。"),
    "zht": ("big5hkscs", "人人生而自由，在尊嚴和權利上一律平等。他們賦有理性和良心。"),
    "ko": ("cp949", "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다."),
    "vi": ("cp1258", "Tất cả mọi người sinh ra đều được tự do."),
    "en": ("cp1252", "It’s a “quoted” text – with dashes… and the price is 5 €."),
    "py": ("cp1252", "# auteur: Jérôme\ndef f(x):\n\treturn x + 1\r\n"),
    "pangram": ("cp1255", "שלום עולם, זה משפט קצר על דגם מפואר ודוגמה נוספת 0.\n"),
    "thp": ("cp874", "ประชุมคณะกรรมการจะเริ่มเวลาเก้าโมงเช้า โปรดนั่งที่"),
    "mt": ("iso8859_3", "Il-bnedmin kollha jitwieldu ħielsa u ugwali fid-dinjità u d-drittijiet. Ġeneru ċar żgħir"),
    "eo": ("iso8859_3", "Ĉiuj homoj estas denaske liberaj kaj egalaj laŭ digno kaj rajtoj. Ŝi ĵetis ĝin."),
}


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        pytest.param(encoding, text, id=f"{name} {encoding}")
        for name, (encodings, text) in TEXTS.items()
        for encoding in encodings.split()
    ],
)
def test_the_encoding_of_a_sentence_is_found(encoding: str, text: str) -> None:
    # Vietnamese in this encoding has its tones apart; the Romanian letters with commas are not in the older ones.
    data = (
        unicodedata.normalize("NFD", text).encode(encoding, "ignore")
        if encoding == "cp1258"
        else text.encode(encoding, "ignore")
    )
    expected = data.decode(encoding)
    assert decode(data).text == expected
    assert decode(b"A line in English.\n" * 40_000 + data + b"\n").text.endswith(f"{expected}\n")


@pytest.mark.parametrize(
    ("label", "codec"),
    [
        ("iso-8859-8-i", "iso8859_8"),
        ("ISO_8859-1:1987", "cp1252"),
        ("csISO88596E", "iso8859_6"),
        ("x-mac-cyrillic", "mac_cyrillic"),
        ("windows-874", "cp874"),
        ("dos-874", "cp874"),
        ("x-sjis", "cp932"),
        ("windows-31j", "cp932"),
        ("cn-big5", "big5hkscs"),
        ("koi8-ru", "koi8_u"),
        ("unicode-1-1-utf-8", "utf_8"),
        (" Latin1 ", "cp1252"),
    ],
)
def test_the_labels_of_the_standard_are_known(label: str, codec: str) -> None:
    assert codecs.lookup(codec_of(label)).name == codecs.lookup(codec).name


def test_an_unknown_label_is_an_error() -> None:
    with pytest.raises(LookupError):
        codec_of("x-user-defined")


def test_every_label_means_what_the_table_of_the_standard_says() -> None:
    labels = pytest.importorskip("webencodings.labels", reason="webencodings, the table as a package, is not installed")
    wider = {"shift_jis": "cp932", "euc-kr": "cp949", "big5": "big5hkscs", "gbk": "gb18030", "macintosh": "mac-roman"}
    wider |= {"iso-8859-8-i": "iso8859-8", "x-mac-cyrillic": "mac-cyrillic", "windows-874": "cp874"}
    # Stateful encodings that the standard forbids, and UTF-16, which the label of a page cannot mean.
    left_out = {"replacement", "x-user-defined", "utf-16le", "utf-16be"}
    checked = {label: name for label, name in labels.LABELS.items() if name not in left_out}
    assert len(checked) > 190
    for label, name in checked.items():
        assert codecs.lookup(codec_of(label)).name == codecs.lookup(wider.get(name, name)).name, label
