"""The language models of multimodal families, which lie in a table and under a prefix of their own.

The rest, which turns images, video or sound into vectors among those of the text, is left out: for text alone both
compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sheepop.checkpoint.exchange.families.gemma import GEMMA3
from sheepop.checkpoint.exchange.families.gemma4 import GEMMA4
from sheepop.checkpoint.exchange.families.hybrid import FOR_IMAGES, QWEN3_5, QWEN3_5_MOE
from sheepop.checkpoint.exchange.families.llama import HEADS_OF_128, MISTRAL, QWEN3, llama_fields
from sheepop.checkpoint.exchange.family import Family, read_keys
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.mapping import Field, implied, unread
from sheepop.checkpoint.weight_files import listed

_TEXT = "text_config"
_TIED = "tie_word_embeddings"
_HEAD = "lm_head."
# The prefixes of the language model in files of several versions of transformers, and those of its family.
_PREFIXES = {
    "language_model.lm_head.": _HEAD,
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    _HEAD: _HEAD,
}
# Keys outside the table of the language model that an ordinary file has there, of which it takes those it lacks.
_OUTER = ("auto_map", "transformers_version", "eos_token_id")


class LanguageModel(NamedTuple):
    """The keys and tensors of a language model as its family has them, and notes on the parts that were left out."""

    keys: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    notes: list[str]


@dataclass(frozen=True)
class Multimodal:
    """A family whose file holds the language model `text` in the table `text_config`.

    The table's `model_type`, if any, is one of `text_types`. `fields` are the keys outside this table, without
    `tie_word_embeddings`, for which transformers takes `tied` if it is missing. `left_out` are the prefixes of tensors
    that text does not need.
    """

    model_type: str
    architecture: str
    text: Family
    text_types: tuple[str, ...]
    fields: tuple[Field, ...]
    left_out: tuple[str, ...]
    tied: bool = False

    def language_model(self, keys: Mapping[str, Any], tensors: Mapping[str, LazyTensor], where: str) -> LanguageModel:
        """Finds the language model; raises `CheckpointError` like `Family.read`, or if there is no such table."""
        given = Given(keys, where)
        given.take("model_type")
        if (classes := given.take("architectures", None)) not in (None, [self.architecture]):
            raise given.problem("architectures", f"is not {self.architecture}, but {classes!r}")
        text = given.take(_TEXT)
        inner = given.within(_TEXT, text)
        if inner.take("model_type", None) not in (None, *self.text_types):
            raise inner.problem("model_type", f"is not the language model {' or '.join(self.text_types)}")
        tied = given.typed(_TIED, bool, self.tied)
        _, ignored = read_keys(self.fields, given, self.model_type)
        found: dict[str, LazyTensor] = {}
        aside = []
        for name, tensor in tensors.items():
            prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
            ours = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
            if name.removeprefix("model.").startswith(self.left_out):
                aside.append(name)
            else:
                found[ours if ours not in found else name] = tensor
        notes = [f"Ignored keys of {where}, which transformers does not read: {', '.join(ignored)}."] if ignored else []
        if aside:
            notes.append(f"Left out {len(aside)} tensors that text does not need: {listed(sorted(aside), 3)}.")
        outer = {name: keys[name] for name in _OUTER if keys.get(name) is not None}
        # Like transformers, which unties a projection that is stored, unless it equals the embedding.
        tied = tied and not (_TIED not in keys and any(name.startswith(_HEAD) for name in found))
        own = {"model_type": self.text.model_type, _TIED: tied}
        return LanguageModel({**outer, **text, "architectures": None, **own}, found, notes)


_SIGLIP_PARTS = ("vision_tower.", "multi_modal_projector.")
_QWEN3_VL_TEXT = replace(
    QWEN3,
    fields=(
        *implied(qk_norm="head"),
        *llama_fields(
            151936, 128000, d_ff=22016, num_kv_heads=32, head_dim=HEADS_OF_128,
            rope=RopeParameters(base=500_000.0, for_images=FOR_IMAGES),
        ),
    ),
)  # fmt: skip
_OF_IMAGES = unread("vision_config", "image_token_index", "image_token_id")
_QWEN_KEYS = (
    unread("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
)
_GEMMA_KEYS = unread("mm_tokens_per_image", "boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id")
_MISTRAL_KEYS = unread(
    "projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size"
)

_FAMILIES = (
    Multimodal(
        "gemma3", "Gemma3ForConditionalGeneration", GEMMA3, ("gemma3_text",),
        (_OF_IMAGES, _GEMMA_KEYS), _SIGLIP_PARTS,
        tied=True,
    ),
    Multimodal(
        "gemma4", "Gemma4ForConditionalGeneration", GEMMA4, ("gemma4_text",),
        (
            unread(
                "vision_config", "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id",
                "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id", "vision_soft_tokens_per_image",
            ),
        ),
        ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
        tied=True,
    ),
    Multimodal(
        "mistral3", "Mistral3ForConditionalGeneration", MISTRAL, ("mistral",),
        (_OF_IMAGES, _MISTRAL_KEYS), _SIGLIP_PARTS,
        tied=True,
    ),
    *(
        Multimodal(name, f"{architecture}ForConditionalGeneration", text, (f"{name}_text",), _QWEN_KEYS, ("visual.",))
        for name, architecture, text in (
            ("qwen3_vl", "Qwen3VL", _QWEN3_VL_TEXT),
            ("qwen3_5", "Qwen3_5", QWEN3_5),
            ("qwen3_5_moe", "Qwen3_5Moe", QWEN3_5_MOE),
        )
    ),
)  # fmt: skip

MULTIMODAL: dict[str, Multimodal] = {family.model_type: family for family in _FAMILIES}
