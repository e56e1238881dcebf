"""The settings under ``tuning``: fine-tuning, preference optimisation, reward models, PPO, GRPO and distillation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sheepop.adapt.lora_config import LoraConfig
from sheepop.core.config import Config, PathText

Method = Literal["sft", "reward", "dpo", "ppo", "grpo", "distill"]
BadExamples = Literal["refuse", "leave_out"]
LongExamples = Literal["refuse", "cut", "leave_out"]
PreferenceKind = Literal["sigmoid", "robust", "hinge", "ipo", "simpo", "orpo", "kto"]
REFERENCE_FREE: tuple[PreferenceKind, ...] = ("simpo", "orpo")
_SMOOTHED: tuple[PreferenceKind, ...] = ("sigmoid", "robust")


class PreferenceConfig(Config):
    """Direct preference optimisation and its relatives: losses on the log-probabilities of answers."""

    loss_type: PreferenceKind | dict[PreferenceKind, Annotated[float, Field(gt=0)]] = "sigmoid"
    """`sigmoid` is DPO; `robust`, `hinge` and `ipo` are variants of it; `simpo` and `orpo` need no reference model;
    `kto` learns from single answers with a label instead of pairs. Several losses are added with their weights, such as
    `{sigmoid: 0.8, ipo: 0.2}`."""
    beta: float = Field(0.1, gt=0)
    """Strength of the tie to the reference model; for `simpo` and `orpo` the weight of the preference."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of pairs in the wrong order; for `sigmoid` and `robust` only."""
    margin: float = Field(0.0, ge=0)
    """Margin by which the chosen answer should be better; for `simpo` only."""
    supervised_weight: float = Field(0.0, ge=0)
    """Weight of the mean cross-entropy of the chosen answer's tokens, which keeps it from becoming unlikely; 0.2 to 1
    are usual."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of answers labelled true; for `kto` only."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of answers labelled false; for `kto` only."""

    @property
    def losses(self) -> dict[PreferenceKind, float]:
        """The losses with their weights."""
        return {self.loss_type: 1.0} if isinstance(self.loss_type, str) else self.loss_type

    @model_validator(mode="after")
    def _check_loss(self) -> PreferenceConfig:
        kinds, named = self.losses.keys(), " and ".join(self.losses)
        if not kinds:
            raise ValueError("loss_type names no loss")
        if "kto" in kinds and len(kinds) > 1:
            raise ValueError("loss_type kto learns from single answers, and the other losses from pairs")
        if self.label_smoothing and kinds.isdisjoint(_SMOOTHED):
            raise ValueError(f"label_smoothing works with loss_type {' or '.join(_SMOOTHED)}, not {named}")
        if self.supervised_weight and not kinds.isdisjoint(("orpo", "kto")):
            raise ValueError(f"supervised_weight does not work with loss_type {named}")
        if self.margin and "simpo" not in kinds:
            raise ValueError(f"margin works with loss_type simpo, not {named}")
        if "kto" not in kinds and (self.desirable_weight, self.undesirable_weight) != (1.0, 1.0):
            raise ValueError(f"desirable_weight and undesirable_weight work with loss_type kto, not {named}")
        return self


class TeacherConfig(Config):
    """Distillation: the model also learns the token probabilities of a larger model."""

    model: PathText
    """The teacher: a model or run with the same tokenizer."""
    weight: float = Field(0.5, gt=0, le=1)
    """Weight of the KL divergence from the teacher; the cross-entropy of the answers has 1 minus it."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of both distributions in the divergence; a higher one gives unlikely tokens more weight."""


class RewardConfig(Config):
    """A reward model, trained on pairs of a chosen and a rejected answer."""

    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of a penalty that keeps rewards near 0; 0.01 is usual."""
    margins: bool = False
    """Require chosen answers to be better by at least the margins in the examples."""


class EnvironmentConfig(Config):
    """A program that answers what the model says, turn by turn, such as one that runs its tool calls."""

    file: PathText
    """Python file with a class `Environment`, an object of which follows each conversation: `reset(row)` returns
    messages after the prompt, or none; `step(message)` returns messages, a reward or none, and whether the conversation
    is done."""
    max_turns: int = Field(8, ge=1)
    """The most answers of the model in a conversation."""


class SamplingConfig(Config):
    """Settings of methods that learn from the model's own answers to prompts."""

    max_new_tokens: int = Field(128, ge=1)
    """Longest answer in tokens; a prompt may have the rest of `data.max_length`. With an environment, all that follows
    the prompt counts: answers, messages of the environment, and what the template renders again."""
    temperature: float = Field(1.0, gt=0)
    """Temperature at which answers are sampled and all log-probabilities are computed."""
    minibatches: int = Field(1, ge=1)
    """Number of steps that one epoch over the answers of a rollout is divided into."""
    epochs: int = Field(1, ge=1)
    """Epochs over the answers of each rollout."""
    length_ceiling: float | None = Field(None, gt=0)
    """Stop the run when the mean length of answers exceeds this, in tokens."""
    repetition_ceiling: float | None = Field(None, gt=0, le=1)
    """Stop the run when the mean share of repeated four-grams in answers exceeds this."""
    logged_answers: int = Field(8, ge=0)
    """The most answers that a logged step writes into `samples.jsonl`, with their rewards and advantages."""


