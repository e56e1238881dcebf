"""The settings under ``tuning``: what a finished model is taught beyond continuing text, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sheepop.adapt.lora_config import LoraConfig
from sheepop.core.config import Config, PathText

Method = Literal["sft", "reward", "dpo", "ppo", "grpo"]
LongExamples = Literal["refuse", "cut", "leave_out"]
PreferenceKind = Literal["sigmoid", "robust", "hinge", "ipo", "simpo", "orpo", "kto"]
REFERENCE_FREE: tuple[PreferenceKind, ...] = ("simpo", "orpo")
_SMOOTHED: tuple[PreferenceKind, ...] = ("sigmoid", "robust")


class PreferenceConfig(Config):
    """Direct preference optimisation and its relatives: a loss on the log-probabilities of answers."""

    loss_type: PreferenceKind = "sigmoid"
    """`sigmoid` is DPO; `robust`, `hinge` and `ipo` are relatives of it; `simpo` and `orpo` need no reference; `kto`
    learns from answers that are judged one by one."""
    beta: float = Field(0.1, gt=0)
    """How closely the model is tied to the one that it began with; of `simpo` and `orpo` the weight of a preference."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """The share of pairs whose order is thought to be wrong, of `sigmoid` and `robust`."""
    margin: float = Field(0.0, ge=0)
    """By how much the chosen answer is to be better, of `simpo`."""
    supervised_weight: float = Field(0.0, ge=0)
    """Weight of the mean cross-entropy of the chosen answer's tokens, which keeps both answers from becoming unlikely;
    0.2 to 1 are usual."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of wanted answers, of `kto`."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of the others, of `kto`."""

    @model_validator(mode="after")
    def _fit_the_loss(self) -> PreferenceConfig:
        if self.label_smoothing and self.loss_type not in _SMOOTHED:
            raise ValueError(f"label_smoothing is of the losses {' and '.join(_SMOOTHED)}, not of {self.loss_type}")
        if self.supervised_weight and self.loss_type in ("orpo", "kto"):
            raise ValueError(f"supervised_weight is not of the loss {self.loss_type}")
        if self.margin and self.loss_type != "simpo":
            raise ValueError(f"margin is of the loss simpo, not of {self.loss_type}")
        if self.loss_type != "kto" and (self.desirable_weight, self.undesirable_weight) != (1.0, 1.0):
            raise ValueError(f"desirable_weight and undesirable_weight are of the loss kto, not of {self.loss_type}")
        return self


class TeacherConfig(Config):
    """Distillation: what a larger model gives for the answers is learnt beside them, or instead of them."""

    model: PathText
    """The teacher: a model or run with the same tokenizer."""
    weight: float = Field(0.5, gt=0, le=1)
    """Weight of the divergence from the teacher; the cross-entropy of the answers has the rest."""
    temperature: float = Field(1.0, gt=0)
    """Both are compared at this temperature; a higher one tells more of what is unlikely."""


class RewardConfig(Config):
    """A reward model, learnt from pairs of a better and a worse answer."""

    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of what holds rewards near 0; 0.01 is usual."""
    margins: bool = False
    """Whether the margins in the examples are how much better the chosen answers are at least."""


class RolloutConfig(Config):
    """What PPO and GRPO have in common: how answers are drawn, judged and learnt from."""

    reward: PathText | None = None
    """What judges answers: a reward model, as `sheepop tune reward` makes them; a Python file with a function
    `reward(prompt, completion, **fields)` that gives a number, where `fields` is what else the line of the prompt says;
    or the address of a service that gets `{"answers": [{"prompt", "completion", "fields"}]}` by POST and replies
    `{"rewards": [...]}`."""
    reward_seconds: float = Field(10.0, gt=0)
    """The time that a program or a service has for an answer."""
    max_new_tokens: int = Field(128, ge=1)
    """The most tokens of an answer; a prompt may have what is left of `data.max_length`."""
    temperature: float = Field(1.0, gt=0)
    """Answers are drawn at this temperature, and all log-probabilities are taken at it."""
    minibatches: int = Field(1, ge=1)
    """Steps that the answers of a rollout are divided into."""
    epochs: int = Field(1, ge=1)
    """How often the answers of a rollout are learnt from."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """How far below 1 the ratio of new and old probabilities counts."""
    clip_high: float = Field(0.2, gt=0)
    """How far above 1 it counts."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy of what the policy writes, which keeps it from settling early."""
    missing_eos_penalty: float = Field(0.0, ge=0)
    """What an answer loses that is cut off at `max_new_tokens`."""
    kl_ceiling: float | None = Field(None, gt=0)
    """The run ends where the mean divergence from the reference is above this, in nats for an answer."""
    length_ceiling: float | None = Field(None, gt=0)
    """The run ends where the mean length of answers is above this, in tokens."""
    repetition_ceiling: float | None = Field(None, gt=0, le=1)
    """The run ends where a larger share of the four-grams of answers than this are repetitions."""


