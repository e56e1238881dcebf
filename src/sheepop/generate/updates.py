"""Updates: what each step of an engine adds to a text, and how it fails. A stream yields the text of one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sheepop.core.errors import CheckpointError, SheepOpError, UsageError, first_few
from sheepop.generate.request import Candidate, Completion, FinishReason, Request
from sheepop.generate.sampler import Likeliest


class Update(NamedTuple):
    """The result of a step for one text, `index` of its request; a snapshot, which stays as it is while the text grows.

    It has the new tokens and the text that can be shown now. `finish_reason` is set in the last update of a text,
    `stop` to the stop string that ended it, and `error` if its request failed.
    """

    request: Request
    index: int  # type: ignore[assignment]
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    likeliest: tuple[Likeliest, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    error: SheepOpError | None = None

    @classmethod
    def of(cls, candidate: Candidate, text: str, first: int = 0) -> Update:
        """The update with `text` and the tokens of `candidate` from index `first` on."""
        return cls(
            candidate.request,
            candidate.index,
            text,
            tuple(candidate.token_ids[first:]),
            tuple(candidate.logprobs[first:]),
            tuple(candidate.likeliest[first:]),
            candidate.finish_reason,
            candidate.stop,
        )


class NotFiniteError(CheckpointError):
    """The network's logits are not finite for some prompts, whose texts are lost.

    `places` names these prompts, each with the position of the token that could not be chosen. `completions` is what
    `Generator.generate` would have returned, with None in the place of each text that is lost.
    """

    def __init__(self, places: Sequence[str], completions: Sequence[Completion | None] = ()) -> None:
        super().__init__(
            f"{first_few(places, 3)}: the network's logits are not finite (NaN or infinity), so the model is not "
            "usable: its weights are damaged or its training diverged. Use an earlier checkpoint."
        )
        self.places, self.completions = list(places), list(completions)


class TextStream:
    """Iterates over the pieces of a text as it is generated; then `completion` has the result."""

    def __init__(self, request: Request, updates: Iterator[Update]) -> None:
        self._request, self._updates = request, updates

    def __iter__(self) -> Iterator[str]:
        for update in self._updates:
            if update.error is not None:
                raise update.error
            if update.text:
                yield update.text

    @property
    def completion(self) -> Completion:
        """The completion; raises `UsageError` before the text has ended."""
        if self._request.writing:
            raise UsageError("The text is still being written: read the stream to its end first.")
        return self._request.completions()[0]
