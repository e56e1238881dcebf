"""Access to the page's endpoints from this machine and this site only, and the headers of their answers."""

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
    "font-src 'self'; connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


async def same_site(request: Request) -> None:
    """Refuses other machines, pages of other sites and DNS rebinding, since the page gives access to everything."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if request.client is None or not ip_address(request.client.host).is_loopback:
        raise ApiError(403, "The page can be used only on the machine that it runs on.", code="wrong_client")
    if urlsplit(f"//{host}").hostname not in {"localhost", "127.0.0.1", "::1"}:
        raise ApiError(403, f"The page is not served as {host!r}.", code="wrong_host")
    if origin is not None and urlsplit(origin).netloc != host:
        raise ApiError(403, "A page of another site may not use this page.", code="wrong_origin")


def floats(found: torch.Tensor) -> Response:
    """A tensor as little-endian float32; the header ``x-shape`` has its shape."""
    shape = ",".join(map(str, found.shape))
    content = found.detach().float().cpu().contiguous().numpy().astype("<f4").tobytes()
    return Response(content, media_type="application/octet-stream", headers={**HEADERS, "x-shape": shape})


def json_answer(content: Any) -> JSONResponse:
    """JSON, with null for numbers that are not finite."""
    return JSONResponse(finite(content), headers=HEADERS)
