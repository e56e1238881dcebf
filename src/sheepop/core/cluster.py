"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sheepop.core.errors import SheepOpError


@contextmanager
def ray_cluster(refusal: type[SheepOpError]) -> Iterator[None]:
    """Connects this process to a Ray cluster within the block.

    The cluster is the one that the environment variable ``RAY_ADDRESS`` names, or that was started with ``ray start``;
    without either, Ray runs on this machine until the block ends. Raises `refusal` if Ray cannot be used.
    """
    try:
        import ray
    except ImportError:
        raise refusal("The engine ray needs Ray. Install it with: pip install 'sheepop[cluster]'") from None
    if ray.is_initialized():
        yield
        return
    ending = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    except Exception as error:
        # Ray passes on any exception of its parts, from a refused token to a refused connection.
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise refusal(
            f"The Ray cluster cannot be used: {reason} Check RAY_ADDRESS, that every node runs the same version of "
            "Ray, and that this machine has the cluster's token (docs/cluster.md)."
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ending)  # Ray installed its own handler, with another exit code
    try:
        yield
    finally:
        ray.shutdown()
