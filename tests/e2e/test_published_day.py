"""A day with a published model, Gemma 3 270M in Q4_K_M: pulled by its name once, and then used by every command.

What the commands say is compared with transformers, which reads the same file, and with llama.cpp where it is
installed. ``make test-models`` fetches the file and sets ``SHEEPOP_TEST_MODEL`` to its folder. The tests follow each
other: a later one uses what an earlier one made. Each prints what it took.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint.model_directory import open_model

from ..command_line import Ended, Launcher, cold, in_process
from ..hub_server import LoopbackHub
from ..serve.conftest import ServerProcess

ENVIRONMENT = "SHEEPOP_TEST_MODEL"
pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(ENVIRONMENT not in os.environ, reason=f"{ENVIRONMENT} names no folder with a model"),
]
MODEL = "google/gemma-3-270m-GGUF"
PROMPT = "The three primary colours are"
NUM_NEW = 16
TEXT = Path(__file__).parents[2].joinpath("docs", "quantization.md").read_text(encoding="utf-8")[:1500]
# The peak memory of a process with the tokenizer alone, or with the model that writes some text; the stored weights.
MEMORY = """
import json, sys
import sheepop, sheepop.jobs.generate
from sheepop.adapt.stored_weight import StoredWeight
_, what, place = sys.argv
weights = []
if what == "tokenizer":
    tokenizer = sheepop.load_tokenizer(place)
else:
    model = sheepop.load(place)
    model.generate("The three primary colours are", max_new_tokens=8)
    weights = [w.stored_bytes if isinstance(w, StoredWeight) else w.nbytes for w in model.model.parameters()]
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([int(peak) * 1024, sum(weights)]))
"""


@pytest.fixture(autouse=True)
def timed(request: pytest.FixtureRequest) -> Iterator[None]:
    begun = time.monotonic()
    yield
    name = request.node.name.removeprefix("test_").replace("_", " ")
    print(f"  {name}: {time.monotonic() - begun:.1f} s", flush=True)


@pytest.fixture(scope="module")
def path() -> Path:
    (found,) = Path(os.environ[ENVIRONMENT]).glob("*.gguf")
    return found


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the day's files are."""
    return tmp_path_factory.mktemp("day")


@pytest.fixture(scope="module", autouse=True)
def pulled(path: Path, day: Path) -> Iterator[dict[str, Any]]:
    """The model in a cache of its own, fetched from a hub on loopback that is gone afterwards."""
    hub = LoopbackHub()
    hub.repository(MODEL, {"README.md": b"", path.name: path.read_bytes()})
    environment = hub.environment(day) | {"SHEEPOP_MODELS": str(day / "models")}
    begun = time.monotonic()
    ended = cold("models", "pull", MODEL, "--json", **environment)
    print(f"\n  models pull: {time.monotonic() - begun:.1f} s", flush=True)
    hub.close()
    assert ended.code == 0, ended.err
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHEEPOP_MODELS", environment["SHEEPOP_MODELS"])
        yield json.loads(ended.out)


