"""Text from a trained model: the sampler, stop strings, and the generator that runs several prompts at once."""

from sheepop.generate.config import GenerationConfig
from sheepop.generate.generator import Generator
from sheepop.generate.request import Completion, FinishReason

__all__ = ["Completion", "FinishReason", "GenerationConfig", "Generator"]
