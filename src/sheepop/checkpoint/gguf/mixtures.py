"""How a model is quantised: the type of each tensor of a file, by the rules of llama.cpp's ``llama-quantize``.

Tensors to which the result is most sensitive get more bits: the output projection, and in the mixtures called ``_m``
the values and the last matrix of the feed-forward network in about half of the layers. A row that is not a multiple of
256 numbers cannot have a type with blocks of 256, and gets the next larger type with blocks of 32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sheepop.checkpoint.gguf.quantized_types import TYPES, TensorType
from sheepop.checkpoint.gguf.rows import EMBEDDING_NAME, OUTPUT_NAME
from sheepop.model.config import ModelConfig

_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_LARGER = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
# In a model with this many layers and fewer values than queries, the values matter more.
_LAYERS_OF_70B = 80


@dataclass(frozen=True)
class Mixture:
    """The type of most matrices, the value of general.file_type, and whether sensitive matrices get more bits."""

    most: str
    file_type: int
    medium: bool = False

    def type_of(self, name: str, columns: int, config: ModelConfig) -> TensorType:
        """Returns the type of the matrix `name` in a file, whose rows have `columns` numbers."""
        found = self._wanted(name, columns, config)
        return TYPES[_LARGER.get(found, found) if columns % TYPES[found].block else found]

    def _wanted(self, name: str, columns: int, config: ModelConfig) -> str:
        if not self.most.startswith("q"):
            return self.most
        if name == OUTPUT_NAME or (name == EMBEDDING_NAME and config.tie_weights):
            return "q8_0" if self.most == "q8_0" or columns % TYPES[self.most].block else "q6_k"
        place = _IN_LAYER.fullmatch(name)
        return self.most if place is None else self._in_layer(int(place[1]), place[2], config)

    def _in_layer(self, layer: int, part: str, config: ModelConfig) -> str:
        layers, eight_experts = config.num_layers, config.experts is not None and config.experts.count == 8
        eighth = layers // 8
        more = self.medium and (layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2)
        if part in ("attn_v", "attn_k", "attn_qkv") and eight_experts:
            return "q8_0"
        if (part in ("attn_v", "attn_qkv") or part.startswith("ffn_down")) and more:
            return "q6_k"
        values = part in ("attn_v", "attn_qkv") and layers == _LAYERS_OF_70B and config.kv_heads < config.num_heads
        if self.most == "q4_k" and (values or (part == "attn_output" and eight_experts)):
            return "q5_k"
        return self.most


MIXTURES = {
    "f32": Mixture("f32", 0),
    "f16": Mixture("f16", 1),
    "bf16": Mixture("bf16", 32),
    "q8_0": Mixture("q8_0", 7),
    "q6_k": Mixture("q6_k", 18),
    "q5_k_m": Mixture("q5_k", 17, medium=True),
    "q5_0": Mixture("q5_0", 8),
    "q4_k_m": Mixture("q4_k", 15, medium=True),
    "q4_0": Mixture("q4_0", 2),
}
"""How the matrices of a file can be stored, by name; the names are those of ``llama-quantize`` in lower case."""
