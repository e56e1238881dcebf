"""What in source code is not worth learning from: the output of programs, minified files, data in the guise of code.

The bounds of the preset ``web`` follow The Stack (Kocetkov et al. 2022, https://arxiv.org/abs/2211.15533, section 3).
"""

from __future__ import annotations

from sheepop.data.clean.composition import LONG_LINE, Composition, characters_in_long_lines, encoded_characters
from sheepop.data.clean.quality_config import CodeConfig
from sheepop.data.clean.stage import Removal
from sheepop.data.extract.generated import is_generated_name, is_generated_text


def code_quality(text: str, name: str, config: CodeConfig) -> Removal | None:
    """Why the source code in a file of this name is not worth keeping, or None."""
    if config.generated:
        if is_generated_name(name.rpartition("/")[2]):
            return Removal("generated", f"its name says that a program wrote it: {name.rpartition('/')[2]}")
        if is_generated_text(text):
            return Removal("generated", "its first lines say that a program wrote it")
    found = Composition.of(text)
    if not found.visible:
        return Removal("no letters", "it contains only white space")
    lines = text.removesuffix("\n").split("\n")
    return _lengths_of_lines(lines, found, config) or _content(text, found, config)


def _lengths_of_lines(lines: list[str], found: Composition, config: CodeConfig) -> Removal | None:
    mean = found.characters / len(lines)
    if mean > config.max_mean_line_length:
        most = config.max_mean_line_length
        return Removal("long lines", f"lines of {mean:,.0f} characters on average, more than {most:,.0f}")
    longest = max(map(len, lines))
    if longest > config.max_line_length:
        return Removal("long lines", f"a line of {longest:,} characters, more than {config.max_line_length:,}")
    if longest > LONG_LINE:
        share = characters_in_long_lines(lines) / found.characters
        if share > config.max_in_long_lines:
            most = config.max_in_long_lines
            what = f"of the file is in lines of more than {LONG_LINE:,} characters"
            return Removal("long lines", f"{share:.1%} {what}, more than {most:.0%}")
    return None


def _content(text: str, found: Composition, config: CodeConfig) -> Removal | None:
    alphanumeric = (found.letters + found.digits) / found.characters
    if alphanumeric < config.min_alphanumeric:
        detail = f"{alphanumeric:.1%} letters and digits, less than {config.min_alphanumeric:.0%}"
        return Removal("few letters", detail)
    digits = found.digits / found.visible
    if digits > config.max_digits:
        return Removal("data", f"{digits:.1%} of the characters are digits, more than {config.max_digits:.0%}")
    encoded = encoded_characters(text) / found.visible
    if encoded > config.max_encoded:
        return Removal("data", f"{encoded:.1%} is base64 or hexadecimal data, more than {config.max_encoded:.0%}")
    return None
