"""The settings under ``tuning``: what a finished model is taught beyond continuing text, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sheepop.adapt.lora_config import LoraConfig
from sheepop.core.config import Config, PathText

Method = Literal["sft"]
LongExamples = Literal["refuse", "cut", "leave_out"]


class TuningConfig(Config):
    """Post-training: a run that begins with a finished model and learns from examples."""

    method: Method | None = None
    """What is learnt from: `sft`, supervised fine-tuning, from answers; `null` is text, in pre-training."""
    validation_paths: tuple[PathText, ...] = ()
    """Files of held-out examples; without any, `data.validation_fraction` of the examples is held out."""
    chat_template: PathText | None = None
    """A file with a Jinja template that turns a conversation into text, kept with the tuned model; `null` is that of
    the model, or a simple one where it has none."""
    long_examples: LongExamples = "refuse"
    """Examples longer than `data.max_length`: `refuse` the run, `cut` their ends, or `leave_out` and count them."""
    neftune_alpha: Annotated[float, Field(gt=0)] | None = None
    """Noise on the embeddings of training steps, for less learning by heart; 5 is usual; `null` is none."""
    lora: LoraConfig | None = None
    """Learn a change of low rank beside the weights, which stay as they are; `null` trains all weights."""

    @model_validator(mode="after")
    def _need_a_method(self) -> TuningConfig:
        if self.method is None:
            given = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
            if given:
                raise ValueError(f"{given[0]} has no effect without tuning.method, for example sft")
        return self
