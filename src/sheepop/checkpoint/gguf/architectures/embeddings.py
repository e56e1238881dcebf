"""What enters the network and what leaves it: embeddings, positions added to them, the output projection."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from sheepop.checkpoint.gguf.architectures.aspects import Entries, Presence, Settings, is_close
from sheepop.checkpoint.gguf.keys import Keys
from sheepop.model.config import ModelConfig


@dataclass(frozen=True)
class EmbeddingInScale:
    """No factor of its own: the embeddings are written as they enter the network, and the output projection apart."""

    fields: tuple[str, ...] = ("embedding_scale",)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """None."""
        return iter(())

    def write(self, config: ModelConfig) -> Entries:
        """Nothing: the tensors have it."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """No factor."""
        return {"embedding_scale": 1.0}


@dataclass(frozen=True)
class EmbeddingScale:
    """The factor of the embeddings, a function of the model's width."""

    factor: Callable[[int], float]
    fields: tuple[str, ...] = ("embedding_scale",)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Another factor."""
        factor, own = self.factor(config.d_model), config.embedding_scale or 1.0
        if not is_close(own, factor):
            yield f"embedding_scale = {own:g}, and it multiplies embeddings by {factor:g}"

    def write(self, config: ModelConfig) -> Entries:
        """Nothing."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The factor."""
        return {"embedding_scale": self.factor(settings["d_model"])}


@dataclass(frozen=True)
class AddedPositions:
    """A table that is added to the embeddings; sinusoids are written as the table they are."""

    fields: tuple[str, ...] = ("position_encoding", "position_base")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Positions that are not added."""
        if config.position_encoding not in ("learned", "sinusoidal"):
            yield f"position_encoding = {config.position_encoding}, and it adds a table"

    def write(self, config: ModelConfig) -> Entries:
        """Nothing: the tensor has it."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """A table as if it were learned."""
        return {"position_encoding": "learned"}


@dataclass(frozen=True)
class TiedWeights:
    """Whether the file has an output projection of its own: as the model has (optional), always, or never."""

    presence: Presence
    fields: tuple[str, ...] = ("tie_weights",)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """A projection of its own where llama.cpp takes the embedding."""
        if self.presence == "never" and not config.tie_weights:
            yield "tie_weights = False, and its output projection is the embedding"

    def write(self, config: ModelConfig) -> Entries:
        """Nothing: the tensors say it."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """Tied, unless the projection is there."""
        return {"tie_weights": "output.weight" not in tensors}
