"""Replicas of the models on a Ray cluster: Ray Serve starts them, replaces lost ones, and routes requests to them.

This module imports Ray, so only a server with engine `ray` may import it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
import torch
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import ProxyLocation, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.types import Message

from sheepop.core.cluster import ray_cluster
from sheepop.core.errors import UsageError
from sheepop.serve.access import Doorkeeper
from sheepop.serve.app import create_app
from sheepop.serve.config import ServerConfig
from sheepop.serve.protocol import ApiError
from sheepop.serve.registry import Registry
from sheepop.serve.stock import Stock

_ACCEPT_SECONDS = 5.0
_HEALTH_SECONDS = 2.0
_FAULTS = logging.getLogger("sheepop.server")


class Replica:
    """The models and the application of a one-process server, without its socket."""

    def __init__(self, stock: Stock, doorkeeper: Doorkeeper, cores: int) -> None:
        torch.set_num_threads(cores)
        self._registry = Registry(stock)
        self._app = create_app(self._registry, stock.config, doorkeeper)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Yields the ASGI messages of the application, after an empty list that accepts the request."""
        yield []
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: asyncio.Queue[Message | None] = asyncio.Queue()

        async def receive() -> Message:
            # The task is cancelled on a disconnect, so nothing ever follows the body.
            return unread.pop() if unread else await asyncio.Future()

        async def send(message: Message) -> None:
            sent.put_nowait(message)

        answering = asyncio.ensure_future(self._app(scope, receive, send))
        answering.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            over = False
            while not over:
                # All waiting messages are sent together, so that under load fewer, larger pieces cross the network.
                found = [await sent.get()]
                while not sent.empty():
                    found.append(sent.get_nowait())
                over = found[-1] is None
                if messages := [message for message in found if message is not None]:
                    yield messages
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def metrics(self) -> tuple[str, bytes]:
        """The number of this replica, and its metrics in Prometheus's text format."""
        scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": [], "query_string": b""}
        pieces = [message.get("body", b"") async for messages in self.answer(scope, b"") for message in messages]
        return str(serve.get_replica_context().rank.rank), b"".join(pieces)

    async def reload(self) -> None:
        """Reloads all models; running requests finish with the old ones."""
        await asyncio.to_thread(self._registry.reload)

    async def close(self) -> None:
        """Closes all models; open requests end with an error."""
        await asyncio.to_thread(self._registry.close)


class HomeRouter(RequestRouter):  # type: ignore[misc] # Ray Serve has no types
    """Sends requests with the same key to the same replica, their home, unless it is busy.

    It is busy if it has as many open requests as it generates texts at a time; then any replica may get the request.
    """

    def initialize_state(self, *, busy_at: int) -> None:
        """Sets the number of open requests from which on a replica is busy."""
        self._busy_at = busy_at

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns groups of replicas, the best first; in a group Ray Serve takes one with few open requests."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # otherwise Ray Serve retries without a pause
        key = pending_request.metadata.session_id
        if not key or not candidate_replicas:
            return [candidate_replicas]
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        home = names[home_of(key, list(names))]
        if (self.replica_queue_len_cache.get(home.replica_id) or 0) >= self._busy_at:
            return [candidate_replicas]
        return [[home], [replica for replica in candidate_replicas if replica is not home]]


def home_of(key: str, replicas: Sequence[str]) -> str:
    """Returns the replica for requests with this key.

    It has the highest hash of its name and the key (rendezvous hashing, Thaler and Ravishankar 1998): every caller
    finds the same one, and when a replica is lost, only its own keys move.
    """
    return max(replicas, key=lambda replica: hashlib.blake2b(f"{replica} {key}".encode()).digest())


