"""The HTTP application: OpenAI's endpoints, health, metrics; every error in the shape that clients know."""

from __future__ import annotations

import asyncio
import base64
import logging
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from sheepop.serve.metrics import Metrics
from sheepop.serve.registry import Registry
from starlette.exceptions import HTTPException

import sheepop
from sheepop.core.errors import SheepOpError
from sheepop.generate.prompt import read_prompt
from sheepop.serve.access import Doorkeeper
from sheepop.serve.answers import (
    Answer,
    api_error,
    as_prompts,
    chat_config,
    completion_config,
)
from sheepop.serve.config import ServerConfig
from sheepop.serve.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)

_LOG = logging.getLogger("sheepop.access")
_DONE = b"data: [DONE]\n\n"


def create_app(registry: Registry, config: ServerConfig) -> FastAPI:
    """The application that serves the models of `registry`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(registry.close)

    app = FastAPI(title="SheepOp", version=sheepop.__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    Service(app, registry, config)
    return app


class Service:
    """The endpoints, and what they share."""

    def __init__(self, app: FastAPI, registry: Registry, config: ServerConfig) -> None:
        self._registry, self._config = registry, config
        self._doorkeeper, self._metrics = Doorkeeper(config.api_keys), Metrics(registry)
        app.add_exception_handler(ApiError, _answer_error)
        app.add_exception_handler(RequestValidationError, _answer_invalid)
        app.add_exception_handler(HTTPException, _answer_http)
        app.add_exception_handler(Exception, _answer_fault)
        app.middleware("http")(self._watch)
        app.get("/health")(self.health)
        app.get("/ready")(self.ready)
        app.get("/metrics")(self.metrics)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/v1/completions")(self.complete)
        app.post("/v1/embeddings")(self.embed)
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)

    async def health(self) -> dict[str, str]:
        """Answers as long as the process lives."""
        return {"status": "ok"}

    async def ready(self) -> dict[str, str]:
        """Answers while requests are taken."""
        if self._registry.is_draining:
            raise ApiError(503, "The server is shutting down.", kind="server_error", code="draining", retry_after=1)
        return {"status": "ready"}

    async def metrics(self) -> Response:
        """The metrics, as Prometheus reads them."""
        return PlainTextResponse(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self) -> dict[str, Any]:
        """All models."""
        return {"object": "list", "data": [_described(model) for model in self._registry.models()]}

    async def model(self, name: str) -> dict[str, Any]:
        """One model."""
        return _described(self._registry.model(name))

    async def tokenize(self, asked: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a text."""
        model = self._registry.model(asked.model)
        prefix = model.tokenizer.prefix_ids if asked.add_special_tokens else ()
        tokens = [*prefix, *model.tokenizer.encode(asked.prompt)]
        return {"tokens": tokens, "count": len(tokens), "max_model_len": model.generator.model.config.max_seq_len}

    async def detokenize(self, asked: DetokenizeRequest) -> dict[str, Any]:
        """The text of tokens."""
        model = self._registry.model(asked.model)
        return {"prompt": model.tokenizer.decode(_token_ids(asked.tokens, model))}

    async def embed(self, asked: EmbeddingRequest, request: Request) -> dict[str, Any]:
        """A vector for each text."""
        async with self._admitted(request, asked.model) as (_, model):
            data, count = [], 0
            for index, prompt in enumerate(as_prompts(asked.input)):
                try:
                    read = read_prompt("input", prompt, model.generator.model, model.tokenizer, "refuse")
                except SheepOpError as error:
                    raise api_error(error) from None
                vector = await asyncio.to_thread(model.embed, read.token_ids)
                count += len(read.token_ids)
                packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
                embedding = vector if asked.encoding_format == "float" else packed
                data.append({"object": "embedding", "index": index, "embedding": embedding})
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": model.name, "usage": usage}

    async def complete(self, asked: CompletionRequest, request: Request) -> Response:
        """Continues texts."""
        async with self._admitted(request, asked.model) as (client, model):
            config = completion_config(asked)
            requests = self._requests(as_prompts(asked.prompt), config, asked, client, model, "prompt")
            answer = Answer("text_completion", model, requests)
            if asked.stream:
                return self._stream(answer, _TextPieces(answer, asked), asked, client)
            await self._write(answer, request)
            pieces = _TextPieces(answer, asked)
            choices = [
                pieces.whole(candidate, number)
                for number, candidate in enumerate(c for r in requests for c in r.chosen())
            ]
            return JSONResponse({**answer.head(), "choices": choices, "usage": answer.usage().to_dict()})

    async def chat(self, asked: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        async with self._admitted(request, asked.model) as (client, model):
            messages = [message.to_template() for message in asked.messages]
            tools = None if not asked.tools or asked.tool_choice == "none" else [t.model_dump() for t in asked.tools]
            try:
                prompt = await asyncio.to_thread(model.render, messages, tools)
            except SheepOpError as error:
                raise ApiError(400, str(error), param="messages") from None
            config = chat_config(asked, model.generator.model.config.max_seq_len - len(prompt))
            requests = self._requests([prompt], config, asked, client, model, "messages")
            answer = Answer("chat.completion", model, requests)
            if asked.stream:
                return self._stream(answer, _ChatPieces(answer, asked), asked, client)
            await self._write(answer, request)
            pieces = _ChatPieces(answer, asked)
            choices = [pieces.whole(candidate, number) for number, candidate in enumerate(requests[0].chosen())]
            return JSONResponse({**answer.head(), "choices": choices, "usage": answer.usage().to_dict()})
