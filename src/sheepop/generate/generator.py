"""Continues prompts with a trained network."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sheepop.core.errors import CheckpointError, TokenizerError, UsageError
from sheepop.core.random import torch_generator
from sheepop.generate.beam_search import Beam, search
from sheepop.generate.config import GenerationConfig
from sheepop.generate.prompt import read_prompt
from sheepop.generate.request import Completion, Request
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
                f"The tokenizer has {tokenizer.vocab_size} tokens, but the model has only {rows}. "
                "Use the tokenizer that the model was trained with."
            )
        if max_batch_size < 1:
            raise UsageError(f"max_batch_size must be at least 1, got {max_batch_size}.")
        # A copy of the modules: whoever trains the model meanwhile keeps its mode, and no dropout is drawn here.
        self.model = (model if device is None else model.to(device)).sharing_copy().eval()
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
        config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        batched: bool = True,
        on_text: OnText | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """Continues every prompt, a text or a list of token ids; completions come in the order of the prompts.

        For an encoder-decoder a prompt is a source, and what is written its target. `config` is one for all prompts, or
        one for each; those of prompts that are given together agree in `num_beams` and `use_cache`.

        The text of prompt i is a function of (model, prompt, config, seed, i): running prompts together or, with
        `batched` False, one after the other gives the same text, up to the rounding of the network's arithmetic.
        A text begins with the tokens that the tokenizer's makers put before every text; token ids are taken as they
        are. `on_text` is called with (i, piece) as text becomes final, and the pieces of i joined are its text. Once
        `should_stop` is true, what is unfinished ends with the reason ``abort``.

        Raises `UsageError` for a prompt that is empty, holds a token id outside the vocabulary, or fills the context
        while `on_overflow` is ``refuse``; `CheckpointError` when the network's logits are not finite.
        """
        requests = self._requests(prompts, config or GenerationConfig())
        if not requests:
            return []
        num_beams = requests[0].config.num_beams
        run = self._run if num_beams == 1 else self._search
        size = max(1, self.max_batch_size // num_beams) if batched else 1
        with torch.inference_mode(), torch.autocast(self.model.embedding.weight.device.type, enabled=False):
            for first in range(0, len(requests), size):
                run(requests[first : first + size], on_text, should_stop)
        return [request.completion() for request in requests]

    def require(self, prompts: Sequence[str | Sequence[int]], config: GenerationConfig) -> None:
        """Raises `UsageError` for a prompt that `generate` would refuse; nothing is computed."""
        self._requests(prompts, config)

    def _run(
        self,
        active: list[Request],
        on_text: OnText | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        """Runs requests together until all have ended; those that end leave the batch."""
        runner = self._runner(active)
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
            for request, (token_id, logprob) in zip(active, self._choose(logits, active), strict=True):
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
        on_text: OnText | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        """Writes the best text that beam search finds for every request."""
        beams = [
            Beam(
                num_beams=request.config.num_beams,
                max_tokens=request.num_remaining,
                end_ids=self._end_ids,
                length_penalty=request.config.length_penalty,
            )
            for request in requests
        ]

        def log_probabilities(logits: Tensor) -> Tensor:
            logits = logits.cpu().double()
            _require_finite(logits, [request for request, beam in zip(requests, beams, strict=True) for _ in beam.live])
            return logits.log_softmax(-1).masked_fill(self._forbidden, -torch.inf)

        search(self._runner(requests), [r.context for r in requests], beams, log_probabilities, should_stop)
        for request, beam in zip(requests, beams, strict=True):
            best = beam.best()
            text = "".join(map(request.accept, best.token_ids, best.logprobs))
            _hand_on(request.index, text if request.finish_reason else text + request.finish("abort"), on_text)

    def _runner(self, requests: list[Request]) -> Runner:
        """What runs the network on the requests' contexts, and on their sources once."""
        sources = [r.prompt.source_ids for r in requests if r.prompt.source_ids is not None] or None
        return (IncrementalRunner if requests[0].config.use_cache else RecomputingRunner)(self.model, sources)

    def _choose(self, logits: Tensor, active: list[Request]) -> list[tuple[int, float]]:
        """The next token of every row of `logits` (B, V) and its log-probability under the model."""
        logits = logits.cpu().double()  # in two steps, since not every device has float64
        _require_finite(logits, active)
        groups = _rows_of_equal_settings(active)
        if len(groups) == 1:
            token_ids = self._draw(logits, active)
        else:
            token_ids = torch.empty(len(active), dtype=torch.long)
            for rows in groups:
                token_ids[rows] = self._draw(logits[rows], [active[row] for row in rows])
        logprobs = logits.gather(-1, token_ids[:, None])[:, 0] - logits.logsumexp(dim=-1)
        return list(zip(token_ids.tolist(), logprobs.tolist(), strict=True))

    def _draw(self, scores: Tensor, requests: list[Request]) -> Tensor:
        """The next tokens (B,) of requests whose sampling settings are those of the first."""
        config = requests[0].config
        if config.repetition_penalty != 1:
            scores = apply_repetition_penalty(scores, _seen(requests, scores.shape[-1]), config.repetition_penalty)
        scores = scores.masked_fill(self._forbidden, -torch.inf)
        if config.greedy:
            return scores.argmax(dim=-1)
        rows = zip(next_token_probabilities(scores, config), requests, strict=True)
        return torch.tensor([sample(row, torch_generator(r.seed, "token", len(r.token_ids))) for row, r in rows])

    def _requests(
        self, prompts: Sequence[str | Sequence[int]], config: GenerationConfig | Sequence[GenerationConfig]
    ) -> list[Request]:
        if isinstance(prompts, str):
            raise UsageError("prompts must be a list of prompts; for a single one, pass [prompt].")
        configs = [config] * len(prompts) if isinstance(config, GenerationConfig) else list(config)
        _require_alike(configs, len(prompts))
        drawn = secrets.randbits(32)
        return [
            self._request(index, "The prompt" if len(prompts) == 1 else f"Prompt {index + 1}", prompt, settings, drawn)
            for index, (prompt, settings) in enumerate(zip(prompts, configs, strict=True))
        ]

    def _request(
        self, index: int, name: str, prompt: str | Sequence[int], config: GenerationConfig, drawn_seed: int
    ) -> Request:
        return Request(
            index,
            read_prompt(name, prompt, self.model, self.tokenizer, config.on_overflow),
            config,
            self.tokenizer,
            self._end_ids,
            max_seq_len=self.model.config.max_seq_len,
            seed=drawn_seed if config.seed is None else config.seed,
        )


def _require_alike(configs: Sequence[GenerationConfig], num_prompts: int) -> None:
    if len(configs) != num_prompts:
        raise UsageError(
            f"{num_prompts} prompts were given with {len(configs)} configurations; give one for all, or one per prompt."
        )
    for name in ("num_beams", "use_cache"):
        if len({getattr(config, name) for config in configs}) > 1:
            raise UsageError(f"Prompts that are given together need the same {name}. Give them in separate calls.")


def _rows_of_equal_settings(active: list[Request]) -> list[list[int]]:
    """The rows of a batch, those together whose next token is drawn in the same way."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for row, request in enumerate(active):
        config = request.config
        settings = (config.repetition_penalty, config.temperature, config.top_k, config.top_p)
        groups.setdefault(settings, []).append(row)
    return list(groups.values())


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
        seen[row, request.prompt.token_ids + request.token_ids] = True
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


def _hand_on(index: int, text: str, on_text: OnText | None) -> None:
    if on_text is not None and text:
        on_text(index, text)
