"""MiniCPM: Llama with factors of embeddings, sublayers and logits (Hu et al. 2024, "MiniCPM", section 3.1, table 3).

Its configuration comes with program code, for which this table stands. transformers has no class for it, so a model is
exported as Granite, which has the same factors.
"""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    IMPLIED,
    TENSORS,
    llama_keys,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.rope_parameters import RopeParameters
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import Field, Refused, Settings, number, unread


class _Factors(Field):
    """`scale_depth`, over the root of the layers, and `dim_model_base`, over the width; must follow the sizes."""

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the factors of sublayers and logits."""
        depth, width = given.typed("scale_depth", float, 1.0), given.typed("dim_model_base", int, 1)
        for name, value in (("scale_depth", depth), ("dim_model_base", width)):
            if value <= 0:
                raise given.problem(name, "is not a factor above 0")
        layers, d_model = max(1, settings["num_layers"]), max(1, settings["d_model"])
        return {"residual_scale": depth / layers**0.5, "logit_scale": width / d_model}


MINICPM = Family(
    model_type="minicpm",
    architecture="MiniCPMForCausalLM",
    fields=(
        *IMPLIED,
        *llama_keys(vocab_size=32000, max_seq_len=2048, d_ff=11008, tied=True),
        ATTENTION_BIAS,
        ATTENTION_DROPOUT,
        number("scale_emb", "embedding_scale", 1.0),
        _Factors(),
        RopeParameters(),
        Refused("num_experts", "gives the model experts, which SheepOp does not read in this family"),
        Refused("sparse_config", "lets long texts see only some keys, which SheepOp does not support"),
        # Parallelism of the training program, and a factor of another model that guesses tokens for this one.
        unread("pretraining_tp", "mup_denominator"),
    ),
    tensors=TENSORS,
)
