"""A model family as transformers stores it: a table of configuration keys and a table of tensor names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sheepop.checkpoint.exchange.tensor_rules import TensorGroup, TensorRule, groups
from sheepop.checkpoint.expected_tensors import expected_tensors
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import (
    Field,
    Refused,
    Settings,
    described,
    fixed,
    number,
    read_fields,
    refuse_unread,
    unread,
    write_fields,
)
from sheepop.core.errors import CheckpointError
from sheepop.model.config import ModelConfig

_QUANTISED = "means that the weights are quantised. Export them in float16 or bfloat16 first"

_WITHOUT_EFFECT = unread(
    # The origin of the file, how it is loaded, heads for other tasks, and the outputs of a forward pass.
    "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "dtype", "torch_dtype", "use_cache",
    "cache_implementation", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    "_flash_attn_2_enabled", "experts_implementation", "use_bfloat16", "torchscript", "xla_device",
    "gradient_checkpointing", "return_dict", "output_attentions", "output_hidden_states", "output_past",
    "tie_last_hidden_states", "is_decoder", "tokenizer_class", "id2label", "label2id", "num_labels", "_num_labels",
    "problem_type", "finetuning_task", "task_specific_params", "custom_pipelines", "prefix", "tf_legacy_loss",
    "ignore_keys_at_rope_validation", "transformers.js_config", "unsloth_version", "unsloth_fixed", "auto_map",
    # Special tokens, whose ids come from the tokenizer and from generation_config.json.
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
    "decoder_start_token_id", "eos_token_ids",
    # Sampling settings, which older versions stored here.
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "min_p", "epsilon_cutoff",
    "eta_cutoff", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
)  # fmt: skip
# The version of transformers with whose classes the tables were compared: a file of a newer one may have new keys.
KNOWN_VERSION = (5, 23)


@dataclass(frozen=True)
class ReadOfAll(Field):
    """Keys that transformers' shared code reads from every configuration, also where the family has no such key.

    This field must follow the fields of the family, which may have some of these keys.
    """

    keys: tuple[str, ...]

    def read(self, given: Given, settings: Settings) -> Settings:
        """Refuses each of these keys that no field has read and that is not null."""
        for name in self.keys:
            if name in given.unread() and given.take(name) is not None:
                raise given.problem(name, "is no key of this family, but transformers reads it from every model")
        return {}


READ_OF_ALL = ReadOfAll(
    # The shared code of caches, masks, rotary positions, configurations and loading.
    (
        "layer_types", "sliding_window", "attention_chunk_size", "kv_sharing_modes", "number_of_conv_states",
        "head_dim", "qk_head_dim", "original_max_position_embeddings", "attribute_map", "fusion_config",
        "transformers_weights",
    )
)  # fmt: skip

# Keys that any family may have.
SHARED: tuple[Field, ...] = (
    _WITHOUT_EFFECT,
    number("initializer_range", "initial_std", 0.02),
    Refused("quantization_config", _QUANTISED),
    Refused("compression_config", _QUANTISED),
    Refused("per_layer_config", "gives some layers different settings, which SheepOp does not support"),
    Refused("pruned_heads", "removes heads from some layers, which SheepOp does not support"),
    Refused("sparsity_config", "means that the weights are stored in a sparse format, which SheepOp does not support"),
    fixed("is_encoder_decoder", False),
    fixed("add_cross_attention", False, None),
    fixed("cross_attention_hidden_size", None),
    fixed("tie_encoder_decoder", False),
    fixed("chunk_size_feed_forward", 0),
    fixed("is_causal", True, None),
)


def with_shared(fields: Sequence[Field]) -> tuple[Field, ...]:
    """Returns the fields of a family after those of any family, of which it may have replaced some by its own."""
    own = {getattr(field, "theirs", None) for field in fields}
    return (*(field for field in SHARED if getattr(field, "theirs", "") not in own), *fields, READ_OF_ALL)


class Reading(NamedTuple):
    """A network's configuration, the keys that were ignored because the family does not have them, and other notes."""

    config: ModelConfig
    ignored: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read_keys(fields: Sequence[Field], given: Given, what: str) -> tuple[Settings, tuple[str, ...]]:
    """Returns the settings of all fields, and the keys that transformers does not read, which nothing depends on.

    `what` names the kind of model in errors. Raises `CheckpointError` for the first unsupported value, and for unknown
    keys if code that comes with the model or a newer version of transformers may read them.
    """
    settings: Settings = {}
    read_fields(with_shared(fields), given, settings)
    ignored = given.unread()
    if given.take("auto_map", None):
        refuse_unread(given, what, "which the program code that comes with the model (auto_map) may read")
    if _is_newer(version := given.take("transformers_version", None)):
        known = ".".join(map(str, KNOWN_VERSION))
        refuse_unread(given, what, f"which transformers {version} may read, of which SheepOp knows {known}")
    return settings, tuple(ignored)


