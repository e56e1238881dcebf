"""Text from a trained model: the sampler, stop strings, and the generator that runs several prompts at once."""

from sheepop.generate.completion import Completion, FinishReason
from sheepop.generate.config import GenerationConfig
from sheepop.generate.generator import Generator

__all__ = ["Completion", "FinishReason", "GenerationConfig", "Generator"]
