"""The page that looks inside models: its files, and traces of prompts in slices, for users of this machine only."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response

from sheepop.core.errors import SheepOpError, UsageError
from sheepop.interpret.checks import check_trace
from sheepop.interpret.journey import journey_of
from sheepop.interpret.lens import embedding_map, logit_lens, nearest_tokens, residual_norms
from sheepop.interpret.parts import direct_attribution, norm_statistics
from sheepop.interpret.trace import Trace
from sheepop.serve.protocol import ApiError, RequestModel
from sheepop.serve.registry import Registry
from sheepop.serve.same_site import HEADERS, floats, json_answer, same_site
from sheepop.serve.worker import SideWork

PAGE = "/ui"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml",
          "woff2": "font/woff2", "txt": "text/plain"}  # fmt: skip
# The number of traces that are kept, and the most numbers in a slice.
_KEPT, _MOST_NUMBERS = 16, 2**20


class TraceRequest(RequestModel):
    """The prompt to trace, a text or token ids, and the model; null means the first model.

    For an encoder-decoder `prompt` is the source, and `target` is the target so far.
    """

    prompt: str | list[int]
    target: str | list[int] | None = None
    model: str | None = None


class Inside:
    """The latest traces, by number; the one viewed longest ago is dropped when there are too many.

    `records` tells the page that the server records conversations.
    """

    def __init__(self, registry: Registry, *, records: bool = False) -> None:
        self._registry, self._records, self._numbers = registry, records, itertools.count(1)
        # Only the worker thread accesses these; the last one is the one that was viewed last.
        self._traces: OrderedDict[int, Trace] = OrderedDict()
        self._work = SideWork("traces", threads=1, most=_KEPT)
        folder = Path(__file__).with_name("page")
        # Only these are served, so that no name leads out of the folder.
        self._files = {
            path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.suffix[1:] in _TYPES
        }

    def routes(self) -> APIRouter:
        """The endpoints of the page, its files and its traces."""
        router = APIRouter(prefix=PAGE, dependencies=[Depends(same_site)])
        for path in ("", "/"):
            router.add_api_route(path, self.page, methods=["GET"], include_in_schema=False)
        router.add_api_route("/models", self.models, methods=["GET"])
        router.add_api_route("/reload", self.reload, methods=["POST"])
        router.add_api_route("/traces", self.trace, methods=["POST"])
        slices: dict[str, Callable[..., Any]] = {
            "tensor": self.tensor, "logits": self.logits, "next": self.next, "attribution": self.attribution,
            "map": self.map, "neighbours": self.neighbours, "lens": self.lens, "checks": self.checks,
            "journey": self.journey, "predictions": self.predictions, "norms": self.norms,
        }  # fmt: skip
        for name, endpoint in slices.items():
            router.add_api_route(f"/traces/{{number}}/{name}", endpoint, methods=["GET"], response_model=None)
        router.add_api_route("/vendor/{name:path}", self.vendored, methods=["GET"], include_in_schema=False)
        router.add_api_route("/{name}", self.file, methods=["GET"], include_in_schema=False)
        return router

    async def page(self) -> Response:
        """The HTML of the page."""
        return await self.file("index.html")

    async def file(self, name: str) -> Response:
        """A file of the page; raises `ApiError` 404 for anything else."""
        if name not in self._files:
            raise ApiError(404, f"The page has no file {name!r}.", code="not_found")
        kind = _TYPES[name.rpartition(".")[2]]
        return Response(self._files[name].read_bytes(), media_type=kind, headers=HEADERS)

    async def vendored(self, name: str) -> Response:
        """A file of another project's library; raises as `file`."""
        return await self.file(f"vendor/{name}")

    async def models(self) -> JSONResponse:
        """The models that can be traced: whether each has a chat template and an encoder, and is recorded."""
        found = [(card.name, card.about) for card in self._registry.cards()]
        return json_answer(
            [
                {"name": name, "chats": about.chats, "encodes": about.encodes, "recorded": self._records}
                for name, about in found
            ]
        )

    async def reload(self) -> JSONResponse:
        """Reloads all models, to show the current state of a run; returns the same as `models`."""
        try:
            await self._work.do(self._registry.reload)
        except SheepOpError as error:
            raise ApiError(409, str(error), code="not_reloaded") from None
        return await self.models()

    async def trace(self, requested: TraceRequest) -> JSONResponse:
        """Makes a new trace; returns its tokens, and the names of all tensors."""
        cards = self._registry.cards()
        if not cards:
            raise ApiError(404, "There is no model yet: the run has no checkpoint so far.", code="model_not_found")
        async with self._registry.using(requested.model or cards[0].name) as model:
            return json_answer(await self._work.do(self._begin, model, requested))

    def _begin(self, model: Any, requested: TraceRequest) -> dict[str, Any]:
        try:
            trace = Trace.of(model.generator.model, model.tokenizer, requested.prompt, requested.target)
        except UsageError as error:
            raise ApiError(400, str(error), param="prompt") from None
        if self._traces:
            self._traces[next(reversed(self._traces))].forget()
        number = next(self._numbers)
        self._traces[number] = trace
        while len(self._traces) > _KEPT:
            self._traces.popitem(last=False)
        config = trace.config
        return {
            "number": number,
            "model": model.name,
            "prompt": trace.prompt.text,
            "target": None if trace.source is None else trace.tokenizer.decode(trace.token_ids[1:]),
            "sizes": {
                "layers": trace.num_layers, "encoder_layers": 0 if trace.source is None else len(trace.source.blocks),
                "width": config.d_model, "heads": config.num_heads,
                "kv_heads": config.kv_heads, "head_dim": config.head_size, "vocabulary": config.vocabulary,
                "positions": config.position_encoding, "norm": config.norm, "norm_position": config.norm_position,
                "convolution": config.short_convolution, "normalises_queries": config.qk_norm is not None,
                "activation": config.activation,
                "experts": None if config.experts is None else config.experts.count,
            },
            "tokens": [token.to_dict() for token in trace.tokens],
            "source_tokens": [token.to_dict() for token in trace.source_tokens],
            "tensors": trace.names,
        }  # fmt: skip

    async def tensor(
        self, number: int, name: str, head: int | None = None, column: int | None = None, row: int | None = None
    ) -> Response:
        """A tensor, or one head of it, as little-endian float32; the header ``x-shape`` has its shape.

        Besides the probes there are ``residuals``, ``blocks.N.attention.unmasked`` (the scores before masking),
        ``blocks.N.attention.angles`` (the rotary angles) and ``blocks.N.attention_norm`` (the mean and the divisor of a
        norm). `column` selects one index of the last dimension, and `row` one of the dimension before it.
        """

        def read(trace: Trace) -> Response:
            try:
                found = _tensor(trace, name)
            except (KeyError, IndexError, ValueError):
                raise ApiError(404, f"The trace has no tensor {name!r}.", param="name", code="not_found") from None
            if head is not None:
                if found.ndim < 3 or not 0 <= head < len(found):
                    raise ApiError(404, f"{name} has no head {head}.", param="head", code="not_found")
                found = found[head]
            if column is not None:
                if not 0 <= column < found.shape[-1]:
                    raise ApiError(404, f"{name} has no column {column}.", param="column", code="not_found")
                found = found[..., column]
            if row is not None:
                if found.ndim < 2 or not 0 <= row < found.shape[-2]:
                    raise ApiError(404, f"{name} has no row {row}.", param="row", code="not_found")
                found = found[..., row, :]
            if found.numel() > _MOST_NUMBERS:
                message = (
                    f"{name} has {found.numel():,} numbers, more than {_MOST_NUMBERS:,}. Request one head or one row "
                    "of it, or trace a shorter text."
                )
                raise ApiError(400, message, param="name")
            return floats(found)

        return await self._of(number, read)

    async def logits(self, number: int, position: int) -> Response:
        """The logits of all tokens after a position, in the format of `tensor`."""
        return await self._of(number, lambda trace: floats(trace.logits_behind(_position(trace, position))))

    async def next(self, number: int, position: int, count: int = 50) -> JSONResponse:
        """The likeliest tokens after a position with their logits, and the logsumexp that normalises them."""

        def read(trace: Trace) -> JSONResponse:
            logits = trace.logits_behind(_position(trace, position)).float()
            best = logits.topk(min(max(1, count), 1000, len(logits)))
            rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            found = [{"id": each, "text": trace.text_of(each), "logit": logit} for each, logit in rows]
            return json_answer({"tokens": found, "logsumexp": float(logits.logsumexp(0)), "vocabulary": len(logits)})

        return await self._of(number, read)

    async def attribution(
        self, number: int, position: int, token: int | None = None, against: int | None = None
    ) -> JSONResponse:
        """What each part of the network adds to the logit of `token`, by default the likeliest."""

        def read(trace: Trace) -> JSONResponse:
            checked = _position(trace, position)
            wanted = trace.predictions[checked].top[0][0] if token is None else token
            try:
                found = direct_attribution(trace, checked, wanted, against)
            except IndexError as error:
                raise ApiError(400, f"There is no such token: {error}.", param="token") from None
            parts = [{"name": name, "nats": value} for name, value in zip(found.names, found.values, strict=True)]
            return json_answer({"token": wanted, "text": trace.text_of(wanted), "total": found.total, "parts": parts})

        return await self._of(number, read)

    async def journey(self, number: int, position: int, start: int | None = None) -> JSONResponse:
        """A window of tokens on their way through the network, and what each part adds to the next token."""

        def read(trace: Trace) -> JSONResponse:
            first = None if start is None else _position(trace, start)
            return json_answer(journey_of(trace, _position(trace, position), first).to_dict(trace))

        return await self._of(number, read)

    async def predictions(self, number: int) -> JSONResponse:
        """The predictions of the next token at every position."""
        return await self._of(number, lambda trace: json_answer([found.to_dict() for found in trace.predictions]))

    async def norms(self, number: int) -> JSONResponse:
        """The lengths of the vectors of the residual stream before each block and after the last, for each stack."""

        def read(trace: Trace) -> JSONResponse:
            return json_answer({stream.path: residual_norms(stream).tolist() for stream in trace.streams})

        return await self._of(number, read)

    async def lens(self, number: int) -> JSONResponse:
        """The logit lens: the prediction of each layer."""

        def read(trace: Trace) -> JSONResponse:
            lens = logit_lens(trace)
            found = {name: getattr(lens, name).tolist() for name in ("ids", "probabilities", "divergence", "entropy")}
            words = {each: trace.text_of(each) for each in set(lens.ids.flatten().tolist())}
            return json_answer({**found, "words": words})

        return await self._of(number, read)

    async def checks(self, number: int) -> JSONResponse:
        """The results of checking the trace's invariants."""
        return await self._of(number, lambda trace: json_answer([check.to_dict() for check in check_trace(trace)]))

    async def map(self, number: int) -> JSONResponse:
        """The embeddings of the prompt's and target's tokens, projected to the two axes of largest variance."""

        def read(trace: Trace) -> JSONResponse:
            found = embedding_map(trace.model, [*(trace.prompt.source_ids or []), *trace.token_ids])
            points = [
                {"id": each, "text": trace.text_of(each), "at": at}
                for each, at in zip(found.token_ids, found.points.tolist(), strict=True)
            ]
            return json_answer({"points": points, "explained": found.explained})

        return await self._of(number, read)

    async def neighbours(self, number: int, token: int) -> JSONResponse:
        """The tokens with the embeddings nearest to that of `token`."""

        def read(trace: Trace) -> JSONResponse:
            if not 0 <= token < trace.config.vocabulary:
                raise ApiError(400, f"There is no token {token}.", param="token")
            found = nearest_tokens(trace.model, token)
            return json_answer([{"text": trace.text_of(each.token_id), **vars(each)} for each in found])

        return await self._of(number, read)

    async def _of(self, number: int, read: Callable[[Trace], Any]) -> Any:
        """Runs `read` on a trace in the worker thread, one request at a time."""

        def work() -> Any:
            if number not in self._traces:
                raise ApiError(404, "This trace no longer exists. Trace the prompt again.", code="not_found")
            last = next(reversed(self._traces))
            if last != number:
                self._traces[last].forget()
                self._traces.move_to_end(number)
            with torch.no_grad():
                return read(self._traces[number])

        return await self._work.do(work)

    def close(self) -> None:
        """Stops the worker thread."""
        self._work.close()


def _tensor(trace: Trace, name: str) -> torch.Tensor:
    for end, found in (("attention.unmasked", trace.unmasked_scores), ("attention.angles", trace.angles)):
        if name.endswith(end):
            return found(name.rpartition(".")[0])
    if name.endswith("_norm"):
        return norm_statistics(trace, name)
    if name == "residuals":
        return trace.residuals
    if name == "source_residuals" and trace.source is not None:
        return trace.source.residuals
    return trace[name]


def _position(trace: Trace, position: int) -> int:
    if not 0 <= position < trace.num_tokens:
        raise ApiError(400, f"There is no position {position}; the prompt has {trace.num_tokens}.", param="position")
    return position
