"""Which layers of a foreign ``config.json`` are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sheepop.checkpoint.exchange.fields import Settings
from sheepop.checkpoint.exchange.given import Given
from sheepop.model.config import ModelConfig


@dataclass(frozen=True)
class SparseLayers:
    """Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` names it (Qwen).

    It stands behind the fields of the experts, and takes them away when no layer has any.
    """

    keys: ClassVar[tuple[str, ...]] = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, given: Given, settings: Mapping[str, Any]) -> Settings:
        """The layers with experts."""
        step = given.typed("decoder_sparse_step", int, 1)
        if step < 1:
            raise given.problem("decoder_sparse_step", "is not a number of layers")
        dense = given.take("mlp_only_layers", None)
        dense = [] if dense is None else dense
        if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
            raise given.problem("mlp_only_layers", "is not a list of layers")
        num_layers = settings["num_layers"]
        without = set(dense)
        layers = [layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in without]
        if not layers or settings["experts"]["count"] == 0:
            return {"experts": None}
        return {"experts.layers": None if len(layers) == num_layers else tuple(layers)}

    def write(self, config: ModelConfig) -> Settings:
        """The layers without experts, by name."""
        dense = [layer for layer in range(config.num_layers) if not config.has_experts(layer)]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
