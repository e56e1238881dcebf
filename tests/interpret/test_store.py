"""A trace on disk: all of a short one, the residual stream of a long one, in slices, and never a damaged one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sheepop.core.errors import DataError
from sheepop.core.files import write_checksums
from sheepop.interpret import store
from sheepop.interpret.checks import check_trace
from sheepop.interpret.journey import journey_of, stored_journey
from sheepop.interpret.lens import compare_traces
from sheepop.interpret.store import StoredTrace, write_trace
from sheepop.interpret.trace import Trace
from sheepop.model import Transformer
from sheepop.tokenizer import CharTokenizer

from .conftest import PAIRS


def written(trace: Trace, place: Path) -> StoredTrace:
    place.mkdir()
    write_trace(trace, place, check_trace(trace), "runs/x")
    write_checksums(place)
    return StoredTrace.open(place)


@pytest.mark.parametrize("norm_position", ["pre", "post", "output"])
def test_a_short_trace_is_kept_whole_and_read_in_slices(
    traced: Callable[..., Trace], norm_position: str, tmp_path: Path
) -> None:
    trace = traced(norm_position=norm_position)
    found = written(trace, tmp_path / "trace")
    assert found.manifest["is_whole"] and found.manifest["model"] == "runs/x"
    for name in trace.names:
        if name not in ("positioned", "embedded") and not name.endswith(".output"):
            assert torch.equal(found.read(name), trace[name]), name
    assert torch.equal(found.read("residuals"), trace.residuals)
    name = "blocks.1.attention.weights"
    assert found.shape(name) == [4, 8, 8]
    assert torch.equal(found.read(name, 2, slice(3, 5)), trace[name][2, 3:5])
    assert found.manifest["tokens"][3]["text"] == "D"
    assert [check["holds"] for check in found.manifest["checks"]] == [True] * 8
    with pytest.raises(KeyError, match=r"no tensor 'blocks\.7\.output'"):
        found.read("blocks.7.output")


def test_a_source_is_kept_beside_its_target(network: Callable[..., Transformer], tmp_path: Path) -> None:
    trace = Trace.of(network(**PAIRS, norm_position="post"), CharTokenizer(), "ABC", "DE")
    found = written(trace, tmp_path / "trace")
    assert trace.source is not None
    assert torch.equal(found.read("source_residuals"), trace.source.residuals)
    assert torch.equal(found.read("source_embedded"), trace.source.embedded)
    for name in ("encoder_blocks.1.attention.weights", "blocks.1.cross_attention.weights", "memory", "logits"):
        assert torch.equal(found.read(name), trace[name]), name
    assert [token["text"] for token in found.manifest["source_tokens"]] == ["A", "B", "C", "<eos>"]


@pytest.mark.parametrize("kind", [{}, PAIRS], ids=["decoder", "pairs"])
def test_the_picture_of_a_stored_trace_needs_no_network(
    network: Callable[..., Transformer], kind: dict[str, object], tmp_path: Path
) -> None:
    trace = Trace.of(network(**kind), CharTokenizer(), "ABCD", "DE" if kind else None)
    found = written(trace, tmp_path / "trace")
    assert found.contributions is not None
    assert sum(found.contributions.values()) == pytest.approx(float(trace.logits_behind(trace.num_tokens - 1).max()))
    for channels in (None, [3, 0]):
        assert stored_journey(found, channels).to_dict(found) == journey_of(trace, -1, None, channels).to_dict(trace)
    with pytest.raises(IndexError):
        stored_journey(found, [10_000])
    del found.manifest["contributions"]
    with pytest.raises(DataError, match="no contributions"):
        stored_journey(found)


def test_a_large_trace_keeps_its_residual_stream(
    traced: Callable[..., Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_WHOLE_BYTES", 1000)
    trace = traced()
    found = written(trace, tmp_path / "trace")
    assert found.names == ["embedded", "residuals"] and not found.manifest["is_whole"]
    assert torch.equal(found.read("residuals", 2), trace.residuals[2])


def test_damage_is_named(traced: Callable[..., Trace], tmp_path: Path) -> None:
    place = tmp_path / "trace"
    written(traced(), place)
    tensors = place / "trace.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-5] ^= 1
    tensors.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"trace\.safetensors is damaged"):
        StoredTrace.open(place)
    (place / "manifest.json").write_text('{"format": "sheepop-trace", "format_version": 9}')
    write_checksums(place)
    with pytest.raises(DataError, match="format version 9 of traces"):
        StoredTrace.open(place)
    with pytest.raises(DataError, match=r"checksums\.json is missing"):
        StoredTrace.open(tmp_path)


def test_a_comparison_is_that_of_a_slow_loop(network: Callable[..., Transformer]) -> None:
    model = network(tie_weights=False)
    first = Trace.of(model, CharTokenizer(), "ABCDE")
    kept = first.residuals.clone(), first["logits"].log_softmax(-1)
    other = network(tie_weights=False)
    other.blocks[1].feed_forward.down_proj.weight += 0.3
    second = Trace.of(other, CharTokenizer(), "ABCDE")
    found = compare_traces(first, second)
    assert found.distance[:2].abs().max() == 0 and found.distance[2:].min() > 0
    q = second["logits"].log_softmax(-1)
    for t in range(5):
        expected = sum(float(p.exp() * (p - x)) for p, x in zip(kept[1][t], q[t], strict=True))
        assert float(found.divergence[t]) == pytest.approx(expected)
        a, b = kept[0][3, t], second.residuals[3, t]
        assert float(found.distance[3, t]) == pytest.approx(float((a - b).norm() / a.norm()))
        assert float(found.cosine[3, t]) == pytest.approx(float(a @ b / a.norm() / b.norm()))
    assert found.changed == [t for t in range(5) if int(kept[1][t].argmax()) != int(q[t].argmax())]
