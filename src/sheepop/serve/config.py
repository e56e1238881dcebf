"""The configuration subtree `server`: its address, limits, and who may use it."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from pydantic import Field, model_validator

from sheepop.core.config import Config, PathText
from sheepop.generate.config import Activations, CacheDtype

_LONGEST = 64  # characters of a duration
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"[-+]?((\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h))+")


def duration(given: float | str) -> float:
    """Returns the seconds of a number or of a duration such as ``1h30m``, as Ollama reads them: negative is for ever.

    Raises `ValueError` for anything else.
    """
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        text = str(given)
        if len(text) > _LONGEST or not _DURATION.fullmatch(text):
            message = (
                f"{text[:_LONGEST]!r} is no duration. Give seconds, or numbers with units such as 90s, 5m or 1h30m"
            )
            raise ValueError(message) from None
        seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)([a-zµ]+)", text))
        seconds = -seconds if text.startswith("-") else seconds
    if math.isnan(seconds):
        raise ValueError("keep_alive is not a number")
    return math.inf if seconds < 0 else seconds


class ServerConfig(Config):
    """How models are served over HTTP."""

    host: str = "127.0.0.1"
    """The address to listen on; `0.0.0.0` is every address of this machine."""
    port: int = Field(default=8000, ge=0, le=65535)
    """The port to listen on; 0 chooses a free one."""
    api_keys: PathText | None = None
    """A JSON file of API keys and their limits; `null` lets everyone use the server."""
    api_key: str | None = Field(default=None, min_length=8, repr=False)
    """One API key without limits, alone or beside those of the file."""
    ui: bool = False
    """Serve a page that looks inside the models, at `/ui`; it needs no key, and only this machine can open it."""
    votes: PathText = "votes.jsonl"
    """The file where the page saves your votes between two answers, for `sheepop tune dpo` and `reward`."""
    log: PathText | None = None
    """The directory of the log of conversations: prompts, answers, votes and times, with placeholders for personal data
    and secrets; `null` records nothing."""
    log_memory: float = Field(default=1.0, ge=0.05)
    """GiB for the log; the oldest files are removed when it is larger."""
    log_days: float = Field(default=90.0, gt=0)
    """How many days the files of the log are kept."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat templates to read, such as `{enable_thinking: false}`, unless a request gives others."""
    chat_template: PathText | None = None
    """A file with a chat template in Jinja, or a ready one by name (`chatml`, `gemma`, `llama3`), for all models;
    `null` is each model's own."""
    answer_format: Literal[
        "auto", "harmony", "deepseek", "dsml", "kimi", "minimax", "cohere", "command_r", "lfm2", "granite", "nemotron",
        "jamba", "olmo", "internlm", "seed", "mistral", "gemma", "function_gemma", "llama3", "hermes", "json",
    ] = "auto"  # fmt: skip
    """How the models write tool calls; `auto` tells it from each chat template."""
    max_model_len: int | None = Field(default=None, ge=2)
    """The longest context, in tokens; `null` is the model's own."""
    cors_origins: tuple[str, ...] = ()
    """The web pages that may use the server, such as `https://example.org`; `*` is every one."""
    protect_metrics: bool = False
    """Require a key for `/metrics` and `/openapi.json` too."""
    embedding_pooling: Literal["mean", "last"] = "mean"
    """What an embedding is made of: the mean of the last hidden states, or that of the last token."""
    certificate: PathText | None = None
    """A TLS certificate file; `null` serves plain HTTP."""
    private_key: PathText | None = None
    """The private key file of the certificate, without a passphrase."""
    max_running: int = Field(default=32, ge=1)
    """The most texts that are generated at a time."""
    max_waiting: int = Field(default=256, ge=0)
    """The most requests that wait; more are refused with status 503."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """The most tokens that the network reads in a step: a higher limit reads long prompts faster, but delays the tokens
    of other texts more. `null` is 512 on a CPU and 8192 on a GPU."""
    memory_budget: float | None = Field(default=None, gt=0)
    """GiB for all models together, their weights and caches; `null` is nine tenths of the memory that is free at the
    start."""
    keep_alive: float | str = -1.0
    """How long an idle model stays loaded: seconds, or a duration such as `5m` or `1h30m`; a negative one is until
    another model needs the memory."""
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other names of models, such as `{gpt-4o: quickstart}`."""
    adapter_directory: PathText | None = None
    """A directory whose adapters clients may load and drop while the server runs; `null` allows none."""
    cache_memory: float | None = Field(default=None, gt=0)
    """GiB for the cached keys and values of each model; `null` is what `max_running` texts need, at most an even share
    of what the weights leave of `memory_budget`."""
    cache_dtype: CacheDtype = "auto"
    """The data type of cached keys and values; see `generation.cache_dtype`."""
    activations: Activations = "exact"
    """The inputs of matrix products on a CPU, exact or rounded; see `generation.activations`."""
    batch_invariant: bool = False
    """Compute each text independently of other requests; see `generation.batch_invariant`."""
    guesses: int = Field(default=0, ge=0, le=64)
    """How many tokens to guess ahead for each text; see `generation.guesses`."""
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """The largest body of a request, in bytes."""
    client_seconds: float = Field(default=30.0, gt=0)
    """How long a client may take to send a request, and to read data that was sent to it, before it is disconnected."""
    deadline_seconds: float = Field(default=600.0, gt=0)
    """The longest time for a request, including waiting."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long open requests may still take after the server is told to stop."""
    tensor_parallel: int = Field(default=1, ge=1)
    """How many processes each hold a part of every model, one per GPU."""
    engine: Literal["local", "ray"] = "local"
    """Where the models run: in this process, or in replicas on a Ray cluster."""
    replicas: int = Field(default=1, ge=1)
    """How many copies of the models run, with engine `ray`; the limits above apply to each of them."""
    replica_cores: int | None = Field(default=None, ge=1)
    """CPU cores of a replica, with engine `ray`; `null` shares those of the cluster evenly."""

    @model_validator(mode="after")
    def _check_models(self) -> ServerConfig:
        duration(self.keep_alive)
        if self.adapter_directory is not None and (self.engine == "ray" or self.tensor_parallel > 1):
            raise ValueError("adapter_directory needs models that run in this process, without tensor_parallel")
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> ServerConfig:
        if self.engine == "local" and (self.replicas > 1 or self.replica_cores is not None):
            raise ValueError("replicas and replica_cores need engine = ray; this process runs every model once")
        if self.tensor_parallel > 1 and (self.engine == "ray" or self.ui):
            raise ValueError("tensor_parallel splits models, which neither engine = ray nor ui supports")
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key: TLS needs both, or neither")
        if self.ui and self.engine == "ray":
            raise ValueError("ui looks into models of this process; choose engine = local")
        if self.log is not None and self.engine == "ray":
            raise ValueError("log records the models of this process; choose engine = local")
        if self.ui and (self.api_keys is not None or self.api_key is not None):
            raise ValueError("ui works without keys, so it cannot be combined with api_keys; serve it separately")
        return self
