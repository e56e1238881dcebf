"""What the tests of duplicates compare with: sets of words made one character at a time, and all pairs of documents."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from sheepop.data.documents import Document
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.search import Removed, find_duplicates
from sheepop.data.duplicates.signatures import PartSignatures, SignatureWriter

_NAMES_WITHOUT_SPACES = (
    *("CJK", "HIRAGANA", "KATAKANA", "HENTAIGANA", "HALFWIDTH KATAKANA", "BOPOMOFO", "THAI", "LAO", "MYANMAR"),
    *("KHMER", "TANGUT", "NUSHU", "KHITAN", "IDEOGRAPHIC", "HANGZHOU", "MASU", "VERTICAL KANA", "COMBINING KATAKANA"),
    *("VERTICAL IDEOGRAPHIC", "HANGUL SINGLE DOT", "HANGUL DOUBLE DOT", "OLD CHINESE", "VIETNAMESE ALTERNATE"),
)


class Slow:
    """Shingles as sets of tuples of words, in plain Python."""

    @staticmethod
    def alone(character: str) -> bool:
        name = unicodedata.name(character, "")
        return (name.startswith(_NAMES_WITHOUT_SPACES) and "TALLY" not in name) or ord(character) >= 0x20000

    def words(self, text: str, kind: str) -> list[str]:
        words: list[str] = []
        before = "between"
        for character in text:
            role = self._role(character, kind in ("code", "table"))
            if role == "alone" or (role == "word" and before != "word") or (role == "attached" and not words):
                words.append("")
            if role != "between":
                lowered = character.lower()
                is_prose = kind in ("prose", "chat")
                words[-1] += lowered if is_prose and len(lowered) == 1 else character
            before = role
        return [word[start : start + 64] for word in words for start in range(0, len(word), 64)]

    @staticmethod
    @cache
    def _role(character: str, code: bool) -> str:
        category = unicodedata.category(character)[0]
        if category in "LNM" or ord(character) >= 0x20000:
            return "alone" if Slow.alone(character) else "word"
        if code and character == "_":
            return "word"
        return "between" if not code or category in "ZC" else "attached"

    def shingle_list(self, text: str, kind: str, count: int = 5) -> list[tuple[str, ...]]:
        words = self.words(text, kind)
        rule = "words" if kind in ("prose", "chat") else "tokens"
        return [(rule, *words[i : i + count]) for i in range(max(1, len(words) - count + 1))] if words else []

    def jaccard(self, first: tuple[str, str], second: tuple[str, str], count: int = 5) -> float:
        """The similarity of two (text, kind)."""
        a, b = set(self.shingle_list(*first, count)), set(self.shingle_list(*second, count))
        return len(a & b) / len(a | b) if a | b else 1.0

    def duplicates(
        self, documents: Sequence[Document], config: NearDuplicatesConfig, *, num_protected: int = 0, exact: bool = True
    ) -> dict[int, tuple[str, int, float]]:
        """What goes, by comparing all pairs: ordinal to (reason, ordinal of the other, similarity)."""
        gone: dict[int, tuple[str, int, float]] = {}
        first: dict[str, int] = {}
        copies = set()
        for number, document in enumerate(documents):
            if exact and first.setdefault(document.text, number) != number:
                copies.add(number)
                if number >= num_protected:
                    gone[number] = ("exact", first[document.text], 1.0)
        sets = [set(self.shingle_list(d.text, d.kind, config.shingle_words)) for d in documents]
        compared = [n for n in range(len(documents)) if n not in copies and sets[n]]
        compared.sort(key=lambda n: (n >= num_protected, -len(documents[n].text.encode()) * (n >= num_protected), n))
        for place, number in enumerate(compared):
            for better in compared[:place] if number >= num_protected else []:
                similarity = len(sets[number] & sets[better]) / len(sets[number] | sets[better])
                if better not in gone and similarity >= config.threshold:
                    gone[number] = ("near", better, similarity)
                    break
        return gone


class Maker:
    """Near duplicates of a wanted similarity: words replaced, inserted or left out at random places."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def prose(self, words: int) -> list[str]:
        return [self._word() + self.random.choice(["", "", "", "", ",", ".", ";", "\n"]) for _ in range(words)]

    def code(self, words: int) -> list[str]:
        ends = ["", "(", "):\n    ", " = ", ".", ", ", "]", " + ", "\n", "():\n        return "]
        return [self._word() + self.random.choice(ends) for _ in range(words)]

    def edited(self, words: list[str], similarity: float) -> list[str]:
        """With E edits far apart, 5 E of S shingles differ on both sides: J = (S - 5 E) / (S + 5 E)."""
        shingles = len(words) - 4
        edits = round(shingles * (1 - similarity) / (1 + similarity) / 5)
        edits = min(edits, (len(words) - 10) // 6)
        edited = list(words)
        for place in sorted(self.random.sample(range(5, len(words) - 5, 6), edits), reverse=True):
            action = self.random.choice(["replace", "replace", "insert", "leave out"])
            if action == "insert":
                edited.insert(place, self._word())
            elif action == "replace":
                edited[place] = self._word()
            else:
                del edited[place]
        return edited

    def _word(self) -> str:
        return "".join(self.random.choices("abcdefghijklmnopqrstuvwxyz", k=self.random.randint(3, 9)))


Decide = Callable[..., list[Removed]]


@pytest.fixture(scope="session")
def slow() -> Slow:
    return Slow()


@pytest.fixture(scope="session")
def maker() -> Callable[[int], Maker]:
    return Maker


@pytest.fixture
def sign(tmp_path: Path) -> Callable[..., list[PartSignatures]]:
    """Writes the signatures of parts, given as lists of documents; the first `protected` of them are."""

    def run(
        parts: Sequence[Sequence[Document]], config: NearDuplicatesConfig | None, *, protected: int = 0
    ) -> list[PartSignatures]:
        signed = []
        for number, documents in enumerate(parts):
            path = tmp_path / f"{number:05d}.signatures"
            with SignatureWriter(path, config) as writer:
                for document in documents:
                    writer.add(document)
            signed.append(PartSignatures.open(path, config, protected=number < protected))
        return signed

    return run


@pytest.fixture
def decide(tmp_path: Path, sign: Callable[..., list[PartSignatures]]) -> Decide:
    """Decides about parts, given as lists of documents."""

    def run(
        parts: Sequence[Sequence[Document]],
        config: NearDuplicatesConfig | None,
        *,
        protected: int = 0,
        exact: bool = True,
        memory_bytes: int = 2**24,
    ) -> list[Removed]:
        signed = sign(parts, config, protected=protected)
        workspace = tmp_path / "workspace"
        removed = find_duplicates(
            signed, lambda number: iter(parts[number]), config, workspace, exact=exact, memory_bytes=memory_bytes
        )
        found = list(removed)
        assert not workspace.exists()
        return found

    return run
