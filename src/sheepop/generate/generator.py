"""Continues prompts with a trained network."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sheepop.core.errors import CheckpointError, TokenizerError, UsageError
from sheepop.core.random import torch_generator
from sheepop.generate.beam_search import Beam, search
from sheepop.generate.completion import Completion
from sheepop.generate.config import GenerationConfig
from sheepop.generate.request import Request
from sheepop.generate.runner import IncrementalRunner, RecomputingRunner, Runner
from sheepop.generate.sampler import apply_repetition_penalty, next_token_probabilities, sample
from sheepop.model import EncoderDecoder, Transformer
from sheepop.tokenizer import Tokenizer

OnText = Callable[[int, str], None]


class Generator:
    """Writes continuations in the data type of the model's parameters; with an encoder-decoder, targets for sources.

    `device` moves the model; None leaves it where it is. At most `max_batch_size` prompts run at once, which bounds
    the memory of their keys and values. `end_ids` end a text beside the tokenizer's own token for it. Raises
    `TokenizerError` when the tokenizer has more tokens than the model.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        device: torch.device | str | None = None,
        max_batch_size: int = 16,
        end_ids: Sequence[int] = (),
    ) -> None:
        rows = model.config.vocabulary
        if tokenizer.vocab_size > rows:
            raise TokenizerError(
                f"The tokenizer has {tokenizer.vocab_size} tokens and the model only {rows}. "
                "Use the tokenizer that the model was trained with."
            )
        if max_batch_size < 1:
            raise UsageError(f"max_batch_size must be at least 1, got {max_batch_size}.")
        self.model = model if device is None else model.to(device)
        if self.model.device.type == "cuda":
            self.model.pack_projections()
        self.tokenizer = tokenizer
        self.max_batch_size = max_batch_size
        own = tokenizer.special_id("eos")
        self._end_ids = frozenset(end_ids if own is None else (*end_ids, own))
        self._forbidden = _forbidden_tokens(tokenizer, rows, self._end_ids)

    @property
    def continues_prompts(self) -> bool:
        """Whether a text goes on where its prompt ends; an encoder-decoder's stands by itself."""
        return not isinstance(self.model, EncoderDecoder)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        config: GenerationConfig | None = None,
        *,
        batched: bool = True,
        on_text: OnText | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """Continues every prompt, a text or a list of token ids; completions come in the order of the prompts.

        For an encoder-decoder a prompt is a source, and what is written its target.

        The text of prompt i is a function of (model, prompt, config, seed, i): running prompts together or, with
        `batched` False, one after the other gives the same text, up to the rounding of the network's arithmetic.
        A text begins with the tokens that the tokenizer's makers put before every text; token ids are taken as they
        are. `on_text` is called with (i, piece) as text becomes final, and the pieces of i joined are its text. Once
        `should_stop` is true, what is unfinished ends with the reason ``abort``.

        Raises `UsageError` for a prompt that is empty, holds a token id outside the vocabulary, or fills the context
        while `on_overflow` is ``refuse``; `CheckpointError` when the network's logits are not finite.
        """
        config = config or GenerationConfig()
        seed = secrets.randbits(32) if config.seed is None else config.seed
        requests = self._requests(prompts, config, seed)
        run = self._run if config.num_beams == 1 else self._search
        size = max(1, self.max_batch_size // config.num_beams) if batched else 1
        with _inference(self.model):
            for first in range(0, len(requests), size):
                run(requests[first : first + size], config, on_text, should_stop)
        return [request.completion() for request in requests]

    def require(self, prompts: Sequence[str | Sequence[int]], config: GenerationConfig) -> None:
        """Raises `UsageError` for a prompt that `generate` would refuse; nothing is computed."""
        self._requests(prompts, config, seed=0)

    def _run(
        self,
        active: list[Request],
        config: GenerationConfig,
        on_text: OnText | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        """Runs requests together until all have ended; those that end leave the batch."""
        runner = self._runner(active, config)
        restart = True
        while active:
            if should_stop is not None and should_stop():
                for request in active:
                    _hand_on(request.index, request.finish("abort"), on_text)
                return
            if restart:
                logits = runner.start([r.context for r in active], [r.num_remaining for r in active])
            else:
                logits = runner.step([r.context[-1] for r in active])
            for request, (token_id, logprob) in zip(active, self._choose(logits, active, config), strict=True):
                _hand_on(request.index, request.accept(token_id, logprob), on_text)
            rows = [row for row, request in enumerate(active) if request.finish_reason is None]
            if 0 < len(rows) < len(active):
                runner.keep_rows(rows)
            active = [active[row] for row in rows]
            restart = any(request.context_overflows for request in active)
            for request in active:
                if request.context_overflows:
                    request.slide()

    def _search(
        self,
        requests: list[Request],
        config: GenerationConfig,
        on_text: OnText | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        """Writes the best text that beam search finds for every request."""
        beams = [
            Beam(
                num_beams=config.num_beams,
                max_tokens=request.num_remaining,
                end_ids=self._end_ids,
                length_penalty=config.length_penalty,
            )
            for request in requests
        ]

        def log_probabilities(logits: Tensor) -> Tensor:
            logits = logits.cpu().double()
            _require_finite(logits, [request for request, beam in zip(requests, beams, strict=True) for _ in beam.live])
            return logits.log_softmax(-1).masked_fill(self._forbidden, -torch.inf)

        search(self._runner(requests, config), [r.context for r in requests], beams, log_probabilities, should_stop)
        for request, beam in zip(requests, beams, strict=True):
            best = beam.best()
            text = "".join(map(request.accept, best.token_ids, best.logprobs))
            _hand_on(request.index, text if request.finish_reason else text + request.finish("abort"), on_text)

    def _runner(self, requests: list[Request], config: GenerationConfig) -> Runner:
        """What runs the network on the requests' contexts, and on their sources once."""
        sources = [request.source_ids for request in requests if request.source_ids is not None] or None
        return (IncrementalRunner if config.use_cache else RecomputingRunner)(self.model, sources)

    def _choose(self, logits: Tensor, active: list[Request], config: GenerationConfig) -> list[tuple[int, float]]:
        """The next token of every row of `logits` (B, V) and its log-probability under the model."""
        logits = logits.cpu().double()  # in two steps, since not every device has float64
        _require_finite(logits, active)
        scores = logits
        if config.repetition_penalty != 1:
            scores = apply_repetition_penalty(scores, _seen(active, logits.shape[-1]), config.repetition_penalty)
        scores = scores.masked_fill(self._forbidden, -torch.inf)
        if config.greedy:
            token_ids = scores.argmax(dim=-1)
        else:
            rows = zip(next_token_probabilities(scores, config), active, strict=True)
            token_ids = torch.tensor(
                [sample(row, torch_generator(r.seed, "token", len(r.token_ids))) for row, r in rows]
            )
        logprobs = logits.gather(-1, token_ids[:, None])[:, 0] - logits.logsumexp(dim=-1)
        return list(zip(token_ids.tolist(), logprobs.tolist(), strict=True))

    def _requests(self, prompts: Sequence[str | Sequence[int]], config: GenerationConfig, seed: int) -> list[Request]:
        if isinstance(prompts, str):
            raise UsageError("prompts is a list of prompts; for a single one pass [prompt].")
        max_seq_len = self.model.config.max_seq_len
        requests = []
        for index, prompt in enumerate(prompts):
            name = "The prompt" if len(prompts) == 1 else f"Prompt {index + 1}"
            token_ids, source_ids = self._encode(name, prompt), None
            text = prompt if isinstance(prompt, str) else self.tokenizer.decode(token_ids)
            if not self.continues_prompts:
                source_ids = self._source(name, token_ids, config)
                token_ids = [self.tokenizer.bos_id]
            elif config.on_overflow == "refuse" and len(token_ids) >= max_seq_len:
                raise UsageError(
                    f"{name} has {len(token_ids)} tokens, and the model's context of max_seq_len = {max_seq_len} holds "
                    f"at most {max_seq_len - 1} and a new one. Shorten it, or set on_overflow=window (--window) to "
                    "keep only its last tokens."
                )
            requests.append(
                Request(
                    index,
                    text,
                    token_ids,
                    config,
                    self.tokenizer,
                    self._end_ids,
                    max_seq_len=max_seq_len,
                    seed=seed,
                    source_ids=source_ids,
                )
            )
        return requests

    def _source(self, name: str, token_ids: list[int], config: GenerationConfig) -> list[int]:
        """What the encoder reads of a prompt."""
        if config.on_overflow == "window":
            raise UsageError("on_overflow=window (--window) drops the beginning of a text, which a target needs.")
        longest = self.model.config.max_seq_len
        if len(token_ids) >= longest:
            raise UsageError(
                f"{name} has {len(token_ids)} tokens, and the encoder's max_seq_len = {longest} holds at most "
                f"{longest - 1} and the one that ends a source. Shorten it."
            )
        return [*token_ids, self.tokenizer.eos_id]

    def _encode(self, name: str, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            try:
                prompt.encode("utf-8")
            except UnicodeEncodeError as error:
                raise UsageError(
                    f"{name} is not valid Unicode text: character {error.start} is half of a surrogate pair, as bytes "
                    "that are not UTF-8 become. Give it as UTF-8."
                ) from None
            prefix_ids = self.tokenizer.prefix_ids if self.continues_prompts else ()
            token_ids = [*prefix_ids, *self.tokenizer.encode(prompt)]
        else:
            token_ids = _token_ids(name, prompt)
        if not token_ids:
            raise UsageError(f"{name} is empty. Give at least one character for the model to continue.")
        for place, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.tokenizer.vocab_size:
                raise UsageError(
                    f"{name}: token id {token_id} at position {place} is not in the vocabulary. "
                    f"Ids run from 0 to {self.tokenizer.vocab_size - 1}."
                )
        return token_ids


@contextmanager
def _inference(model: Transformer) -> Iterator[None]:
    """Without dropout, gradients and autocast; the model's mode is restored, so training can go on."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), torch.autocast(model.embedding.weight.device.type, enabled=False):
            yield
    finally:
        model.train(was_training)


def _forbidden_tokens(tokenizer: Tokenizer, num_rows: int, end_ids: frozenset[int]) -> Tensor:
    """(V,) True for rows of the model that are never written: no token, padding, unknown, beginning of document."""
    forbidden = torch.arange(num_rows) >= tokenizer.vocab_size
    for token_id in (tokenizer.special_id("pad"), tokenizer.special_id("unk"), tokenizer.special_id("bos")):
        if token_id is not None and token_id not in end_ids:  # some tokenizers have one token for several of these
            forbidden[token_id] = True
    return forbidden


def _seen(active: list[Request], vocab_size: int) -> Tensor:
    """(B, V) True where a token occurs in a request's prompt or text."""
    seen = torch.zeros(len(active), vocab_size, dtype=torch.bool)
    for row, request in enumerate(active):
        seen[row, request.prompt_ids + request.token_ids] = True
    return seen


def _require_finite(logits: Tensor, active: list[Request]) -> None:
    if logits.isfinite().all():
        return
    row = int((~logits.isfinite()).any(dim=-1).nonzero()[0])
    request = active[row]
    raise CheckpointError(
        f"The network's logits for the token at position {request.position} of prompt {request.index} and its text are "
        "not finite (NaN or infinity), so the model is not usable: its weights are damaged or its training diverged. "
        "Use an earlier checkpoint."
    )


def _token_ids(name: str, prompt: Sequence[int]) -> list[int]:
    try:
        return [operator.index(value) for value in prompt]
    except TypeError:
        raise UsageError(f"{name} is neither text nor a list of token ids, which are integers: {prompt!r}.") from None


def _hand_on(index: int, text: str, on_text: OnText | None) -> None:
    if on_text is not None and text:
        on_text(index, text)