@pytest.fixture(scope="module")
def theirs(path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    found = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return found.eval()


@pytest.fixture(scope="module")
def text(day: Path) -> Path:
    (day / "text.txt").write_text(TEXT)
    return day / "text.txt"


def question(number: int) -> str:
    return f"What is {number} plus {number}?"


def ids_of(model: Path | str, text: str) -> torch.Tensor:
    """The tokens (1, T) that the network reads for a text."""
    tokenizer = open_model(model).tokenizer
    return torch.tensor([[*tokenizer.prefix_ids, *tokenizer.encode(text)]])


def greedy(model: Any, ids: torch.Tensor, count: int = NUM_NEW) -> list[int]:
    """The tokens that a network of transformers appends."""
    with torch.inference_mode():
        found: list[int] = model.generate(ids, do_sample=False, max_new_tokens=count)[0, ids.shape[1] :].tolist()
    return found


def done(*arguments: object, stdin: str | None = None) -> Ended:
    ended = in_process(*arguments, stdin=stdin)
    assert ended.code == 0, ended.err
    return ended


def said(*arguments: object) -> Any:
    """What a command prints as JSON."""
    return json.loads(done(*arguments, "--json").out)


def test_the_model_is_listed(pulled: dict[str, Any]) -> None:
    (listed,) = said("models")
    assert listed["name"] == MODEL and listed["path"] == pulled["path"]
    print(f"  {listed['bytes'] / 1e6:,.0f} MB in the cache")


def test_greedy_text_is_that_of_transformers(theirs: Any) -> None:
    (found,) = said("generate", MODEL, PROMPT, "--greedy", "--max-new-tokens", NUM_NEW)
    assert found["token_ids"] == greedy(theirs, ids_of(MODEL, PROMPT))
    print(f"  {PROMPT}{found['text']!r}")


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say how much memory a process had at most")
def test_the_model_takes_little_more_memory_than_its_weights(pulled: dict[str, Any]) -> None:
    (before, _), (peak, weights) = (
        json.loads(subprocess.check_output([sys.executable, "-c", MEMORY, what, pulled["path"]]))
        for what in ("tokenizer", "model")
    )
    assert peak - before < 1.15 * weights
    print(f"  {(peak - before) / 1e6:,.0f} MB for {weights / 1e6:,.0f} MB of weights")


def test_a_chat_continues_the_text() -> None:
    (found,) = said("generate", MODEL, PROMPT, "--greedy", "--max-new-tokens", NUM_NEW)
    ended = done("chat", MODEL, "--temperature", 0, "--max-new-tokens", NUM_NEW, stdin=f"{PROMPT}\n")
    assert found["text"].strip() in ended.out
    assert "no chat template" in ended.err


def test_perplexity_is_that_of_transformers(theirs: Any, text: Path) -> None:
    found = said("score", MODEL, text)
    ids = ids_of(MODEL, TEXT)
    assert ids[0, -len(found["token_ids"]) :].tolist() == found["token_ids"]
    with torch.inference_mode():
        loss = torch.nn.functional.cross_entropy(theirs(ids).logits[0, :-1], ids[0, 1:]).item()
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    print(f"  perplexity {found['perplexity']:.4f}, of transformers {math.exp(loss):.4f}")


def test_a_trace_has_the_logits_of_transformers(theirs: Any, day: Path) -> None:
    from safetensors.torch import load_file

    found = said("trace", MODEL, PROMPT, "--output", day / "trace")
    assert all(check["holds"] for check in found["checks"])
    with torch.inference_mode():
        wanted = theirs(ids_of(MODEL, PROMPT)).logits[0]
    logits = load_file(day / "trace" / "trace.safetensors")["logits"][:, : wanted.shape[-1]]
    assert (logits - wanted).abs().max() < 1e-4


def test_four_bits_hold(day: Path, text: Path) -> None:
    found = said("quantize", MODEL, "--to", "int4", "--output", day / "int4", "--text", text)
    assert found["perplexity_after"] < 1.1 * found["perplexity_before"]
    print(f"  perplexity {found['perplexity_before']:.3f}, in 4 bits {found['perplexity_after']:.3f}")


def test_exports_are_the_model(theirs: Any, day: Path) -> None:
    """The GGUF file is read back by every command, the directory by transformers."""
    transformers = pytest.importorskip("transformers")
    said("export", MODEL, "--format", "hf", "--output", day / "hf")
    said("export", MODEL, "--format", "gguf", "--output", day / "model.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(day / "hf", dtype=torch.float32).eval()
    ids = transformers.AutoTokenizer.from_pretrained(day / "hf")(PROMPT, return_tensors="pt").input_ids
    assert ids.equal(ids_of(MODEL, PROMPT))
    with torch.inference_mode():
        assert (model(ids).logits - theirs(ids).logits).abs().max() < 1e-4
    for exported in ("hf", "model.gguf"):
        (found,) = said("generate", day / exported, PROMPT, "--greedy", "--max-new-tokens", NUM_NEW)
        assert found["token_ids"] == greedy(theirs, ids), exported


def test_llama_cpp_writes_the_same_text_from_the_export(day: Path) -> None:
    """From the published file it may not: with weights in 4 bits it also rounds what they are multiplied by."""
    llama_cpp = pytest.importorskip("llama_cpp")
    (found,) = said("generate", MODEL, PROMPT, "--greedy", "--max-new-tokens", NUM_NEW)
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
    model = llama_cpp.Llama(str(day / "model.gguf"), n_ctx=64, verbose=False, **exact)
    written = model.create_completion(PROMPT, max_tokens=NUM_NEW, temperature=0.0)["choices"][0]["text"]
    model.close()
    assert written == found["text"]


def test_an_adapter_is_learnt(day: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": question(n)}, {"role": "assistant", "content": str(2 * n)}]}
        for n in range(40)
    ]
    (day / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Rows of the default length, which is the context of 32,768, would not fit the memory of most machines.
    settings = (
        "tuning.lora={}",
        "data.max_length=64",
        "training.micro_batch_size=4",
        "training.max_steps=60",
        "training.global_batch_size=4",
        "training.precision=fp32",
        "training.sample_prompts=[]",
    )
    done("tune", "sft", MODEL, "--data", day / "rows.jsonl", "--output", day / "run", "--device", "cpu", *settings)
    metrics = [json.loads(line) for line in (day / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in metrics if row["split"] == "train"]
    assert max(row["step"] for row in metrics) == 60 and losses[-1] < 0.5 * losses[0]
    print(f"  loss {losses[0]:.3f}, after 60 steps {losses[-1]:.3f}")


@pytest.fixture(scope="module")
def answered(day: Path) -> str:
    """What transformers answers with the exported model of the run."""
    transformers = pytest.importorskip("transformers")
    said("export", day / "run", "--format", "hf", "--output", day / "tuned")
    model = transformers.AutoModelForCausalLM.from_pretrained(day / "tuned", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(day / "tuned")
    messages = [{"role": "user", "content": question(7)}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = greedy(model, ids["input_ids"], 8)
    return str(tokenizer.decode(written, skip_special_tokens=True))


def test_the_official_client_is_answered(launcher: Launcher, answered: str, theirs: Any, day: Path) -> None:
    openai = pytest.importorskip("openai")
    server = ServerProcess(launcher, [f"published={MODEL}", f"tuned={day / 'run'}"], day / "log", seconds=900)
    try:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="nobody", max_retries=0, timeout=300) as client:
            assert [model.id for model in client.models.list()] == ["published", "tuned"]
            text = client.completions.create(model="published", prompt=PROMPT, max_tokens=NUM_NEW, temperature=0)
            asked: Any = {"model": "tuned", "messages": [{"role": "user", "content": question(7)}]}
            asked |= {"max_tokens": 8, "temperature": 0}
            whole = client.chat.completions.create(**asked).choices[0].message.content
            stream = client.chat.completions.create(**asked, stream=True)
            chunks = [chunk.choices[0].delta.content or "" for chunk in stream]
    finally:
        code = server.close()
    assert code == 128 + signal.SIGTERM, (day / "log").read_text()
    wanted = greedy(theirs, ids_of(MODEL, PROMPT))
    assert text.choices[0].text == open_model(MODEL).tokenizer.decode(wanted)
    assert whole == "".join(chunks) == answered
    print(f"  {question(7)} {whole!r}, in {len(chunks)} chunks")
