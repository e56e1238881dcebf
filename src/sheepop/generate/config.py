"""The configuration subtree `generation`: how long to write, how to choose each token, when to stop."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sheepop.core.config import Config


class GenerationConfig(Config):
    """How text is continued. Temperature 0 is greedy: the likeliest token each time, and no randomness at all."""

    max_new_tokens: int = Field(default=256, ge=1, description="tokens to write at most")
    temperature: float = Field(default=0.8, ge=0.0, description="below 1 sharpens, above 1 flattens; 0 is greedy")
    top_k: int | None = Field(default=None, ge=1, description="sample among the k likeliest tokens; null is all")
    top_p: float = Field(
        default=0.95, gt=0.0, le=1.0, description="sample among the fewest tokens that have this probability; 1 is all"
    )
    # The bounds are far outside of use; beyond them products with logits could overflow.
    repetition_penalty: float = Field(
        default=1.0,
        ge=0.01,
        le=100.0,
        description="above 1 makes tokens of the prompt and of the text so far less likely",
    )
    num_beams: int = Field(
        default=1,
        ge=1,
        le=1024,
        strict=True,
        description="texts that beam search follows at a time, without drawing; 1 does not",
    )
    length_penalty: float = Field(
        default=0.6, ge=0.0, le=10.0, description="of beam search: 0 compares probabilities, which favours short texts"
    )
    seed: int | None = Field(default=None, description="the same seed gives the same text; null draws one")
    stop: tuple[str, ...] = Field(default=(), description="the text ends before the first of these strings")
    use_cache: bool = Field(default=True, description="false runs the network on the whole text for every token")
    on_overflow: Literal["refuse", "window"] = Field(
        default="refuse",
        description="refuse a prompt that fills the context and stop writing at its end, or window: "
        "go on with the last tokens",
    )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self.temperature == 0

    @model_validator(mode="before")
    @classmethod
    def _search_does_not_draw(cls, given: Any) -> Any:
        beams = given.get("num_beams") if isinstance(given, dict) else None
        if isinstance(beams, int) and beams > 1:
            return {"temperature": 0.0, **given}
        return given

    @model_validator(mode="after")
    def _check_search(self) -> GenerationConfig:
        def is_set(name: str) -> bool:
            return bool(getattr(self, name) != type(self).model_fields[name].default)

        if self.num_beams == 1:
            return self
        if not self.greedy:
            raise ValueError(
                f"num_beams = {self.num_beams} looks for the likeliest text and draws nothing, so temperature = "
                f"{self.temperature} has no place beside it. Leave it out, or set it to 0"
            )
        for name in ("top_k", "top_p", "repetition_penalty", "stop", "on_overflow"):
            if is_set(name):
                raise ValueError(
                    f"num_beams = {self.num_beams} does not go with {name} = {getattr(self, name)!r}; leave one out"
                )
        return self

    @field_validator("stop")
    @classmethod
    def _refuse_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string would end every text before it begins. Leave it out")
        return value
