"""Who may ask for the page and what it shows, and how it is answered."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import torch
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from sheepop.core.files import finite
from sheepop.serve.protocol import ApiError

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


async def same_site(request: Request) -> None:
    """Refuses other machines, other sites' pages, and names that lead here by a trick: who may ask may read it all."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if request.client is None or not ip_address(request.client.host).is_loopback:
        raise ApiError(403, "The page is for the machine that it runs on.", code="wrong_client")
    if urlsplit(f"//{host}").hostname not in {"localhost", "127.0.0.1", "::1"}:
        raise ApiError(403, f"The page is not served as {host!r}.", code="wrong_host")
    if origin is not None and urlsplit(origin).netloc != host:
        raise ApiError(403, "Another site's page may not look inside.", code="wrong_origin")


def floats(found: torch.Tensor) -> Response:
    """Numbers as float32 in little-endian order; the header ``x-shape`` has their sizes."""
    shape = ",".join(map(str, found.shape))
    content = found.detach().float().cpu().contiguous().numpy().astype("<f4").tobytes()
    return Response(content, media_type="application/octet-stream", headers={**HEADERS, "x-shape": shape})


def json_answer(content: Any) -> JSONResponse:
    """JSON, with null for what is no finite number."""
    return JSONResponse(finite(content), headers=HEADERS)
