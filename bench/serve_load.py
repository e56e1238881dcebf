"""What the server costs beside its engine, how many connections it bears, and whether its memory stays flat.

One line for the time per token at 32 streams, of the engine alone and through the server, in turn and with the same
texts: of the clock, and of processors, which others on the machine disturb less. One for a thousand connections at a
time, one for ten times more requests than the server takes, one for the server's memory over ten thousand requests, and
one for each kind of large body: how long /health takes while it is answered. The first is of the GPT-2 124M shape, the
others of a tiny one; weights are random.

OMP_NUM_THREADS=1 python bench/serve_load.py --json bench/results/serve_load.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from record import add_json_option, write_record
from sheepop.checkpoint import load_model, save_model
from sheepop.generate import GenerationConfig, Generator
from sheepop.model import ModelConfig, build_model
from sheepop.tokenizer import CharTokenizer

STREAMS, PROMPT, ROUNDS = 32, 64, 3
TINY = ModelConfig(vocab_size=128, d_model=32, num_layers=2, num_heads=4, max_seq_len=256, position_encoding="rope")


@dataclass
class Stream:
    """What came of a stream: its pieces of text, and when each part of it was read, from its beginning on."""

    status: int
    text: str
    times: list[float] = field(default_factory=list)


async def ask(port: int, body: dict[str, Any], go: asyncio.Event | None = None) -> Stream:
    """Sends a streaming request over a connection of its own, once all are to `go`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    data = json.dumps({**body, "stream": True}).encode()
    if go is not None:
        await go.wait()
    started, times, parts = time.perf_counter(), [], []
    writer.write(_head(data) + b"Connection: close\r\n\r\n" + data)
    while part := await reader.read(2**16):
        times.append(time.perf_counter() - started)
        parts.append(part)
    writer.close()
    answer = b"".join(parts)
    events = [line[6:] for line in answer.split(b"\r\n") if line.startswith(b"data: ")]
    pieces = [json.loads(event) for chunk in events for event in chunk.split(b"\n\ndata: ") if event[:1] == b"{"]
    text = "".join(choice["text"] for piece in pieces for choice in piece["choices"])
    status = int(answer.split(b" ", 2)[1]) if answer else 0
    whole = answer.rstrip().endswith(b"0") and b"data: [DONE]" in answer
    return Stream(status if whole or status != 200 else 0, text, times)


def _head(body: bytes) -> bytes:
    first = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return first + b"Content-Length: %d\r\n" % len(body)


@contextmanager
def server(directory: Path, **settings: Any) -> Iterator[tuple[int, psutil.Process]]:
    """`sheepop serve` in a process of its own: its port, and the process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "sheepop", "serve", f"m={directory}", "--port", str(port), "--device", "cpu"]
    for name, value in settings.items():
        command += ["--set", f"server.{name}={value}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _is_ready(port):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}")
            time.sleep(0.1)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def saved(folder: Path, config: ModelConfig) -> Path:
    """A model directory with random weights."""
    save_model(folder, build_model(config, 1), CharTokenizer(), {})
    return folder


def prompts() -> list[str]:
    """Texts that share no beginning."""
    return [f"{number:04}" * (PROMPT // 4) for number in range(STREAMS)]


def overhead(folder: Path, num_tokens: int) -> dict[str, Any]:
    """Seconds per token of each of 32 streams, of the clock and of processors: the engine alone, and the server."""
    directory = saved(folder / "gpt2", ModelConfig(preset="gpt2"))
    loaded = load_model(directory)
    generator = Generator(loaded.model, loaded.tokenizer, end_ids=loaded.end_ids)
    # As the server does, the engine keeps its cache from one round to the next.
    engine = generator.serving_engine(max_sequences=STREAMS, max_waiting=STREAMS)
    length = {"max_tokens": num_tokens, "min_tokens": num_tokens}
    asked = [{"model": "m", "prompt": text, "seed": seed, **length} for seed, text in enumerate(prompts())]
    config = GenerationConfig(max_new_tokens=num_tokens, min_new_tokens=num_tokens, temperature=1.0, top_p=1.0)

    def alone() -> list[str]:
        requests = [generator.request(text, config.replace(seed=seed)) for seed, text in enumerate(prompts())]
        for request in requests:
            engine.add(request)
        with torch.inference_mode():
            while not engine.is_idle:
                engine.step()
        return [request.completions()[0].text for request in requests]

    def served() -> list[str]:
        async def everyone() -> list[Stream]:
            return await asyncio.gather(*(ask(port, body) for body in asked))

        return [stream.text for stream in asyncio.run(everyone())]

    clock: dict[str, list[float]] = {"engine": [], "server": []}
    processors: dict[str, list[float]] = {"engine": [], "server": []}
    with server(directory, max_running=STREAMS) as (port, process):
        own = psutil.Process()
        same = alone() == served()
        for _ in range(ROUNDS):
            for name, work, worker in (("engine", alone, own), ("server", served, process)):
                started, used = time.perf_counter(), sum(worker.cpu_times()[:2])
                work()
                clock[name].append((time.perf_counter() - started) / num_tokens)
                processors[name].append((sum(worker.cpu_times()[:2]) - used) / num_tokens)
    return {
        "streams": STREAMS, "prompt_tokens": PROMPT, "new_tokens": num_tokens, "same_texts": same,
        "threads": torch.get_num_threads(), "clock": _compared(clock), "processors": _compared(processors),
    }  # fmt: skip


def _compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and how much more the server takes."""
    engine, through = (statistics.median(seconds[name]) for name in ("engine", "server"))
    rounds = [more / less - 1 for less, more in zip(seconds["engine"], seconds["server"], strict=True)]
    return {"engine": engine, "server": through, "overhead": through / engine - 1, "overhead_of_rounds": rounds}


