"""The configuration subtree `generation`: how many tokens to write, how to sample them, and when to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

from pydantic import Field, field_validator, model_validator

from sheepop.checkpoint.generation_settings import GENERATION
from sheepop.core.config import Config, validate
from sheepop.core.errors import CheckpointError, ConfigError, UsageError

CacheDtype = Literal["auto", "int8", "fp8"]
"""How keys and values are cached."""
Activations = Literal["exact", "rounded"]
"""What the kernels of a CPU do with the inputs of products."""
# The settings that constrain the text.
GRAMMARS = ("json_schema", "regex", "choice", "grammar")
# The settings that beam search uses.
_OF_SEARCH = (
    *("max_new_tokens", "temperature", "num_beams", "length_penalty", "seed"),
    *("use_memory", "max_batch_size", "cache_dtype", "activations", "batch_invariant"),
)
# The settings that only sampling uses, with their neutral values.
_OF_DRAWING = {"top_k": None, "top_p": 1, "min_p": 0, "typical_p": 1, "num_completions": 1, "best_of": 1}
# The keys of a model's ``generation_config.json`` that are defaults of sampling.
_OF_MODELS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Settings(TypedDict, total=False):
    """The settings of a request, named like the options of the command line; omitted ones have their defaults."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    greedy: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: dict[int, float] | None
    beams: int | None
    length_penalty: float | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    seed: int | None
    top_logprobs: int | None
    num_completions: int | None
    best_of: int | None
    json_schema: dict[str, Any] | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    guesses: int | None
    window: bool
    memory: bool
    max_batch_size: int | None
    cache_dtype: CacheDtype | None
    activations: Activations | None
    batch_invariant: bool


def requested(**settings: Unpack[Settings]) -> GenerationConfig:
    """Returns the configuration for these settings.

    Without `max_new_tokens` the context slides, so that the text can be longer than the context. Raises `ConfigError`
    for a value out of range, and `UsageError` for settings that contradict each other or are unknown.
    """
    if unknown := settings.keys() - Settings.__annotations__.keys():
        known = ", ".join(Settings.__annotations__)
        raise UsageError(f"There is no setting {', '.join(sorted(unknown))}. The settings are: {known}.")
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    temperature = given.get("temperature")
    if given.pop("greedy", False):
        if temperature:
            raise UsageError(
                f"greedy means a temperature of 0, but temperature is {temperature:g}. Leave one of them out."
            )
        temperature = given["temperature"] = 0.0
    for name, without in _OF_DRAWING.items() if temperature == 0 else ():
        if given.get(name, without) != without:
            raise UsageError(
                f"{name} = {given[name]} needs sampling, but greedy (temperature 0) always takes the likeliest token. "
                "Leave one of them out."
            )
    if "choice" in given and not given["choice"]:
        raise UsageError("choice has no text to choose from. Give at least one, or leave it out.")
    searches = given.get("beams", 1) != 1
    if "length_penalty" in given and not searches:
        raise UsageError("length_penalty applies only to beams above 1. Leave it out, or set beams.")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if given.pop("window", False):
        given["on_overflow"] = "window"
    elif "max_new_tokens" not in given and not searches:
        given["on_overflow"] = "slide"
    if given.pop("memory", True) is False:
        given["use_memory"] = False
    if "beams" in given:
        given["num_beams"] = given.pop("beams")
    return validate(GenerationConfig, given)