def _is_newer(version: Any) -> bool:
    found = re.match(r"(\d{1,9})\.(\d{1,9})", version) if isinstance(version, str) else None
    return found is not None and (int(found[1]), int(found[2])) > KNOWN_VERSION


@dataclass(frozen=True)
class Family:
    """The meaning of ``config.json`` and of the tensors of one `model_type`.

    `architecture` is transformers' class of the language model. `prefix` begins the names of all tensors except the
    output projection, and is missing in some published files. `renamed` maps tensor names of some versions to those of
    the table. `buffers` are name suffixes of tensors that are not weights but derived from the configuration. `unused`
    are name prefixes of tensors that transformers does not read. `whole_heads`: transformers requires a width that is a
    multiple of the number of heads. `aliases` are the values of `model_type` under which the family is published too.
    `further_layers`: files may have layers after the last one, which predict further tokens and are left out.
    """

    model_type: str
    architecture: str
    fields: tuple[Field, ...]
    tensors: tuple[TensorRule, ...]
    prefix: str = "model."
    renamed: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)
    unused: tuple[str, ...] = ()
    whole_heads: bool = False
    aliases: tuple[str, ...] = ()
    further_layers: bool = False

    def read_config(self, keys: Mapping[str, Any], where: str) -> ModelConfig:
        """Returns the configuration that `read` finds."""
        return self.read(keys, where).config

    def read(self, keys: Mapping[str, Any], where: str) -> Reading:
        """Returns our configuration and the ignored keys; raises `CheckpointError` like `read_keys`."""
        given = Given(keys, where)
        given.take("model_type", None)
        classes = given.take("architectures", None)
        # With a tied output projection, the bare model has all weights of the language model.
        bare = self.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
        known = isinstance(classes, list) and (self.architecture in classes or bare in classes)
        if classes is not None and not known:
            raise given.problem("architectures", f"is not the language model {self.architecture}")
        settings, ignored = read_keys(self.fields, given, self.model_type)
        return Reading(described(settings, where), ignored, tuple(given.notes))

    def write_config(self, config: ModelConfig) -> Settings:
        """Returns the keys of ``config.json``; reading them back reveals what this family cannot express."""
        named = {"model_type": self.model_type, "architectures": [self.architecture]}
        return named | write_fields(with_shared(self.fields), config)

    def tensor_groups(self, config: ModelConfig) -> list[TensorGroup]:
        """Returns all tensors of a model of this family, in network order.

        Raises `CheckpointError` for one of our tensors that the family does not have.
        """
        expected = expected_tensors(config)
        found = list(groups(self.tensors, expected, config))
        placed = {name for group in found for name in group.ours}
        if unmapped := [name for name in expected if name not in placed]:
            raise CheckpointError(f"{self.model_type} has no tensors for {', '.join(unmapped[:20])}.")
        return found


def family(model_type: str, architecture: str, tensors: Sequence[TensorRule], *fields: Field, **options: Any) -> Family:
    """Returns a family, whose fields come last; `options` are its other properties."""
    return Family(model_type, architecture, fields, tuple(tensors), **options)
