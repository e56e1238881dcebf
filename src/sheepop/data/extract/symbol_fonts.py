"""The characters that the fonts Symbol and Wingdings show in place of the codes in a document."""

from __future__ import annotations

# Symbol: Adobe's encoding, from 0x20 and from 0xA0.
_SYMBOL = dict(
    enumerate(" !∀#∃%&∋()∗+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼", 0x20)
)
_SYMBOL |= dict(enumerate("€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊〈®©™∑⎛⎜⎝⎡⎢⎣⎧⎨⎩⎪", 0xA0))
_SYMBOL |= dict(enumerate("〉∫⌠⎮⌡⎞⎟⎠⎤⎥⎦⎫⎬⎭", 0xF1))
# Wingdings: signs that stand for words, bullets, numbers in circles, arrows, ticks.
_WINGDINGS = dict(zip(b"!\"#$%&'()*+,-./", "✏✂✁👓🕭🕮🕯🕿✆✉🖂📪📫📬📭", strict=True)) | {0x20: " "}
_WINGDINGS |= dict(enumerate("☜☞☝☟", 0x45)) | dict(enumerate("☺😐☹", 0x4A)) | dict(enumerate("●❍■□🞐❑❒⬧⧫◆❖⬥", 0x6C))
_WINGDINGS |= dict(enumerate("⓪①②③④⑤⑥⑦⑧⑨⑩⓿❶❷❸❹❺❻❼❽❾❿", 0x80)) | {0x9E: "·", 0x9F: "•", 0xA7: "▪", 0xA8: "◻"}
_WINGDINGS |= dict(zip((0xD8, *range(0xDF, 0xE3), 0xE8, 0xEF, 0xF0, *range(0xFB, 0xFF)), "➢←→↑↓➔⇦⇨✗✔☒☑", strict=True))
SYMBOL_FONTS = {"symbol": _SYMBOL, "wingdings": _WINGDINGS}
"""Characters by code and by the name of the font in lower case."""


def in_symbol_font(text: str, font: str) -> tuple[str, int]:
    """Returns the characters shown, and the number of codes without a known one, which are left out.

    Codes may be in the private area from U+F000 (ECMA-376, part 1, 17.3.3.30); other fonts leave letters as they are.
    """
    table = SYMBOL_FONTS.get(font.lower())
    shown, unknown = [], 0
    for char in text:
        code = ord(char)
        if 0xF000 <= code <= 0xF0FF or table is not None:
            found = (_SYMBOL if table is None else table).get(code & 0xFF if code >= 0xF000 else code)
            unknown += found is None
            shown.append(found or "")
        else:
            shown.append(char)
    return "".join(shown), unknown