def model_defaults(generation: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the settings that a model's ``generation_config.json`` asks for, as transformers understands them.

    Without `do_sample` decoding is greedy; with it, what the file leaves out has the default of transformers. A file
    with none of the settings of sampling asks for nothing. Raises `CheckpointError` for a value out of range.
    """
    named = {name: generation[name] for name in _OF_MODELS if generation.get(name) is not None}
    if not named:
        return {}
    for name, value in named.items():
        kinds, kind = ((bool,), "true or false") if name == "do_sample" else ((int, float), "a number")
        if type(value) not in kinds:
            raise CheckpointError(f"{where}: {name} = {str(value)[:80]!r} is not {kind}.")
    samples = named.pop("do_sample", False)
    if named.get("top_k") == 0:  # which transformers reads as all
        named["top_k"] = None
    found = {"temperature": 0.0} if not samples else {"temperature": 1.0, "top_k": 50, "top_p": 1.0, **named}
    if "repetition_penalty" in named:
        found["repetition_penalty"] = named["repetition_penalty"]
    try:
        validate(GenerationConfig, found)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return found


def with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings `given`, completed by the `defaults` of a model; beam search has no use for these.

    Raises `UsageError` for a setting of sampling if the model's default is greedy and no temperature is given.
    """
    if not defaults or given.get("num_beams", 1) > 1:
        return dict(given)
    chosen = {**defaults, **given}
    if chosen["temperature"] != 0:
        return chosen
    for name, without in _OF_DRAWING.items() if "temperature" not in given else ():
        if given.get(name, without) != without:
            raise UsageError(
                f"{name} = {given[name]} needs sampling, but this model's {GENERATION} asks for greedy decoding. Give "
                "a temperature above 0 too."
            )
    return {name: value for name, value in chosen.items() if name in given or name not in _OF_DRAWING}


class GenerationConfig(Config):
    """How text is generated. Temperature 0 is greedy: it always takes the likeliest token, without randomness."""

    max_new_tokens: int = Field(default=256, ge=1)
    """The most tokens to write."""
    min_new_tokens: int = Field(default=0, ge=0)
    """The fewest tokens before the text may end by itself."""
    temperature: float = Field(default=0.8, ge=0.0)
    """Below 1 sharpens the distribution, above 1 flattens it; 0 always takes the likeliest token."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample from the k likeliest tokens; `null` samples from all."""
    top_p: float = Field(default=0.95, gt=0.0, le=1.0)
    """Sample from the smallest set of tokens that together have this probability; 1 samples from all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Sample from tokens whose probability is at least this fraction of the likeliest one's; 0 samples from all."""
    typical_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the tokens whose information is closest to the entropy and that together have this probability; 1
    samples from all."""
    # The bounds are far outside the useful range; beyond them, products with logits could overflow.
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100.0)
    """Above 1 makes tokens that are already in the prompt or the text less likely."""
    presence_penalty: float = Field(default=0.0, ge=-100.0, le=100.0)
    """Subtracted from the logit of every token that is already in the text."""
    frequency_penalty: float = Field(default=0.0, ge=-100.0, le=100.0)
    """Subtracted from the logit of a token each time it occurs in the text so far."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Numbers to add to the logits of tokens, by token id."""
    top_logprobs: int | None = Field(default=None, ge=0, le=1000)
    """How many of the likeliest tokens to report at each position, with their log-probabilities."""
    num_completions: int = Field(default=1, ge=1, le=1024)
    """How many texts to write for each prompt."""
    best_of: int | None = Field(default=None, ge=1, le=1024)
    """How many texts to write, of which the `num_completions` likeliest are kept; `null` writes just as many as it
    keeps."""
    num_beams: int = Field(default=1, ge=1, le=1024, strict=True)
    """How many texts beam search follows at a time, without sampling; 1 means no beam search."""
    length_penalty: float = Field(default=0.6, ge=0.0, le=10.0)
    """How much beam search favours long texts; 0 compares plain probabilities."""
    seed: int | None = None
    """The seed of sampling; the same seed gives the same text. `null` draws a seed and reports it."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings."""
    json_schema: dict[str, Any] | None = None
    """The text is JSON that fits this schema; `{}` is any JSON."""
    regex: str | None = None
    """The whole text matches this regular expression."""
    choice: tuple[str, ...] = ()
    """The text is one of these."""
    grammar: str | None = None
    """The text follows this grammar, in llguidance's variant of Lark's syntax."""
    stop_token_ids: tuple[int, ...] = ()
    """The text ends with the first of these tokens."""
    guesses: int = Field(default=0, ge=0, le=64)
    """How many tokens to guess ahead, so that the network checks them in one pass; this changes the speed, never the
    text."""
    use_memory: bool = True
    """Let the model look words up in the memory of its training text, if it has one; `false`: the network alone."""
    max_batch_size: int | None = Field(default=None, ge=1)
    """The most texts to write at a time, which bounds the memory of their keys and values; `null` leaves it to the
    program."""
    cache_dtype: CacheDtype = "auto"
    """The data type of cached keys and values: `auto` is that of the network; `int8` and `fp8` (e4m3) have 8 bits, with
    a scale for each head of a token."""
    activations: Activations = "exact"
    """The inputs of matrix products on a CPU: `exact` keeps them; `rounded` rounds them to the kind of the weights, as
    llama.cpp and others do, such as to 8 bits beside integers, which is faster and changes the logits."""
    batch_invariant: bool = False
    """Compute each text independently of other requests, so that batching never changes it. This is slower for prompts
    on some processors, and only for decoders on a CPU."""
    on_overflow: Literal["refuse", "slide", "window"] = "refuse"
    """When the context is full: `refuse` refuses a prompt that fills it and ends the text there; `slide` refuses such a
    prompt too, but drops the oldest tokens and continues; `window` also truncates the prompt."""

    @property
    def greedy(self) -> bool:
        """Whether decoding always takes the likeliest token."""
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether tokens are penalised because they occurred before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def over(self, defaults: Mapping[str, Any]) -> GenerationConfig:
        """Returns the settings that were given to this configuration, completed by the `defaults` of a model."""
        return validate(type(self), with_defaults(self.model_dump(exclude_unset=True), defaults)) if defaults else self

    @property
    def is_constrained(self) -> bool:
        """Whether the text must follow a grammar."""
        return any(getattr(self, name) not in (None, ()) for name in GRAMMARS)

    @model_validator(mode="before")
    @classmethod
    def _search_does_not_draw(cls, given: Any) -> Any:
        beams = given.get("num_beams") if isinstance(given, dict) else None
        if isinstance(beams, int) and beams > 1:
            return {"temperature": 0.0, **given}
        return given

    @model_validator(mode="after")
    def _check_search(self) -> GenerationConfig:
        if self.num_beams == 1:
            return self
        if not self.greedy:
            raise ValueError(
                f"num_beams = {self.num_beams} searches for the likeliest text without sampling, so temperature = "
                f"{self.temperature} cannot be combined with it. Leave it out, or set it to 0"
            )
        for name, field in type(self).model_fields.items():
            value, default = getattr(self, name), field.get_default(call_default_factory=True)
            if name not in _OF_SEARCH and value != default:
                raise ValueError(
                    f"num_beams = {self.num_beams} cannot be combined with {name} = {value!r}; leave one out"
                )
        return self

    @model_validator(mode="after")
    def _check_texts(self) -> GenerationConfig:
        if self.best_of is not None and self.best_of < self.num_completions:
            raise ValueError(
                f"best_of = {self.best_of} is less than num_completions = {self.num_completions}, the number of texts "
                "to keep"
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens = {self.min_new_tokens} is more than max_new_tokens = {self.max_new_tokens}"
            )
        names = [name for name in GRAMMARS if getattr(self, name) not in (None, ())]
        if len(names) > 1:
            raise ValueError(f"a text can follow only one of {' and '.join(names)}")
        return self

    @field_validator("stop")
    @classmethod
    def _refuse_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string would end every text before it begins. Leave it out")
        return value
