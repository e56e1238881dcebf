"""The server follows its own OpenAPI description, for random requests that fit it and that do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings

from .conftest import Live

schemathesis = pytest.importorskip("schemathesis")

checks, GenerationMode = schemathesis.checks, schemathesis.GenerationMode
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.allow_header_conformance,
    checks.negative_data_rejection,
]
OPERATIONS = [
    ("post", "/v1/chat/completions", 40),
    ("post", "/v1/completions", 40),
    ("post", "/v1/embeddings", 15),
    ("post", "/v1/score", 10),
    ("post", "/v1/rerank", 10),
    ("post", "/v1/messages", 6),
    ("post", "/v1/responses", 6),
    ("post", "/api/chat", 6),
    ("post", "/api/generate", 6),
    ("post", "/api/embed", 4),
    ("post", "/api/show", 4),
    ("get", "/api/tags", 1),
    ("get", "/api/ps", 1),
    ("post", "/v1/load_lora_adapter", 4),
    ("post", "/v1/unload_lora_adapter", 4),
    ("get", "/api/version", 1),
    ("post", "/tokenize", 10),
    ("post", "/detokenize", 10),
    ("get", "/v1/models/{name}", 10),
    ("get", "/v1/models", 1),
    ("get", "/metrics", 1),
    ("get", "/health", 1),
    ("get", "/ready", 1),
    ("get", "/version", 1),
]


# So that no answer is long.
LIMITS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/completions": {"max_tokens": 2},
    "/v1/messages": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
    "/api/chat": {"options": {"num_predict": 2}},
    "/api/generate": {"options": {"num_predict": 2}},
}


@pytest.fixture(scope="module")
def description(live: Live) -> Any:
    return schemathesis.openapi.from_url(f"{live.url}/openapi.json")


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as found:
        yield found


def test_all_operations_are_here(description: Any) -> None:
    known = {(found.ok().method, found.ok().path) for found in description.get_all_operations()}
    assert known == {(method, path) for method, path, _ in OPERATIONS}


@pytest.mark.parametrize(
    ("method", "path", "count", "mode"),
    [(*found, mode) for found in OPERATIONS for mode in GenerationMode if found[0] == "post" or mode.is_positive],
)
def test_answers_are_as_described(
    description: Any, session: requests.Session, method: str, path: str, count: int, mode: Any
) -> None:
    operation = description[path][method]

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body["model"] = "chat"
            if limit := LIMITS.get(path):
                case.body = {**case.body, **limit}
        answer = case.call(session=session)
        if answer.status_code != 413:  # the limit of a body's bytes, which no schema states
            case.validate_response(answer, checks=CHECKS)

    check()
