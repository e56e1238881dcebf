"""The names of a foreign file's tensors, brought to those of the family's table."""

from __future__ import annotations

from collections.abc import Mapping

from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.lazy_tensor import LazyTensor


def canonical(tensors: Mapping[str, LazyTensor], family: Family) -> tuple[dict[str, LazyTensor], list[str]]:
    """The tensors under the names of the table, and the names of those that hold no weights and are left out.

    Some published files lack the prefix of the table, and some versions of transformers name the output projection
    otherwise.
    """
    heads = {rule.theirs for rule in family.tensors if not rule.theirs.startswith(family.prefix)} | {*family.renamed}
    prefixed = any(name.startswith(family.prefix) for name in tensors)
    found: dict[str, LazyTensor] = {}
    left_out = []
    for name, tensor in tensors.items():
        if name.endswith(family.buffers or ("\0",)):
            left_out.append(name)
            continue
        full = name if prefixed or name in heads else family.prefix + name
        full = family.renamed.get(full, full)
        found[full if full not in found else name] = tensor
    return found, left_out
