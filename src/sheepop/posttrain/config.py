"""The settings under ``tuning``: what a finished model is taught beyond continuing text, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sheepop.adapt.lora_config import LoraConfig
from sheepop.core.config import Config, PathText

Method = Literal["sft", "reward", "dpo"]
LongExamples = Literal["refuse", "cut", "leave_out"]
PreferenceKind = Literal["sigmoid", "robust", "hinge", "ipo", "simpo", "orpo", "kto"]
REFERENCE_FREE: tuple[PreferenceKind, ...] = ("simpo", "orpo")
_SMOOTHED: tuple[PreferenceKind, ...] = ("sigmoid", "robust")


class PreferenceConfig(Config):
    """Direct preference optimisation and its relatives: a loss on the log-probabilities of answers."""

    loss: PreferenceKind = "sigmoid"
    """`sigmoid` is DPO; `robust`, `hinge` and `ipo` are relatives of it; `simpo` and `orpo` need no reference; `kto`
    learns from answers that are judged one by one."""
    beta: float = Field(0.1, gt=0)
    """How closely the model is tied to the one that it began with; of `simpo` and `orpo` the weight of a preference."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """The share of pairs whose order is thought to be wrong, of `sigmoid` and `robust`."""
    margin: float = Field(0.0, ge=0)
    """By how much the chosen answer is to be better, of `simpo`."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of wanted answers, of `kto`."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of the others, of `kto`."""

    @model_validator(mode="after")
    def _fit_the_loss(self) -> PreferenceConfig:
        if self.label_smoothing and self.loss not in _SMOOTHED:
            raise ValueError(f"label_smoothing is of the losses {' and '.join(_SMOOTHED)}, not of {self.loss}")
        if self.margin and self.loss != "simpo":
            raise ValueError(f"margin is of the loss simpo, not of {self.loss}")
        if self.loss != "kto" and (self.desirable_weight, self.undesirable_weight) != (1.0, 1.0):
            raise ValueError(f"desirable_weight and undesirable_weight are of the loss kto, not of {self.loss}")
        return self


class RewardConfig(Config):
    """A reward model, learnt from pairs of a better and a worse answer."""

    centring: float = Field(0.0, ge=0)
    """Weight of what holds rewards near 0; 0.01 is usual."""
    margins: bool = False
    """Whether the margins in the examples are how much better the chosen answers are at least."""


class TuningConfig(Config):
    """Post-training: a run that begins with a finished model and learns from examples."""

    method: Method | None = None
    """What is learnt from: `sft`, supervised fine-tuning, from answers; `dpo` from preferences; `reward` makes a reward
    model of them; `null` is text, in pre-training."""
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
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """Of `sheepop tune reward`."""
    dpo: PreferenceConfig = Field(default_factory=PreferenceConfig)
    """Of `sheepop tune dpo`."""

    @model_validator(mode="after")
    def _need_a_method(self) -> TuningConfig:
        usual = {name: field.get_default(call_default_factory=True) for name, field in type(self).model_fields.items()}
        given = [name for name, default in usual.items() if getattr(self, name) != default]
        if self.method is None and given:
            raise ValueError(f"{given[0]} has no effect without tuning.method, for example sft")
        for name in given:
            if name in _OF_METHODS and self.method not in _OF_METHODS[name]:
                of = " or ".join(_OF_METHODS[name])
                raise ValueError(f"{name} has no effect with method {self.method}; it is of {of}")
        return self


_OF_METHODS: dict[str, tuple[Method, ...]] = {"neftune_alpha": ("sft",), "reward": ("reward",), "dpo": ("dpo",)}
"""The settings that belong to some methods only."""
