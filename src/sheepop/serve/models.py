"""The models of a server as clients see them, and LoRA adapters that are loaded and dropped, in the words of vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import PlainTextResponse
from pydantic import Field

from sheepop.serve.answering import Answering
from sheepop.serve.config import ServerConfig
from sheepop.serve.protocol import ApiError, ModelName, RequestModel
from sheepop.serve.stock import Card, Source


class LoadAdapterRequest(RequestModel):
    """``POST /v1/load_lora_adapter``; without `base_model_name` it is for the first model."""

    lora_name: Annotated[ModelName, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    base_model_name: ModelName | None = None


class UnloadAdapterRequest(RequestModel):
    """``POST /v1/unload_lora_adapter``; the number is taken and not needed."""

    lora_name: Annotated[ModelName, Field(min_length=1)]
    lora_int_id: int | None = None


class Models:
    """The endpoints about models."""

    def __init__(self, answering: Answering) -> None:
        self._answering, self._registry = answering, answering.registry
        config: ServerConfig = answering.config
        self._directory = None if config.adapter_directory is None else Path(config.adapter_directory).resolve()

    async def list(self, request: Request) -> dict[str, Any]:
        """The models of this server, loaded or not."""
        self._answering.doorkeeper.client(request.headers)
        return {"object": "list", "data": [_shown(card) for card in self._registry.cards()]}

    async def show(self, name: str, request: Request) -> dict[str, Any]:
        """One model."""
        self._answering.doorkeeper.client(request.headers)
        return _shown(self._registry.card(name))

    async def load_adapter(self, requested: LoadAdapterRequest, request: Request) -> PlainTextResponse:
        """Loads an adapter from the directory of adapters."""
        place, base = self._place(requested.lora_path), requested.base_model_name
        roots = {card.name: card.root for card in self._registry.cards() if card.parent is None}
        root = roots.get(next(iter(roots), "") if base is None else base)
        if root is None:
            known = f"There is no model {base!r} to adapt; there is {', '.join(roots)}."
            raise ApiError(404, known, param="base_model_name", code="model_not_found")
        adding = self._registry.add(requested.lora_name, Source(place, root))
        await self._answering.while_wanted(request, adding, "lora_path")
        return PlainTextResponse(f"Success: LoRA adapter '{requested.lora_name}' added successfully.")

    async def unload_adapter(self, requested: UnloadAdapterRequest) -> PlainTextResponse:
        """Drops an adapter; requests that run with it finish."""
        self._require_directory()
        self._registry.remove(requested.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{requested.lora_name}' removed successfully.")

    def _require_directory(self) -> Path:
        if self._directory is None:
            message = "Adapters cannot be changed here: the server was started without --adapter-directory."
            raise ApiError(403, message, kind="permission_error", code="not_allowed")
        return self._directory

    def _place(self, path: str) -> Path:
        """The place of an adapter, behind symbolic links; raises `ApiError` unless it is in the directory."""
        directory = self._require_directory()
        try:
            place = (directory / path).resolve()
            found = place.is_relative_to(directory) and place.is_dir()
        except (OSError, ValueError, RuntimeError):
            found = False
        if not found:
            # The same for all places outside, so that nobody learns what exists there.
            message = f"lora_path: there is no adapter {path!r} in the directory of adapters."
            raise ApiError(404, message, param="lora_path", code="not_found")
        return place


def _shown(card: Card) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "sheepop",
        "max_model_len": card.about.max_model_len,
        "default_sampling_params": dict(card.about.defaults),
        "root": card.root,
        "parent": card.parent,
        "state": card.state,
        "size": card.about.num_bytes,
    }