def connections(folder: Path, count: int) -> dict[str, Any]:
    """So many streams at a time, all connected before the first one asks."""

    async def load(port: int) -> list[Stream]:
        go = asyncio.Event()
        body = {"model": "m", "prompt": "Once", "max_tokens": 16, "min_tokens": 16}
        tasks = [asyncio.ensure_future(ask(port, body, go)) for _ in range(count)]
        await asyncio.sleep(3)
        go.set()
        return await asyncio.gather(*tasks)

    with server(saved(folder / "crowd", TINY), max_running=32, max_waiting=count) as (port, _):
        started = time.perf_counter()
        streams = asyncio.run(load(port))
        total = time.perf_counter() - started - 3
    # The head of an answer comes when the engine has taken the request, its first text when its turn has come.
    texts = [found.times[1:] for found in streams if len(found.times) > 2]
    gaps = [after - before for times in texts for before, after in pairwise(times)]
    first = sorted(times[0] for times in texts)
    return {
        "connections": count, "whole_answers": sum(found.status == 200 for found in streams), "seconds": total,
        "taken_longest": max(found.times[0] for found in streams if found.times),
        "first_text_median": statistics.median(first), "first_text_longest": first[-1], "longest_gap": max(gaps),
    }  # fmt: skip


def overload(folder: Path) -> dict[str, Any]:
    """Ten times as many streams at a time as may run and wait; the status of each, of which 0 is a broken one."""

    async def load(port: int) -> list[int]:
        body = {"model": "m", "prompt": "Once", "max_tokens": 16, "min_tokens": 16}
        return [found.status for found in await asyncio.gather(*(ask(port, body) for _ in range(640)))]

    with server(saved(folder / "full", TINY), max_running=32, max_waiting=32) as (port, _):
        statuses = Counter(asyncio.run(load(port)))
    return {"requests": 640, "statuses": {str(status): count for status, count in sorted(statuses.items())}}


def _large(**body: Any) -> bytes:
    data = json.dumps({"model": "m", "max_tokens": 1, **body}, separators=(",", ":")).encode()
    assert len(data) <= 4 * 2**20
    return data


def large_bodies() -> dict[str, bytes]:
    """Bodies of up to 4 MiB of every kind; the empty one is for comparison."""
    arguments = json.dumps({f"k{number}": [number, str(number)] for number in range(40_000)})
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        schema = {"anyOf": [schema, {"type": "null"}]}
    return {
        "nothing": b"",
        "one text": _large(prompt="once upon a time " * 246_000),
        "one word": _large(prompt="a" * (4 * 2**20 - 100)),
        "2,000,000 ids": _large(prompt=[1] * 2_000_000),
        "400,000 short lists": _large(prompt=[[1]] * 400_000),
        "900,000 texts": _large(prompt=["x"] * 900_000),
        "deep lists": b'{"model":"m","prompt":[' + b",".join([b"[" * 150 + b"]" * 150] * 160) + b"]}",
        "nested schema": _large(prompt="x", guided_json=schema),
        "wide schema": _large(prompt="x", guided_json={"properties": {f"k{n}": {"minimum": n} for n in range(24_000)}}),
        "1 MB of JSON as text": _large(prompt="x", guided_json=arguments),
    }


