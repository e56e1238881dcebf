"""What a parameter is for, by its name and shape: initial weights, decay and learning rates go by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

# vector: biases, norms, sinks. embedding: rows that are looked up. matrix: from activations of the network's width to
# others of its width. router: to one score an expert. head: to logits.
Role = Literal["vector", "embedding", "matrix", "router", "head"]

_BY_OWNER: dict[str, Role] = {"embedding": "embedding", "table": "embedding", "router": "router", "lm_head": "head"}


def parameter_role(name: str, shape: Sequence[int]) -> Role:
    """The role of the parameter of this name in a state dict; the stacked biases of experts are vectors too."""
    owner = name.removesuffix(".weight").rpartition(".")[2]
    if len(shape) < 2 or owner.endswith("_bias"):
        return "vector"
    return _BY_OWNER.get(owner, "matrix")