class DistillConfig(SamplingConfig):
    """On-policy distillation: on answers of its own, the model learns the token probabilities of a larger model."""

    teacher: PathText | None = None
    """The teacher: a model or run with the same tokenizer."""
    beta: float = Field(0.5, ge=0, le=1)
    """Which divergence from the teacher is minimised, as in GKD: 0 is the KL divergence of the model from its teacher,
    KL(teacher, model); 1 is the reverse one, KL(model, teacher); between them the generalised Jensen-Shannon
    divergence."""


class JudgeConfig(Config):
    """The reward `judge`: a chat model grades answers from 1 to 10, which becomes a reward from 0 to 1."""

    by: PathText | None = None
    """The judge: a chat model, or the address of a server that speaks OpenAI's protocol, whose key is in
    `OPENAI_API_KEY`."""
    model: str | None = None
    """The name of the model on the server; `null` takes its first."""
    rubric: str = Field(
        "An answer is good if it is correct, does what was asked, and is clear and complete. Length by itself is no "
        "merit.",
        min_length=1,
    )
    """What makes an answer good. The judge sees it with the prompt, the answer, and the right answer if a prompt's line
    has a `reference`."""
    workers: int = Field(8, ge=1)
    """Answers that a server grades at a time."""
    seconds: float = Field(60.0, gt=0)
    """Time limit of a server's reply; one that fails is requested again up to four times."""


class CodeConfig(Config):
    """The reward `code`: 1 if the last code block of an answer passes the `tests` of the prompt's line, else 0."""

    seconds: float = Field(10.0, gt=0)
    """Time limit of a program with its tests."""
    memory_bytes: int = Field(2**30, ge=2**26)
    """Memory limit of a program with its tests."""
    workers: int | None = Field(None, ge=1)
    """Programs that run at a time; `null` is one for each processor core."""
    timeouts: Literal["fail", "missing"] = "fail"
    """A program that exceeds its time limit: `fail` gives 0, `missing` gives no reward, as `missing_rewards` says."""


class RolloutConfig(SamplingConfig):
    """Settings that PPO and GRPO share: sampling answers, rewarding them, and learning from them."""

    reward: PathText | dict[PathText, float] | None = None
    """Source of rewards: a reward model from `sheepop tune reward`; a Python file with a function
    `reward(prompt, completion, **fields)` that returns a number, or `reward(prompts, completions, **columns)` that
    returns a list of them, where fields and columns are the other keys of the prompts' lines; the URL of a service that
    gets `{"answers": [{"prompt", "completion", "fields"}]}` by POST and replies `{"rewards": [...]}`; `judge`, with
    the settings `tuning.judge`; or `code`, with `tuning.code`. Several are added with their weights, such as
    `{check.py: 1.0, judge: 0.5}`; one that gives null to an answer does not count there."""
    environment: EnvironmentConfig | None = None
    """Answers are conversations with this program, whose rewards are added to those of `reward`."""
    missing_rewards: Literal["stop", "leave_out"] = "stop"
    """What happens if no source gives an answer a number, because it or the environment failed, took too long, or gave
    null: `stop` the run, or `leave_out` the answer and count it."""
    reward_seconds: float = Field(10.0, gt=0)
    """Time limit of a reward program or service, in seconds for each answer, and of each call of an environment."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio of new to old probabilities is clipped below at 1 minus this."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio of new to old probabilities is clipped above at 1 plus this."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus, which keeps the policy exploring."""
    missing_eos_penalty: float = Field(0.0, ge=0)
    """Subtracted from the reward of an answer that was cut off at `max_new_tokens`."""
    kl_ceiling: float | None = Field(None, gt=0)
    """Stop the run when the mean divergence from the reference exceeds this, in nats per answer."""

    @property
    def rewards(self) -> dict[str, float]:
        """The sources of rewards with their weights."""
        if isinstance(self.reward, dict):
            return dict(self.reward)
        return {} if self.reward is None else {self.reward: 1.0}


