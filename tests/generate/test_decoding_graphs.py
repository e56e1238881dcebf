"""Captured passes against ordinary ones: the same log-probabilities to the last bit."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sheepop.adapt.stored_weight import has_kernels
from sheepop.generate import GenerationConfig, Generator, engine, paged_cache, runner
from sheepop.generate.blocks import BlockTable, Chunk
from sheepop.generate.engine import Engine
from sheepop.generate.paged_cache import PagedCache
from sheepop.generate.runner import DecodingGraphs, StaticPasses
from sheepop.model import Transformer
from sheepop.tokenizer import CharTokenizer

from .recomputing import RecomputingGenerator

Work = Callable[[], None]
NETWORKS: list[dict[str, Any]] = [
    {"position_encoding": "rope", "num_kv_heads": 2},
    {"position_encoding": "alibi", "sliding_window": 5, "sliding_layers": [0]},
    {"position_encoding": "learned", "experts": {"count": 4, "per_token": 2}},
    {"short_convolution": 3},
]


@pytest.mark.parametrize(
    ("kind", "steps_ahead", "at_first"),
    [*((kind, 0, None) for kind in range(len(NETWORKS))), (0, 1, None), (1, 1, None), (0, 1, 2), (1, 0, 2)],
)
def test_a_captured_pass_writes_what_an_ordinary_one_does(
    toy_model: Callable[..., Transformer],
    monkeypatch: pytest.MonkeyPatch,
    kind: int,
    steps_ahead: int,
    at_first: int | None,
) -> None:
    """The captured work runs again on the buffers that it was captured with, like a CUDA graph.

    If the cache has few blocks at first, it grows, and what was captured before is not replayed any more.
    """
    if not has_kernels():
        pytest.skip("there is no C++ compiler for the kernels")
    monkeypatch.setenv("SHEEPOP_NATIVE", "1")
    tokenizer = CharTokenizer.train(["abcdefgh"])
    model = toy_model(max_seq_len=32, vocab_size=tokenizer.vocab_size, **NETWORKS[kind])
    prompts = [[5, 6, 7, 8], [6] * 12, [8, 8, 7], [5, 6, 7, 8, 9, 10, 9, 8, 7, 6, 5], [9, 9]]
    configs = [
        GenerationConfig(max_new_tokens=count, min_new_tokens=count, seed=1, temperature=1.0)
        for count in (20, 9, 14, 17, 3)
    ]
    expected = Generator(model, tokenizer).generate(prompts, configs)
    begun, captured, replayed = list[int](), list[int](), list[int]()

    def begin() -> Callable[[Work], Work]:
        begun.append(len(begun))
        own = begun[-1]

        def capture(work: Work) -> Work:
            captured.append(own)
            work()

            def replay() -> None:
                assert own == begun[-1]
                replayed.append(own)
                work()

            return replay

        return capture

    def of(network: Transformer, cache: PagedCache) -> DecodingGraphs:
        return DecodingGraphs(network, cache, begin)

    monkeypatch.setattr(Engine, "build", partial(Engine.build, steps_ahead=steps_ahead))
    monkeypatch.setattr(runner, "_PASSES_BEFORE_CAPTURE", 1)
    if at_first is not None:
        monkeypatch.setattr(paged_cache, "_num_at_first", lambda num_blocks, _: min(at_first, num_blocks))
    suited = kind < 2
    if suited:
        monkeypatch.setattr(DecodingGraphs, "of", of)
    else:
        monkeypatch.setattr(runner, "attends_by_triton", lambda _: True)  # the network alone rules out a graph
    found = Generator(model, tokenizer).generate(prompts, configs)
    assert [one.token_ids for one in found] == [other.token_ids for other in expected]
    assert [one.logprobs for one in found] == [other.logprobs for other in expected]
    assert (len(replayed) > 10) == suited
    # Passes of 8, 4, 2 and 1 texts. From 2 blocks the cache grows to 5 for the prompts, and to 10 between passes of 4.
    assert captured == ([] if not suited else [0] * 4 if at_first is None else [1, 1, 2, 2, 2])


@torch.inference_mode()
def test_passes_are_captured_before_the_first_request(
    toy_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels():
        pytest.skip("there is no C++ compiler for the kernels")
    monkeypatch.setenv("SHEEPOP_NATIVE", "1")
    tokenizer = CharTokenizer.train(["abcdefgh"])
    model = toy_model(max_seq_len=32, vocab_size=tokenizer.vocab_size, **NETWORKS[0])
    config = GenerationConfig(max_new_tokens=9, min_new_tokens=9, seed=1)
    prompts = [[5, 6, 7, 8], [8, 8, 7], [9, 9], [5], [6] * 12]
    expected = Generator(model, tokenizer).generate(prompts, config)
    counts = {"captured": 0, "replayed": 0}

    def capture(work: Work) -> Work:
        def replay() -> None:
            counts["replayed"] += 1
            work()

        counts["captured"] += 1
        work()
        return replay

    monkeypatch.setattr(DecodingGraphs, "of", lambda *about: DecodingGraphs(*about, lambda: capture))
    generator = Generator(model, tokenizer)
    made = generator.serving_engine(max_sequences=5, max_waiting=5)
    made.prepare()
    assert counts == {"captured": 4, "replayed": 0}  # of 1, 2, 4 and 8 texts
    requests = [generator.request(prompt, config, index=index) for index, prompt in enumerate(prompts)]
    for request in requests:
        made.add(request)
    while not made.is_idle:
        made.step()
    assert [request.completions()[0].token_ids for request in requests] == [each.token_ids for each in expected]
    assert counts == {"captured": 4, "replayed": 8}  # a token of each follows the pass over the prompts


@pytest.mark.parametrize(
    ("network", "steps_ahead"),
    [
        ({"position_encoding": "rope", "num_kv_heads": 2, "sliding_window": 5, "sliding_layers": [0]}, 0),
        ({"position_encoding": "rope", "experts": {"count": 4, "per_token": 2}}, 1),
        ({"position_encoding": "learned", "activation": "gelu"}, 1),
    ],
)
def test_passes_over_static_buffers_write_what_passes_with_new_ones_do(
    toy_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch, network: dict[str, Any], steps_ahead: int
) -> None:
    """Texts end at different times, and three tokens a step make a pass read single tokens of prompts as well."""
    if not has_kernels():
        pytest.skip("there is no C++ compiler for the kernels")
    monkeypatch.setenv("SHEEPOP_NATIVE", "1")
    monkeypatch.setattr(Engine, "build", partial(Engine.build, steps_ahead=steps_ahead))
    monkeypatch.setattr(engine, "tokens_per_step", lambda _: 3)
    tokenizer = CharTokenizer.train(["abcdefgh"])
    model = toy_model(max_seq_len=48, vocab_size=tokenizer.vocab_size, **network)
    prompts = [[5, 6, 7, 8], [6] * 12, [8, 8, 7], [9, 9]]
    configs = [
        GenerationConfig(max_new_tokens=count, min_new_tokens=count, seed=1, temperature=1.0)
        for count in (20, 9, 30, 3)
    ]
    run, described = StaticPasses.run, list[int]()

    def counted(passes: StaticPasses, *arguments: Any) -> torch.Tensor:
        logits = run(passes, *arguments)
        assert passes._static is not None
        described.append(len(passes._static.described))
        return logits

    monkeypatch.setattr(StaticPasses, "run", counted)
    generator = Generator(model, tokenizer, max_batch_size=3)
    found = [generator.generate(prompts, configs) for _ in range(2)]
    # Native code is told of a pass once, of all blocks together.
    assert len(described) > 40 and set(described) == {1}
    monkeypatch.setattr(StaticPasses, "of", lambda *_: None)
    expected = Generator(model, tokenizer, max_batch_size=3).generate(prompts, configs)
    monkeypatch.setattr(Engine, "build", partial(Engine.build, steps_ahead=0))
    recomputed = RecomputingGenerator(model, tokenizer).generate(prompts, configs)
    for completions in found:
        assert [one.token_ids for one in completions] == [one.token_ids for one in recomputed]
        assert [one.logprobs for one in completions] == [one.logprobs for one in expected]


def test_many_texts_and_long_chunks_are_not_captured(toy_model: Callable[..., Transformer]) -> None:

    model = toy_model()
    graphs = DecodingGraphs(model, PagedCache(model, [4], 4), lambda: lambda work: work)
    table = BlockTable("", [[0]])
    for _ in range(20):
        assert not graphs.suits([Chunk(table, 0, 1)] * 257)
        assert not graphs.suits([Chunk(table, 0, 1), Chunk(table, 0, 2)])
    assert [graphs.suits([Chunk(table, 0, 1)] * 3) for _ in range(3)] == [False] * 2 + [True]


class PretendedCuda:
    """The part of `torch.cuda` that a capture uses; counts the captures that are open at a time on each device."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self.here = threading.local()
        self.open, self.most, self.modes = Counter[int](), Counter[int](), set[str]()
        # All threads are in a capture at a time, or never are.
        self.meeting, self.patience = threading.Barrier(len(devices)), 60.0 if len(set(devices)) > 1 else 0.5
        self.met = list[bool]()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nothing = SimpleNamespace(wait_stream=lambda _: None)
        graph = SimpleNamespace(replay=lambda: None)
        for name, found in {
            "current_device": lambda: self.here.device,
            "graph_pool_handle": lambda: (0, 0),
            "Stream": lambda: nothing,
            "current_stream": lambda: nothing,
            "stream": lambda _: nullcontext(),
            "CUDAGraph": lambda: graph,
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, found)

    @contextmanager
    def graph(self, _: object, *, pool: object, capture_error_mode: str) -> Iterator[None]:
        device = self.here.device
        self.open[device] += 1
        self.most[device] = max(self.most[device], self.open[device])
        self.modes.add(capture_error_mode)
        try:
            self.meeting.wait(self.patience)
            self.met.append(True)
        except threading.BrokenBarrierError:
            self.met.append(False)
        yield
        self.open[device] -= 1


@pytest.mark.parametrize("devices", [(0, 0, 0), (0, 1, 2)])
def test_captures_on_one_device_wait_for_each_other_and_on_several_do_not(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[int, ...]
) -> None:
    cuda = PretendedCuda(devices)
    cuda.patch(monkeypatch)

    def captured(device: int) -> int:
        cuda.here.device, runs = device, list[int]()
        runner._cuda_capture()(lambda: runs.append(1))
        return len(runs)

    with ThreadPoolExecutor(len(devices)) as pool:
        runs = list(pool.map(captured, devices))
    assert runs == [3] * len(devices)  # twice beforehand, once captured
    assert cuda.met == [len(set(devices)) > 1] * len(devices)
    assert set(cuda.most.values()) == {1}
    assert cuda.modes == {"thread_local"}
