"""An index of the tokens of a corpus by the tokens before them, for contexts of any length."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

LONGEST = 64
"""The longest context that an index may be asked for."""
_KEY_BITS = 62  # of a sorting key; the sign bit stays free


class CorpusIndex(nn.Module):
    """The tokens of a corpus, sorted by what stands before them.

    `following` (N,) has the token of every place of the corpus. Places are sorted by their contexts, which are compared
    from the last token backwards, so the places after the same k tokens are neighbours, for every k up to `longest`.
    The corpus is read as a ring: before its first token stands its last. This is the transform of Burrows and Wheeler
    (1994) of the reversed corpus, and `extend` is the backward search of Ferragina and Manzini (2000).
    """

    following: Tensor
    _keys: Tensor

    def __init__(self, following: Tensor, longest: int) -> None:
        super().__init__()
        self.longest = longest
        self.register_buffer("following", following)
        # Sorted by token, then by place; the token is stored in the high digits so that one search finds both.
        order = following.long().sort(stable=True).indices
        self.register_buffer("_keys", following.long()[order] * len(following) + order, persistent=False)

    @classmethod
    def build(cls, tokens: Tensor, vocab_size: int, longest: int) -> Self:
        """Indexes `tokens` (N,) by contexts of up to `longest` tokens.

        It sorts by a few tokens, and then by twice as many until `longest` are compared (Manber and Myers 1993).
        """
        count, backwards = len(tokens), tokens.flip(0).long()
        bits = max(1, (vocab_size - 1).bit_length())
        compared = _KEY_BITS // bits
        keys = torch.zeros(count, dtype=torch.int64)
        for distance in range(compared):
            keys = (keys << bits) | backwards.roll(-distance)
        while True:
            keys, order = keys.sort(stable=True)
            is_new = torch.ones(count, dtype=torch.int64)
            is_new[0] = 0
            is_new[1:] = keys[1:] != keys[:-1]
            if compared >= longest or int(is_new.sum()) == count - 1:
                break
            ranks = torch.empty(count, dtype=torch.int64)
            ranks[order] = is_new.cumsum(0)
            keys = ranks * count + ranks.roll(-compared)
            compared *= 2
        return cls(tokens[(count - order) % count], longest)

    def extend(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Moves `places` (...), bounds of contexts, to the bounds of these contexts with `tokens` (...) after them."""
        return torch.searchsorted(self._keys, tokens * len(self.following) + places)

    def find(self, input_ids: Tensor, depths: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The places after the last k tokens up to each of `input_ids` (B, T), as bounds (B, T), for k from 1 on.

        A context has at most `depths` (B, T) tokens. The list ends with the longest context that is found anywhere, or
        that has `longest` tokens.
        """
        begin, end = torch.zeros_like(input_ids), torch.full_like(input_ids, len(self.following))
        found: list[tuple[Tensor, Tensor]] = []
        for length in range(1, self.longest + 1):
            if length > 1:  # the context of the token before, and this token
                begin, end = (torch.nn.functional.pad(bound[:, :-1], (1, 0)) for bound in (begin, end))
            known = (end > begin) & (depths >= length)
            if not known.any():
                break
            tokens, bounds = input_ids[known], torch.zeros_like(input_ids)
            nearest, farthest = self.extend(tokens, begin[known]), self.extend(tokens, end[known])
            begin, end = bounds.masked_scatter(known, nearest), bounds.masked_scatter(known, farthest)
            found.append((begin, end))
        return found