class PPOConfig(RolloutConfig):
    """Proximal policy optimisation: a value model learns the expected reward at every token."""

    epochs: int = Field(4, ge=1)
    """Epochs over the answers of each rollout."""
    normalise_rewards: bool = True
    """Normalise rewards to mean 0 and variance 1 over all answers so far, before penalties are subtracted; `kl_coef`
    then means the same with every source of rewards."""
    kl_coef: float = Field(0.05, ge=0)
    """Penalty of every token for each nat of divergence from the reference."""
    kl_target: float | None = Field(None, gt=0)
    """Adapt `kl_coef` towards this divergence, in nats per answer; `null` keeps it constant."""
    kl_horizon: int = Field(10_000, ge=1)
    """Number of answers over which the adapted `kl_coef` changes by the whole relative error."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of rewards per token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation."""
    whiten: bool = True
    """Normalise advantages to mean 0 and variance 1 over all tokens of a rollout."""
    value_model: Literal["shared", "separate"] = "shared"
    """`shared` adds a value head to the policy's network; `separate` trains a second network."""
    vf_coef: float = Field(0.1, gt=0)
    """Weight of the loss of the value model."""
    value_clip: float | None = Field(0.2, gt=0)
    """Values are clipped to this distance from those predicted at the rollout; `null` does not clip."""

    @model_validator(mode="after")
    def _check_kl(self) -> PPOConfig:
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError("kl_target adapts kl_coef, which is 0 and would stay 0; raise it")
        return self


class GRPOConfig(RolloutConfig):
    """Group relative policy optimisation: each answer is compared with the others to the same prompt."""

    group_size: int = Field(8, ge=2)
    """Answers to each prompt."""
    baseline: Literal["scaled", "centred", "leave_one_out"] = "scaled"
    """`scaled` is GRPO: rewards minus the group's mean, divided by its standard deviation; `centred` does not divide,
    as in Dr. GRPO; `leave_one_out` subtracts the mean of the others, as in RLOO."""
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = "grpo"
    """How a step averages the losses of tokens: `grpo` within each answer, then over answers; `dapo` over all tokens of
    the step; `dr_grpo` sums each answer, divides by `max_new_tokens`, then averages over answers."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Whose probabilities the ratio of new to old compares: those of each `token`, or the geometric mean over the whole
    `sequence`, as in GSPO."""
    surrogate: Literal["clipped", "cispo"] = "clipped"
    """`clipped` drops the gradient of tokens whose ratio is beyond its bounds; `cispo` bounds their weight instead
    (CISPO)."""
    sampler_ratio_cap: float | None = Field(None, gt=0)
    """Truncated importance sampling: each token is weighted by the ratio of its probability in training to that in the
    sampler, at most this; 2 is usual; `null` does not weight. It needs `temperature=1`."""
    overlong_buffer: int = Field(0, ge=0)
    """Soft penalty for length, as in DAPO: within this many tokens of `max_new_tokens`, the reward falls evenly by
    `overlong_penalty`; 0 has none."""
    overlong_penalty: float = Field(1.0, gt=0)
    """The most that `overlong_buffer` subtracts from a reward."""
    kl_coef: float = Field(0.04, ge=0)
    """Weight of the divergence from the reference in the loss; 0 needs no reference model."""
    kl_estimator: Literal["k3", "k2"] = "k3"
    """Estimator of the divergence: `k3` is unbiased and never negative; `k2` has the gradient of the divergence."""
    truncated_answers: Literal["keep", "leave_out"] = "keep"
    """Answers that were cut off at `max_new_tokens`: `keep` learns from them, `leave_out` does not, as in DAPO."""
    equal_groups: Literal["keep", "leave_out", "draw_again"] = "keep"
    """Groups whose rewards are all equal: `keep` them, `leave_out` of the mean, or `draw_again` with other prompts, as
    in DAPO."""

    @model_validator(mode="after")
    def _check_answers(self) -> GRPOConfig:
        if self.sampler_ratio_cap is not None and self.temperature != 1.0:
            raise ValueError("sampler_ratio_cap compares probabilities at temperature 1; leave the temperature out")
        if self.overlong_buffer >= self.max_new_tokens:
            raise ValueError(f"overlong_buffer must be below max_new_tokens = {self.max_new_tokens}")
        return self


