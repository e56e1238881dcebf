"""The families that SheepOp exchanges models with, in the order in which an export tries them."""

from __future__ import annotations

from sheepop.checkpoint.exchange.families.bloom import BLOOM
from sheepop.checkpoint.exchange.families.gemma import GEMMA2, GEMMA3
from sheepop.checkpoint.exchange.families.gpt2 import GPT2
from sheepop.checkpoint.exchange.families.gpt_neox import GPT_NEOX
from sheepop.checkpoint.exchange.families.llama import LLAMA
from sheepop.checkpoint.exchange.families.mistral import MISTRAL
from sheepop.checkpoint.exchange.families.mixtral import MIXTRAL
from sheepop.checkpoint.exchange.families.olmo2 import OLMO2
from sheepop.checkpoint.exchange.families.phi3 import PHI3
from sheepop.checkpoint.exchange.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from sheepop.checkpoint.exchange.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, MIXTRAL, QWEN3_MOE, GPT2, GPT_NEOX, BLOOM,
    )
}  # fmt: skip