def health(folder: Path) -> dict[str, Any]:
    """Milliseconds that /health takes on another connection while each large body is answered: median and longest."""
    found = {}
    with server(saved(folder / "calm", TINY)) as (port, _):
        for name, body in large_bodies().items():
            over, times = threading.Event(), list[float]()

            def send(body: bytes = body, over: threading.Event = over) -> None:
                if body:
                    with socket.create_connection(("127.0.0.1", port)) as connection:
                        connection.sendall(_head(body) + b"Connection: close\r\n\r\n" + body)
                        while connection.recv(2**16):
                            pass
                else:
                    time.sleep(2)
                over.set()

            asker = HTTPConnection("127.0.0.1", port)
            sender = threading.Thread(target=send)
            sender.start()
            while not over.is_set():
                started = time.perf_counter()
                asker.request("GET", "/health")
                asker.getresponse().read()
                times.append(1000 * (time.perf_counter() - started))
                time.sleep(0.01)
            sender.join()
            found[name] = {"median": statistics.median(times), "longest": max(times)}
    return found


def memory(folder: Path, count: int) -> dict[str, Any]:
    """MiB that the server holds after every thousand requests, 32 at a time, of which one in ten leaves early."""

    async def one(port: int, number: int) -> bool:
        body = {"model": "m", "prompt": f"Once {number}", "max_tokens": 8, "min_tokens": 8}
        if number % 10:
            return (await ask(port, body)).status == 200
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        data = json.dumps({**body, "max_tokens": 200, "min_tokens": 200, "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + data)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.close()
        return True

    async def thousand(port: int, first: int) -> int:
        numbers = iter(range(first, first + 1000))

        async def work() -> int:
            return sum([await one(port, number) for number in numbers])

        return sum(await asyncio.gather(*(work() for _ in range(32))))

    held, good = [], 0
    with server(saved(folder / "flat", TINY), max_running=32, max_waiting=256) as (port, process):
        started = time.perf_counter()
        for first in range(0, count, 1000):
            good += asyncio.run(thousand(port, first))
            held.append(process.memory_info().rss / 2**20)
        seconds = time.perf_counter() - started
    return {"requests": count, "answered": good, "mebibytes": held, "seconds": seconds}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each stream writes")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10_000)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cost = overhead(folder, options.tokens)
        crowd = connections(folder, options.connections)
        full = overload(folder)
        flat = memory(folder, options.requests)
        calm = health(folder)
    for name in ("clock", "processors"):
        found = cost[name]
        rounds = ", ".join(f"{ratio:+.1%}" for ratio in found["overhead_of_rounds"])
        print(f"ms per token of {STREAMS} streams, {name:<10} | engine {1000 * found['engine']:.1f} | server "
              f"{1000 * found['server']:.1f} | {found['overhead']:+.1%} (rounds {rounds})")  # fmt: skip
    print(f"same texts: {cost['same_texts']}")
    print(f"{crowd['connections']} connections | whole answers {crowd['whole_answers']} | {crowd['seconds']:.1f} s | "
          f"all taken in {crowd['taken_longest']:.2f} s | first text: median {crowd['first_text_median']:.2f} s, "
          f"last {crowd['first_text_longest']:.2f} s | longest gap in a text {crowd['longest_gap']:.2f} s")  # fmt: skip
    print(f"{flat['requests']} requests | answered {flat['answered']} | {flat['seconds']:.0f} s | MiB after each "
          f"thousand: {' '.join(f'{size:.0f}' for size in flat['mebibytes'])}")  # fmt: skip
    print(f"{full['requests']} requests at a time | " + ", ".join(f"{n} x {s}" for s, n in full["statuses"].items()))
    for name, each in calm.items():
        print(f"/health beside {name:<22} | median {each['median']:.1f} ms | longest {each['longest']:.1f} ms")
    measured = {"overhead": cost, "connections": crowd, "overload": full, "memory": flat, "health": calm}
    write_record(options.json, measured)


if __name__ == "__main__":
    main()