class Replicas:
    """All replicas, for the front that sends them requests."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def answer(self, key: str, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
        """Yields the ASGI messages of a replica's answer; a caller that stops iterating ends the request.

        Raises `ApiError` 503 if no replica accepts it, or the one that had it is lost.
        """
        answer = self._handle.options(stream=True, session_id=key).answer.remote(scope, body)
        over = False
        try:
            async with asyncio.timeout(_ACCEPT_SECONDS):
                await anext(answer)
            async for messages in answer:
                last = messages[-1]
                over = last["type"] == "http.response.body" and not last.get("more_body", False)
                yield messages
                if over:
                    break
        except TimeoutError:
            raise _unavailable("No replica is free.", "overloaded") from None
        except (RayError, RayServeException) as error:
            _FAULTS.error("a replica was lost: %s", str(error).partition("\n")[0])
            raise _unavailable("The replica that had the request was lost.", "replica_lost") from None
        finally:
            if not over:
                with suppress(RayError, RayServeException):
                    answer.cancel()

    async def metrics(self) -> dict[str, bytes]:
        """The metrics of every replica that answers, by its number."""
        try:
            found = await self._handle.broadcast("metrics").results_async(
                timeout_s=_ACCEPT_SECONDS, return_exceptions=True
            )
        except (TimeoutError, RayError, RayServeException):
            return {}
        return dict(sorted(answer for answer in found if not isinstance(answer, BaseException)))

    def reload(self) -> None:
        """Reloads all models in every replica."""
        self._handle.broadcast("reload").results()

    def close(self) -> None:
        """Closes the models of every replica; open requests end with an error."""
        with suppress(TimeoutError, RayError, RayServeException):
            self._handle.broadcast("close").results(timeout_s=_ACCEPT_SECONDS)


def _unavailable(what: str, code: str) -> ApiError:
    return ApiError(503, f"{what} Try again.", kind="server_error", code=code, retry_after=1)


@contextmanager
def replicas_on_ray(stock: Stock, doorkeeper: Doorkeeper) -> Iterator[Replicas]:
    """Runs the configured number of replicas of `stock` within the context; its files must be on every node.

    Raises `UsageError` if the cluster cannot be used, is too small, or cannot load the models.
    """
    config: ServerConfig = stock.config
    device = stock.device
    with ray_cluster(UsageError):
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location=ProxyLocation.Disabled)
        # The name is that of the address, so that a server replaces the replicas of a killed one before it.
        name = f"sheepop-{socket.gethostname()}-{config.port}"
        cores = config.replica_cores or _even_share(config.replicas)
        on_gpu = device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
        deployment = serve.deployment(
            Replica,
            name="replica",
            num_replicas=config.replicas,
            ray_actor_options={"num_cpus": cores, "num_gpus": int(on_gpu)},
            # More than an engine accepts: its own refusal is more precise and comes at once.
            max_ongoing_requests=2 * (config.max_running + config.max_waiting),
            request_router_config=RequestRouterConfig(
                request_router_class=HomeRouter, request_router_kwargs={"busy_at": config.max_running}
            ),
            health_check_period_s=_HEALTH_SECONDS,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=_ACCEPT_SECONDS,
            max_constructor_retry_count=2,
        )
        try:
            try:
                application = deployment.bind(stock, doorkeeper, cores)
                handle = serve.run(application, name=name, route_prefix=None)
            except RuntimeError:
                raise UsageError(f"The replicas cannot start. {_trouble(name)}") from None
            yield Replicas(handle)
        finally:
            serve.delete(name)


def _trouble(application: str) -> str:
    """The last line of Ray Serve's status, which is the error that a replica failed with."""
    status = serve.status().applications[application]
    found = [deployment.message for deployment in status.deployments.values()]
    return "\n".join([status.message, *found]).strip().splitlines()[-1]


def _even_share(replicas: int) -> int:
    """The cores for each replica if the nodes share the replicas evenly; raises `UsageError` for too few cores."""
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    nodes = [cores for cores in nodes if cores]
    if sum(nodes) < replicas:
        raise UsageError(f"The cluster has {sum(nodes)} cores, too few for {replicas} replicas. Request fewer.")
    on_each = -(-replicas // len(nodes))
    return max(1, min(nodes) // on_each)
