"""OLMo 2 and 3: norms only after the sublayers, and over the whole width of queries and keys."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
    EMBEDDING,
    FEED_FORWARD,
    HEAD,
    HEAD_DIM,
    OUTPUT_NORMS,
    llama_keys,
)
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.fields import windows_by_period
from sheepop.checkpoint.exchange.rope_parameters import LayerRopeParameters, RopeParameters
from sheepop.checkpoint.mapping import implied

_FIELDS = (
    *implied(position_encoding="rope", norm="rmsnorm", norm_position="output", qk_norm="width", bias=False),
    *llama_keys(vocab_size=50304, max_seq_len=2048, d_ff=11008, norm_eps=1e-5),
    HEAD_DIM,
    ATTENTION_BIAS,
    ATTENTION_DROPOUT,
)
_TENSORS = (*EMBEDDING, *OUTPUT_NORMS, *ATTENTION, *FEED_FORWARD, *HEAD)

OLMO2 = Family("olmo2", "Olmo2ForCausalLM", (*_FIELDS, RopeParameters()), _TENSORS)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    (
        *_FIELDS,
        windows_by_period(4096, 4),
        LayerRopeParameters(base=500_000.0, sliding_base=500_000.0, sliding_key=None),
    ),
    _TENSORS,
)
