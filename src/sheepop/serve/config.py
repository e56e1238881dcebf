"""The configuration subtree `server`: where it listens, how much it takes on, who may ask."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sheepop.core.config import Config, PathText


class ServerConfig(Config):
    """How models are served over HTTP."""

    host: str = "127.0.0.1"
    """The address to listen on; `0.0.0.0` is every address of this machine."""
    port: int = Field(default=8000, ge=0, le=65535)
    """The port to listen on; 0 takes a free one."""
    api_keys: PathText | None = None
    """A JSON file of keys that may ask, each with its limits; `null` lets everyone ask."""
    ui: bool = False
    """Serve a page that looks inside the models, at `/ui`; it asks without a key, and from this machine only."""
    votes: PathText = "votes.jsonl"
    """Where the page keeps which of two answers you liked better, for `sheepop tune dpo` and `reward`."""
    certificate: PathText | None = None
    """A TLS certificate; `null` is plain HTTP."""
    private_key: PathText | None = None
    """The key of the certificate, without a passphrase."""
    max_running: int = Field(default=32, ge=1)
    """Texts that are written at a time."""
    max_waiting: int = Field(default=256, ge=0)
    """Requests that wait for their turn; more are refused with status 503."""
    tokens_per_step: int = Field(default=512, ge=1)
    """Tokens that the network reads in a step: more make long prompts faster and the other texts less even."""
    cache_memory: float | None = Field(default=None, gt=0)
    """GiB for keys and values; `null` is what `max_running` texts need, and at most half of what is free."""
    cache_dtype: Literal["auto", "int8"] = "auto"
    """As what keys and values are cached; see `generation.cache_dtype`."""
    batch_invariant: bool = False
    """No text depends on what else runs; see `generation.batch_invariant`."""
    guesses: int = Field(default=0, ge=0, le=64)
    """Tokens to guess ahead for each text; see `generation.guesses`."""
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """The largest body of a request."""
    client_seconds: float = Field(default=30.0, gt=0)
    """How long a client may take to send a request, and to read what was written for it, before it is cut off."""
    deadline_seconds: float = Field(default=600.0, gt=0)
    """The longest time for a request, waiting included."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long requests may still take once the server was asked to stop."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Processes that have a part of every model each, one a GPU."""
    engine: Literal["local", "ray"] = "local"
    """Where the models run: in this process, or in replicas on a Ray cluster."""
    replicas: int = Field(default=1, ge=1)
    """How many copies of the models run, with engine `ray`; the limits above hold for each of them."""
    replica_cores: int | None = Field(default=None, ge=1)
    """Processor cores of a replica, with engine `ray`; `null` shares those of the cluster evenly."""

    @model_validator(mode="after")
    def _check_engine(self) -> ServerConfig:
        if self.engine == "local" and (self.replicas > 1 or self.replica_cores is not None):
            raise ValueError("replicas and replica_cores need engine = ray; this process runs every model once")
        if self.tensor_parallel > 1 and (self.engine == "ray" or self.ui):
            raise ValueError("tensor_parallel splits models, which neither replicas nor the page that looks inside do")
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("certificate and private_key: TLS needs both, or neither")
        if self.ui and self.engine == "ray":
            raise ValueError("ui looks into models of this process; choose engine = local")
        if self.ui and self.api_keys is not None:
            raise ValueError("ui asks without a key, so it does not go with api_keys; serve it by itself")
        return self
