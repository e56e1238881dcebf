"""Rows of data from the answers of a log, in the forms that `sheepop tune` and `sheepop eval` read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import orjson

from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.search import jaccard
from sheepop.data.duplicates.signatures import band_hashes, compared_shingles, minima
from sheepop.monitor.answered import Answered
from sheepop.tokenizer.messages import Message

Kind = Literal["sft", "preferences", "eval"]


def supervised_rows(
    answers: Iterable[Answered], left_out: Counter[str], *, unvoted: bool = False
) -> Iterator[dict[str, Any]]:
    """Yields the answers with more good votes than bad ones, with `unvoted` also those without a vote, to learn.

    An answer that has no end is not learnt; `left_out` counts these.
    """
    for each in answers:
        if each.votes <= 0 and (each.num_votes or not unvoted):
            continue
        if each.ended != "whole" or each.reason == "length":
            left_out["the answer has no end"] += 1
            continue
        yield _row(each, **_to_learn(each))


def preference_rows(answers: Iterable[Answered]) -> Iterator[dict[str, Any]]:
    """Yields a pair for each two answers to the same prompt of which one has good votes and the other bad ones."""
    by_prompt: dict[bytes, list[Answered]] = defaultdict(list)
    for each in answers:
        if each.votes:
            by_prompt[orjson.dumps((each.prompt, each.tools), default=str)].append(each)
    for voted in by_prompt.values():
        for good in (each for each in voted if each.votes > 0):
            for bad in (each for each in voted if each.votes < 0 and each.answer != good.answer):
                pair = {"chosen": _as_turns(good.answer), "rejected": _as_turns(bad.answer)}
                yield _row(good, prompt=_prompt(good), **pair, rejected_source=bad.place)


def evaluation_rows(answers: Iterable[Answered]) -> Iterator[dict[str, Any]]:
    """Yields the prompts whose answers have votes; a good answer becomes the reference. Each prompt occurs once."""
    found: dict[bytes, dict[str, Any]] = {}
    for each in answers:
        if not each.votes:
            continue
        key = orjson.dumps((each.prompt, each.tools), default=str)
        if key not in found or (each.votes > 0 and "reference" not in found[key]):
            reference = {"reference": each.text} if each.votes > 0 and each.text.strip() else {}
            found[key] = _row(each, prompt=_prompt(each), **reference)
    yield from found.values()


def without_near_copies(rows: Sequence[dict[str, Any]], config: NearDuplicatesConfig) -> list[dict[str, Any]]:
    """Returns the rows without those of which an earlier one is a near copy; see `NearDuplicatesConfig`.

    Rows are compared by all of their texts.
    """
    kept: list[dict[str, Any]] = []
    shingles: list[Any] = []
    seen: set[str] = set()
    by_band: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in rows:
        text = text_of(row)
        own = compared_shingles(text, "prose", config)
        bands = list(enumerate(band_hashes(minima(own, config.bands * config.rows), config.bands).tolist()))
        near = {number for band in bands for number in by_band[band]} if own.size else set()
        if text in seen or any(jaccard(own, shingles[number]) >= config.threshold for number in near):
            continue
        seen.add(text)
        for band in bands if own.size else ():
            by_band[band].append(len(kept))
        kept.append(row)
        shingles.append(own)
    return kept


def text_of(row: dict[str, Any]) -> str:
    """All texts of a row, without where they are from."""
    return "\n".join(_strings([value for key, value in row.items() if not key.endswith("source")]))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            if key != "role":
                yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _row(answered: Answered, **content: Any) -> dict[str, Any]:
    tools = {"tools": list(answered.tools)} if answered.tools else {}
    return {**content, **tools, "source": answered.place, "model": answered.model}


def _prompt(answered: Answered) -> Any:
    return answered.prompt if isinstance(answered.prompt, str) else list(answered.prompt)


def _as_turns(answer: str | Message) -> Any:
    return answer if isinstance(answer, str) else [answer]


def _to_learn(answered: Answered) -> dict[str, Any]:
    if isinstance(answered.prompt, str):
        return {"prompt": answered.prompt, "completion": answered.text}
    return {"messages": [*answered.prompt, answered.answer]}