class TuningConfig(Config):
    """Post-training: a run that starts from a finished model."""

    method: Method | None = None
    """`sft` is supervised fine-tuning on answers; `dpo` learns from preferences; `reward` trains a reward model on
    preferences; `ppo` and `grpo` learn from rewards of the model's own answers, `distill` from what a teacher thinks of
    them; `null` is pre-training on text."""
    validation_paths: tuple[PathText, ...] = ()
    """Files of held-out examples; without any, `data.validation_fraction` of the examples is held out."""
    chat_template: PathText | None = None
    """File with a Jinja chat template, stored with the tuned model, or a ready one by name: `chatml`, `gemma` or
    `llama3`, whose tokens the model must have; `null` takes the model's own, or a simple one if it has none."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template to read, such as `{enable_thinking: false}`; `null` gives none."""
    columns: dict[str, str] | None = None
    """The columns of files by the keys of shapes, such as `{prompt: question, completion: answer}` for files with
    `question` and `answer`; `null` takes them as they are named."""
    join_turns: bool = False
    """Neighbouring turns of one role become one, with an empty line between their texts; `false` refuses them."""
    batch_tokens: int | None = Field(None, ge=1)
    """Tokens to learn in a step, about, at most a sixteenth of an epoch and, with `training.max_epochs`, a hundredth of
    the run: it sets `training.global_batch_size` by the mean of the rows; `null` takes that as it is."""
    bad_examples: BadExamples = "refuse"
    """Examples that cannot be learnt: `refuse` the run, or `leave_out` and count them."""
    long_examples: LongExamples = "refuse"
    """Examples longer than `data.max_length`: `refuse` the run, `cut` their ends, or `leave_out` and count them."""
    neftune_noise_alpha: Annotated[float, Field(gt=0)] | None = None
    """NEFTune: noise on the embeddings in training steps, against overfitting; 5 is usual; `null` adds none."""
    lora: LoraConfig | None = None
    """LoRA: train low-rank adapters and keep the weights frozen; `null` trains all weights."""
    reference: PathText | None = None
    """The reference model of `dpo`, `ppo` and `grpo`, with the same tokenizer; `null` is the model that the run starts
    from."""
    teacher: TeacherConfig | None = None
    """Distillation: also learn from the probabilities of another model; `null` uses no teacher."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """Settings of `sheepop tune reward`."""
    dpo: PreferenceConfig = Field(default_factory=PreferenceConfig)
    """Settings of `sheepop tune dpo`."""
    ppo: PPOConfig = Field(default_factory=PPOConfig)
    """Settings of `sheepop tune ppo`."""
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    """Settings of `sheepop tune grpo`."""
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    """Settings of the reward `judge`."""
    code: CodeConfig = Field(default_factory=CodeConfig)
    """Settings of the reward `code`."""
    distill: DistillConfig = Field(default_factory=DistillConfig)
    """Settings of `sheepop tune distill`."""

    @model_validator(mode="after")
    def _check_method(self) -> TuningConfig:
        usual = {name: field.get_default(call_default_factory=True) for name, field in type(self).model_fields.items()}
        given = [name for name, default in usual.items() if getattr(self, name) != default]
        if self.method is None and given:
            raise ValueError(f"{given[0]} has no effect without tuning.method, for example sft")
        for name in given:
            if name in _OF_METHODS and self.method not in _OF_METHODS[name]:
                of = " or ".join(_OF_METHODS[name])
                raise ValueError(f"{name} has no effect with method {self.method}; it works with {of}")
        rewards = getattr(self, str(self.method)).rewards if self.method in _OF_METHODS["judge"] else {}
        for name in ("judge", "code"):
            if name in given and name not in rewards:
                raise ValueError(f"{name} has no effect unless {self.method}.reward names {name}")
        if "judge" in rewards and self.judge.by is None:
            raise ValueError("the reward judge needs judge.by, a chat model or the address of a server")
        return self


_WITH_SECTIONS: tuple[Method, ...] = ("reward", "dpo", "ppo", "grpo", "distill")
_OF_METHODS: dict[str, tuple[Method, ...]] = {
    "neftune_noise_alpha": ("sft",),
    "reference": ("dpo", "ppo", "grpo"),
    "teacher": ("sft",),
    "batch_tokens": ("sft",),
    "judge": ("ppo", "grpo"),
    "code": ("ppo", "grpo"),
    **{name: (name,) for name in _WITH_SECTIONS},
}
"""The settings that only some methods read."""
