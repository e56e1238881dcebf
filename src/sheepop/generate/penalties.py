"""Penalties for the tokens that a prompt and its text have; how often the text has each is counted on the device.

Those for presence and frequency are as OpenAI's API defines them; that for repetition is of Keskar et al. 2019, "CTRL",
section 4.1, in the form that lowers negative logits too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.generate.config import GenerationConfig
from sheepop.generate.transfers import upload, with_sampled
from sheepop.model.fused import power_of_two


class Occurrences:
    """The tokens for which a text is penalised: those of its prompt and its own, `token_ids`, which may grow.

    At first there is at least one.
    """

    def __init__(self, prompt_ids: Iterable[int], token_ids: Sequence[int] = ()) -> None:
        self.prompt_ids, self.token_ids = list(dict.fromkeys(prompt_ids)), token_ids


Penalised = tuple[int, GenerationConfig, Occurrences, Sequence[int]]
"""The number of a row of logits, its settings, the tokens for which it is penalised, and those that follow them."""


@dataclass
class _Place:
    """The slot of a text, the columns that it has there, and how many of its own tokens these count."""

    slot: int
    width: int
    num_counted: int = 0


class Penalties:
    """Counts the tokens of texts on `device`, where it need not wait for those that the host does not know yet.

    A slot has the tokens of a text and their counts, two rows of columns. A token may have several columns, which have
    the same count: 0 if only the prompt has it. Unused columns repeat the first.
    """

    def __init__(self, device: torch.device) -> None:
        self._state = torch.zeros(2, 0, 0, dtype=torch.long, device=device)
        self._places: weakref.WeakKeyDictionary[Occurrences, _Place] = weakref.WeakKeyDictionary()
        self._free: list[int] = []

    @torch.inference_mode()
    def apply(self, scores: Tensor, rows: Sequence[Penalised], sampled: Tensor | None) -> None:
        """Penalises `rows` of logits `scores` (B, V), in place; `sampler.Row` explains what follows, and `sampled`."""
        texts = {text: following for _, _, text, following in rows}
        for text in texts:
            if text not in self._places:
                self._open(text)
        missing = {text: self._missing(text, following) for text, following in texts.items()}
        guesses = [[token_id for token_id in following if token_id >= 0] for *_, following in rows]
        width = max(self._places[text].width + len(more) for text, more in missing.items()) + max(map(len, guesses))
        self._make_room(width)
        for number in range(max(map(len, missing.values()))):
            new = [(self._places[text], more[number]) for text, more in missing.items() if number < len(more)]
            _add(self._state, [(place.slot, place.width, token_id) for place, token_id in new], sampled)
            for place, _ in new:
                place.width, place.num_counted = place.width + 1, place.num_counted + 1
        places = [self._places[text] for _, _, text, _ in rows]
        indices = torch.tensor([[place.slot for place in places], [number for number, *_ in rows]])
        slots, numbers = upload(indices, scores.device)
        state = self._state[:, slots, :width]
        for number in range(max(map(len, guesses))):
            more = [(row, each) for row, each in enumerate(guesses) if number < len(each)]
            _add(state, [(row, places[row].width + number, each[number]) for row, each in more])
        tokens, counts = state
        settings = torch.tensor([_settings(config) for _, config, *_ in rows])
        repetition, presence, frequency = upload(settings.to(scores.dtype), scores.device).T[..., None]
        found = scores[numbers[:, None], tokens]
        subtracted = torch.where(counts > 0, presence + frequency * counts, 0)
        scores[numbers[:, None], tokens] = repetition_penalised(found, repetition) - subtracted

    def _open(self, text: Occurrences) -> None:
        """Gives a text a slot with the tokens of its prompt."""
        slot, first = self._free.pop() if self._free else len(self._places), text.prompt_ids or text.token_ids[:1]
        self._places[text] = _Place(slot, len(first))
        weakref.finalize(text, self._free.append, slot)
        self._make_room(len(first), slot + 1)
        tokens = upload(torch.tensor(first), self._state.device)
        self._state[:, slot] = 0
        self._state[0, slot, : len(tokens)], self._state[0, slot, len(tokens) :] = tokens, tokens[0]

    def _missing(self, text: Occurrences, following: Sequence[int]) -> list[int]:
        """The tokens of a text that are not counted yet, with numbers for those that the host does not know."""
        counted, known = self._places[text].num_counted, len(text.token_ids)
        unknown = [token_id for token_id in following if token_id < 0]
        return [*text.token_ids[counted:], *unknown[max(0, counted - known) :]]

    def _make_room(self, width: int, slots: int = 0) -> None:
        _, height, columns = self._state.shape
        if width > columns or slots > height:
            sizes = (max(columns, power_of_two(width)) - columns, max(height, power_of_two(slots)) - height)
            self._state = torch.nn.functional.pad(self._state, (0, sizes[0], 0, sizes[1]))
            self._state[:, :, columns:] = self._state[:, :, :1]


def _settings(config: GenerationConfig) -> tuple[float, float, float]:
    return config.repetition_penalty, config.presence_penalty, config.frequency_penalty


def _add(state: Tensor, new: Sequence[tuple[int, int, int]], sampled: Tensor | None = None) -> None:
    """Adds tokens to tokens and counts (2, S, C): the slot, the column and the id of each."""
    slots, columns, token_ids = upload(torch.tensor(new), state.device).T
    tokens, counts = state[:, slots]
    token_ids = with_sampled(token_ids, sampled)[:, None]
    count = torch.where(tokens == token_ids, counts, 0).amax(-1, keepdim=True) + 1
    tokens.scatter_(1, columns[:, None], token_ids)
    state[0, slots], state[1, slots] = tokens, torch.where(tokens == token_ids, count, counts)


def repetition_penalised(logits: Tensor, penalty: Tensor | float) -> Tensor:
    """Divides positive and multiplies negative logits by `penalty`."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)
