"""`LanguageModel`, the Python API: load a model, read its logits, generate text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, overload

from sheepop.adapt.scalar_head import REWARD_HEAD
from sheepop.checkpoint.generation_settings import GENERATION
from sheepop.core.errors import UsageError
from sheepop.evaluate.likelihood import Score, score_text
from sheepop.generate import Completion, GenerationConfig, Generator
from sheepop.generate.arithmetic import computing
from sheepop.generate.config import Activations, Settings, model_defaults, requested
from sheepop.generate.updates import TextStream
from sheepop.interpret.control.analyses import Analyses
from sheepop.interpret.trace import Trace
from sheepop.jobs.generate import load_adapted, load_draft
from sheepop.jobs.tokenizer import find_tokenizer
from sheepop.model import ModelConfig, Transformer
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.posttrain.encoding import ExampleEncoder
from sheepop.posttrain.preference import answer_rewards
from sheepop.posttrain.rows import RowError
from sheepop.tokenizer import ChatTemplate, Tokenizer
from sheepop.tokenizer.messages import Message
from sheepop.tokenizer.ready_templates import template_of

_TOGETHER = 32


@dataclass(frozen=True)
class LanguageModel:
    """A network with its tokenizer. ``lm.model(input_ids)`` maps (B, T) ids to (B, T, V) logits.

    An encoder-decoder takes the ids of sources (B, S) and of targets (B, T). `defaults` are the model's own settings,
    which hold for what a call leaves out. With the setting `guesses`, `draft_model`
    proposes the tokens of speculative decoding. Up to `max_batch_size` texts are written at a time. The `memory` of the
    training text, if the model has one, corrects what it predicts; ``dataclasses.replace(lm, memory=None)`` leaves it
    out.

    The keys and values of earlier calls stay, so that the next turn of a conversation is read from its new tokens on;
    `close` frees them.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig
    end_ids: tuple[int, ...] = ()
    draft_model: Transformer | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_batch_size: int = 16
    memory: CorpusMemory | None = None

    @overload
    def generate(
        self, prompt: str, *, on_text: Callable[[str], None] | None = None, **settings: Unpack[Settings]
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: list[str], *, on_text: Callable[[int, str], None] | None = None, **settings: Unpack[Settings]
    ) -> list[Completion]: ...

    def generate(
        self, prompt: str | list[str], *, on_text: Callable[..., None] | None = None, **settings: Unpack[Settings]
    ) -> Completion | list[Completion]:
        """Continues `prompt`; the keyword arguments are those of `Settings`, with the names of ``sheepop generate``.

        `on_text` is called with each new piece of text. For a list of prompts, see `generate_batch`. Raises
        `ConfigError` for a setting out of range, `UsageError` for an unknown setting and for a prompt that is empty or
        too long. If the network's logits are not finite for some of several prompts, the other texts are written to
        their end; then `sheepop.generate.NotFiniteError` is raised, whose `completions` has them, with None for each
        text that is lost.
        """
        if not isinstance(prompt, str):
            return self.generate_batch(prompt, on_text=on_text, **settings)
        config = self._of_one_text(settings)
        return self._generator.generate([prompt], config, on_text=on_text and (lambda _, text: on_text(text)))[0]

    def generate_batch(
        self, prompts: list[str], *, on_text: Callable[[int, str], None] | None = None, **settings: Unpack[Settings]
    ) -> list[Completion]:
        """Continues several prompts together; each gets the same text as from `generate`.

        With `num_completions` above 1 the completions of the first prompt come first, then those of the next.
        """
        return self._generator.generate(prompts, requested(**settings).over(self.defaults), on_text=on_text)

    def stream(self, prompt: str, **settings: Unpack[Settings]) -> TextStream:
        """Yields the text of `generate` in pieces: ``for piece in lm.stream("Once"): print(piece, end="")``."""
        return self._generator.stream(prompt, requested(**settings).over(self.defaults))

    def score(self, text: str, *, context: int | None = None, activations: Activations = "exact") -> Score:
        """Scores how well the model predicts each token of `text`, in windows of `context` tokens; see `score_text`.

        With rounded `activations` it shows what rounding the inputs of products costs.
        """
        network = computing(self.model, activations=activations)
        return score_text(network, self.tokenizer, text, context=context, memory=self.memory)

    def trace(self, prompt: str | Sequence[int], target: str | Sequence[int] | None = None) -> Trace:
        """Traces a pass over `prompt`: ``lm.trace("Hello World")["blocks.0.attention.weights"]`` is (H, T, T).

        An encoder-decoder reads `prompt` as its source; `target` is the beginning of its target. Raises `UsageError`
        for a prompt that is empty or longer than the context.
        """
        return Trace.of(self.model, self.tokenizer, prompt, target)

    @property
    def analyze(self) -> Analyses:
        """The model as a control system: ``lm.analyze.gains("Hello World")`` measures the gains of every block."""
        return Analyses(self.model, self.tokenizer)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[Settings],
    ) -> Completion:
        """The model's answer to a conversation, a list of ``{"role": ..., "content": ...}``.

        The model's own chat template makes the prompt: that of the name `chat_template`, else with `tools` (JSON
        schemas of functions) the one called ``tool_use`` if there is one, else ``default``. It also sees `documents`
        and `chat_template_kwargs`, such as ``{"enable_thinking": False}``. With `continue_final_message`, the model
        goes on with the last message. Raises `TokenizerError` if the model has no such template.
        """
        with ChatTemplate.of(self.tokenizer, chat_template, chat_template_kwargs) as template:
            token_ids = template.encode(
                self.tokenizer,
                messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
            )
        return self._generator.generate([token_ids], self._of_one_text(settings))[0]

    def rewards(
        self,
        prompt: str | Sequence[Message],
        answers: Sequence[str],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[float]:
        """The rewards of a reward model for answers to a prompt, which is a text or a conversation.

        The chat template reads `chat_template_kwargs`. Raises `UsageError` for a model without a reward head, and for
        an answer that cannot be encoded.
        """
        if not hasattr(self.model, REWARD_HEAD):
            raise UsageError("This model is no reward model. Train one with: sheepop tune reward")
        with template_of(self.tokenizer, chat_template_kwargs) as template:
            encode = ExampleEncoder(self.tokenizer, template, self.end_ids)
            try:
                rows = [
                    encode.answer(prompt if isinstance(prompt, str) else tuple(prompt), text).ids for text in answers
                ]
            except RowError as error:
                raise UsageError(f"An answer cannot be scored: it {error}.") from None
        found = answer_rewards(self.model, rows, batch_size=_TOGETHER, pad_id=self.tokenizer.filler_id)
        return [float(value) for value in found]

    def close(self) -> None:
        """Frees the memory of earlier calls, and ends their processes; later calls start anew."""
        self._generator.close()

    @cached_property
    def _generator(self) -> Generator:
        return Generator(
            self.model,
            self.tokenizer,
            max_batch_size=self.max_batch_size,
            end_ids=self.end_ids,
            draft_model=self.draft_model,
            memory=self.memory,
        )

    def _of_one_text(self, settings: Settings) -> GenerationConfig:
        config = requested(**settings).over(self.defaults)
        if config.num_completions > 1:
            raise UsageError(
                f"This returns one text, but num_completions = {config.num_completions}. "
                "lm.generate_batch([prompt], ...) returns all of them."
            )
        return config


def load(
    path: str | Path,
    device: str = "auto",
    dtype: str | None = None,
    *,
    draft_model: str | Path | None = None,
    adapters: Sequence[str | Path] = (),
    max_batch_size: int = 16,
) -> LanguageModel:
    """Loads a run (its best checkpoint), a checkpoint or a model directory onto `device`.

    `path` is also a GGUF file, a directory in Hugging Face's format, or the name of a published model, such as
    ``Qwen/Qwen3-0.6B``, which is fetched if it is not in the cache.
    `dtype` is float32, bfloat16 or float16; None keeps the type of the stored weights. `draft_model` is a smaller model
    with the same tokenizer, which proposes tokens with the setting `guesses`. `adapters` are directories in PEFT's
    format, or models tuned with LoRA, to add to the weights. Up to `max_batch_size` texts are written at a time. The
    weights do not require gradients; ``lm.model.requires_grad_()`` makes them trainable.
    """
    loaded = load_adapted(path, adapters, device=device, dtype=dtype)
    draft = None if draft_model is None else load_draft(draft_model, loaded, dtype)
    defaults = model_defaults(loaded.generation, str(loaded.directory / GENERATION))
    network = loaded.model.requires_grad_(False)
    memory = None if adapters else loaded.memory
    return LanguageModel(
        network, loaded.tokenizer, loaded.config, loaded.end_ids, draft, defaults, max_batch_size, memory
    )


def load_tokenizer(path: str | Path, *, pattern: str | None = None) -> Tokenizer:
    """Loads a tokenizer from a tokenizer file or directory, or from a model, run or corpus.

    It reads ``tokenizer.json``, SentencePiece models, tiktoken's rank files and GPT-2's ``encoder.json`` with
    ``vocab.bpe``. `pattern` is the regular expression by which a rank file splits text, if its name does not imply it.
    """
    return find_tokenizer(path, pattern)
