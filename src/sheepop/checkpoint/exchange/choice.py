"""The model families that SheepOp can import and export, and the choice of one for a configuration."""

from __future__ import annotations

from typing import Any

from sheepop.checkpoint.exchange.equivalence import differences
from sheepop.checkpoint.exchange.families.bloom import BLOOM
from sheepop.checkpoint.exchange.families.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE,
    GLM4_MOE_LITE,
    MINICPM3,
)
from sheepop.checkpoint.exchange.families.descendants import (
    ARCEE,
    ERNIE4_5,
    EXAONE4,
    GLM4,
    GRANITE,
    SEED_OSS,
    SMOLLM3,
)
from sheepop.checkpoint.exchange.families.gemma import GEMMA, GEMMA2, GEMMA3
from sheepop.checkpoint.exchange.families.gemma4 import GEMMA4
from sheepop.checkpoint.exchange.families.gpt2 import GPT2
from sheepop.checkpoint.exchange.families.gpt_neox import GPT_NEOX
from sheepop.checkpoint.exchange.families.gpt_oss import GPT_OSS
from sheepop.checkpoint.exchange.families.gptj import GPTJ
from sheepop.checkpoint.exchange.families.hybrid import LFM2, LFM2_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from sheepop.checkpoint.exchange.families.layer_norm import COHERE, COHERE2, STABLELM, STARCODER2
from sheepop.checkpoint.exchange.families.llama import LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from sheepop.checkpoint.exchange.families.minicpm import MINICPM
from sheepop.checkpoint.exchange.families.olmo import OLMO2, OLMO3
from sheepop.checkpoint.exchange.families.opt import OPT
from sheepop.checkpoint.exchange.families.phi import PHI, PHI3
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.expected_tensors import export_advice
from sheepop.core.errors import CheckpointError, first_few
from sheepop.model.config import ModelConfig

# An export tries them in this order.
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, MIXTRAL, QWEN3_MOE, GPT2, GPT_NEOX, BLOOM, SMOLLM3,
        COHERE2, EXAONE4, GRANITE, OLMO3, GLM4, SEED_OSS, ARCEE, STABLELM, STARCODER2, GEMMA, COHERE, ERNIE4_5,
        OPT, PHI, GPTJ, GPT_OSS, LFM2, QWEN2_MOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, DEEPSEEK_V2, DEEPSEEK_V3,
        GLM4_MOE_LITE, GLM4_MOE, MINICPM3, GEMMA4, LFM2_MOE,
    )
}  # fmt: skip


# An import also reads these, for which transformers has no class.
IMPORTED = {**FAMILIES, MINICPM.model_type: MINICPM}


def choose_family(config: ModelConfig, preferred: str | None = None) -> Family:
    """Returns the first family with which transformers computes the same results; tries `preferred` first.

    Raises `CheckpointError` if there is none, with the keys that each family cannot express.
    """
    reasons: dict[str, list[str]] = {}
    for family in sorted(FAMILIES.values(), key=lambda family: family.model_type != preferred):
        reasons[family.model_type] = obstacles(family, config)
        if not reasons[family.model_type]:
            return family
    nearest = sorted(reasons.items(), key=lambda entry: len(entry[1]))
    lines = "\n".join(f"  {name}: {first_few(found, 4)}" for name, found in nearest)
    raise CheckpointError(
        f"No model family of transformers can express this model. The obstacles:\n{lines}{export_advice(config)}"
    )


def obstacles(family: Family, config: ModelConfig) -> list[str]:
    """Returns the keys of `config` that the family cannot express, with both values; empty if it can express all."""
    try:
        back = family.read_config(family.write_config(config), family.model_type)
    except CheckpointError as error:
        return [str(error)]
    found = [f"{key} ({_compared(here, there)})" for key, (here, there) in differences(config, back).items()]
    if family.whole_heads and config.d_model % config.num_heads:
        found.append(f"d_model ({config.d_model} is not a multiple of num_heads = {config.num_heads})")
    return found


def _compared(here: Any, there: Any) -> str:
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        layer = next(index for index, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1])
        return f"{_named(here[layer])} here, {_named(there[layer])} there, in layer {layer}"
    return f"{_named(here)} here, {_named(there)} there"


def _named(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("kind", value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