class PPOConfig(RolloutConfig):
    """Proximal policy optimisation: the worth of every token is learnt by a value model."""

    epochs: int = Field(4, ge=1)
    """How often the answers of a rollout are learnt from."""
    normalise_rewards: bool = True
    """Whether rewards are brought to mean 0 and variance 1, over all answers so far, before anything is taken off them;
    a weight then means the same beside every judge."""
    kl_coef: float = Field(0.05, ge=0)
    """What a token pays for each nat of divergence from the reference."""
    kl_target: float | None = Field(None, gt=0)
    """The divergence in nats for an answer that the weight is adapted to; `null` leaves the weight as it is."""
    kl_horizon: int = Field(10_000, ge=1)
    """After how many answers an adapted weight has changed by the whole error."""
    gamma: float = Field(1.0, gt=0, le=1)
    """What a reward is worth one token earlier."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation."""
    whiten: bool = True
    """Whether advantages are brought to mean 0 and variance 1 over all tokens of a rollout."""
    value_model: Literal["shared", "separate"] = "shared"
    """`shared` is a head beside the policy's own, `separate` a network of its own."""
    vf_coef: float = Field(0.1, gt=0)
    """Weight of the loss of the value model."""
    value_clip: float | None = Field(0.2, gt=0)
    """How far a value may move from what it was when the answers were written; `null` is any distance."""

    @model_validator(mode="after")
    def _adapt_a_weight(self) -> PPOConfig:
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError("kl_target adapts kl_coef, which is 0 and would stay so; raise it")
        return self


class GRPOConfig(RolloutConfig):
    """Group relative policy optimisation: an answer is judged beside others to the same prompt."""

    group_size: int = Field(8, ge=2)
    """Answers to each prompt."""
    baseline: Literal["scaled", "centred", "leave_one_out"] = "scaled"
    """`scaled` is GRPO, rewards less their mean over their deviation; `centred` leaves out the deviation, as Dr. GRPO
    does; `leave_one_out` is RLOO."""
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = "grpo"
    """How a step averages the losses of tokens: `grpo` within each answer, then over answers; `dapo` over all tokens of
    the step; `dr_grpo` sums each answer, divides by `max_new_tokens`, then averages over answers."""
    kl_coef: float = Field(0.04, ge=0)
    """Weight of the divergence from the reference in the loss; at 0 no reference is kept."""
    kl_estimator: Literal["k3", "k2"] = "k3"
    """`k3` is never negative and unbiased; `k2` has the gradient of the divergence."""
    truncated_answers: Literal["keep", "leave_out"] = "keep"
    """What becomes of answers that are cut off: learnt from, or left out, as in DAPO."""
    equal_groups: Literal["keep", "leave_out", "draw_again"] = "keep"
    """What becomes of groups whose rewards are all equal: kept, left out of the mean, or replaced by other prompts, as
    in DAPO."""


class TuningConfig(Config):
    """Post-training: a run that begins with a finished model and learns from examples."""

    method: Method | None = None
    """What is learnt from: `sft`, supervised fine-tuning, from answers; `dpo` from preferences; `reward` makes a reward
    model of them; `ppo` and `grpo` from rewards of what the model writes; `null` is text, in pre-training."""
    validation_paths: tuple[PathText, ...] = ()
    """Files of held-out examples; without any, `data.validation_fraction` of the examples is held out."""
    chat_template: PathText | None = None
    """A file with a Jinja template that turns a conversation into text, kept with the tuned model; `null` is that of
    the model, or a simple one where it has none."""
    long_examples: LongExamples = "refuse"
    """Examples longer than `data.max_length`: `refuse` the run, `cut` their ends, or `leave_out` and count them."""
    neftune_noise_alpha: Annotated[float, Field(gt=0)] | None = None
    """Noise on the embeddings of training steps, for less learning by heart; 5 is usual; `null` is none."""
    lora: LoraConfig | None = None
    """Learn a change of low rank beside the weights, which stay as they are; `null` trains all weights."""
    reference: PathText | None = None
    """The model that the tuned one is compared with, of the same tokenizer, in `dpo`, `ppo` and `grpo`; `null` is the
    one that it begins with."""
    teacher: TeacherConfig | None = None
    """Learn from the probabilities that another model gives, too; `null` has none."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """Of `sheepop tune reward`."""
    dpo: PreferenceConfig = Field(default_factory=PreferenceConfig)
    """Of `sheepop tune dpo`."""
    ppo: PPOConfig = Field(default_factory=PPOConfig)
    """Of `sheepop tune ppo`."""
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    """Of `sheepop tune grpo`."""

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


_OF_METHODS: dict[str, tuple[Method, ...]] = {
    "neftune_noise_alpha": ("sft",),
    "reference": ("dpo", "ppo", "grpo"),
    "teacher": ("sft",),
    "reward": ("reward",),
    "dpo": ("dpo",),
    "ppo": ("ppo",),
    "grpo": ("grpo",),
}
"""The settings that belong to some methods only."""
