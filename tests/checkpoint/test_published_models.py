"""Published models by name, from a hub on loopback: what is fetched, kept, refused; and files of other programs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import sheepop
from sheepop.adapt.scalar_head import REWARD_HEAD, add_scalar_head
from sheepop.checkpoint import load_model, model_cache, resolve_model_directory, save_model
from sheepop.checkpoint.gguf.writer import write_gguf
from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.model_cache import cached_models
from sheepop.checkpoint.model_directory import unique_weights
from sheepop.checkpoint.model_kind import PublishedName
from sheepop.checkpoint.published_model import pull
from sheepop.core import hub as hub_module
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, ConfigError, SheepOpError, StorageError, UsageError
from sheepop.jobs.generate import load_adapted
from sheepop.jobs.models import list_models, pull_model, remove_models
from sheepop.jobs.task.reward_sources import open_reward
from sheepop.jobs.tokenizer import encode_text, find_tokenizer
from sheepop.model import ModelConfig, build_model
from sheepop.posttrain.rewards import Answer
from sheepop.tokenizer import CharTokenizer, load_tokenizer

from ..command_line import Launcher

if TYPE_CHECKING:
    from tests.hub_server import Fault, LoopbackHub

NAME = "org/Toy-1"
IDS = torch.tensor([[5, 17, 100, 41, 8]])


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that transformers wrote, in several weight files, with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=133, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, eos_token_id=[1, 7],
    )  # fmt: skip
    place = tmp_path_factory.mktemp("toy")
    LlamaForCausalLM(config).save_pretrained(place, max_shard_size="20KB")
    CharTokenizer().save(place)
    assert len(list(place.glob("model-*.safetensors"))) > 1
    return place


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHEEPOP_MODELS", str(tmp_path_factory.mktemp("cache")))
        loaded = load_model(toy)
    path = tmp_path_factory.mktemp("gguf") / "toy.gguf"
    tensors = {name: LazyTensor.of(tensor) for name, tensor in unique_weights(loaded.model).items()}
    write_gguf(path, loaded.config, tensors, loaded.tokenizer, name="toy", end_ids=(7,))
    return path.read_bytes()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHEEPOP_MODELS", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def files_of(place: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in place.iterdir() if file.is_file()}


def theirs(place: Path) -> torch.Tensor:
    """The logits of transformers."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return cast(torch.Tensor, AutoModelForCausalLM.from_pretrained(place)(IDS).logits)


def content_paths(hub: LoopbackHub) -> list[str]:
    return [path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


def refused(name: str | Path, kind: type[SheepOpError] = CheckpointError) -> str:
    with pytest.raises(kind) as error:
        resolve_model_directory(name, Console.silent())
    return str(error.value)


# Fetching


def test_a_name_loads_what_transformers_loads(hub: LoopbackHub, toy: Path, cache: Path):
    unneeded = {"pytorch_model.bin": b"x" * 500, "modeling.py": b"raise SystemExit", "consolidated.safetensors": b"y"}
    repository = hub.repository(NAME, files_of(toy) | unneeded, card={"license": "apache-2.0"})
    lm = sheepop.load(NAME, "cpu")
    torch.testing.assert_close(lm.model(IDS), theirs(toy), rtol=1e-4, atol=1e-5)
    assert set(lm.end_ids) == {1, 7}
    assert not set(content_paths(hub)) & {*unneeded, "README.md"}
    (entry,) = cached_models()
    kept = {file.name for file in entry.path.rglob("*.safetensors")}
    assert kept == {file.name for file in toy.glob("*.safetensors")}  # as they were published, and once
    assert not list(entry.directory.glob("*.safetensors"))
    made = load_model(NAME).provenance["imported"]
    assert made["repository"] == NAME and made["revision"] == repository.branches["main"]
    assert made["license"] == "apache-2.0" and "directory" not in made


def test_a_name_loads_the_language_model_of_a_multimodal_model_with_quantised_weights(
    hub: LoopbackHub, toy: Path, tmp_path: Path
):
    text = json.loads((toy / "config.json").read_text())
    sizes = {key: text[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    keys = {
        "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": False,
        "text_config": {
            **sizes, "model_type": "mistral", "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
            "max_position_embeddings": 64, "sliding_window": None, "rms_norm_eps": text["rms_norm_eps"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    }  # fmt: skip
    place = tmp_path / "mistral3"
    place.mkdir()
    tensors = {"vision_tower.patch.weight": torch.ones(2)}
    plain = {name: tensor for file in toy.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, tensor in plain.items():
        if "_proj.weight" in name:
            tensors[f"language_model.{name}"] = (tensor * 4).to(torch.float8_e4m3fn)
            tensors[f"language_model.{name}_scale_inv"] = torch.tensor(0.25)
            tensors[f"language_model.{name.removesuffix('weight')}activation_scale"] = torch.tensor(0.5)
            plain[name] = (tensor * 4).to(torch.float8_e4m3fn).float() / 4
        else:
            tensors[f"language_model.{name}"] = tensor
    save_file(tensors, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(keys))
    shutil.copytree(toy, tmp_path / "rounded", ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(plain, tmp_path / "rounded" / "model.safetensors", {"format": "pt"})
    CharTokenizer().save(place)
    hub.repository(NAME, files_of(place))
    lm = sheepop.load(NAME, "cpu")
    torch.testing.assert_close(lm.model(IDS), theirs(tmp_path / "rounded"), rtol=1e-4, atol=1e-5)


def adapter_for(place: Path, folder: Path) -> dict[str, bytes]:
    """The files of an adapter of the model in `place`, which PEFT trained."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(place), peft.LoraConfig(target_modules=["q_proj"])
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    adapted.save_pretrained(folder)
    return files_of(folder)


def test_an_adapter_by_name_computes_what_peft_computes(hub: LoopbackHub, toy: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft")
    files = adapter_for(toy, tmp_path / "adapter")
    # Training programs leave a configuration of the model and more beside it.
    hub.repository("org/polite", files | {"config.json": b"{}", "training_args.bin": b"x" * 500, "README.md": b"y"})
    hub.repository(NAME, files_of(toy))
    found = load_adapted(NAME, ["org/polite"], device="cpu")
    expected = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(toy), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(found.model(IDS), expected(IDS).logits, rtol=1e-4, atol=1e-5)
    fetched = content_paths(hub)
    assert fetched.count("config.json") == 1 and "training_args.bin" not in fetched
    asked = len(hub.requests)
    load_adapted(NAME, [Path("hf:org/polite")], device="cpu")
    assert len(hub.requests) == asked
    assert {found["name"] for found in list_models()} == {NAME, "org/polite"}
    assert "org/polite is an adapter, not a model. Give its model, and this one with --adapter" in refused("org/polite")
    with pytest.raises(CheckpointError, match="is not an adapter"):
        load_adapted(NAME, [NAME], device="cpu")
    with pytest.raises(CheckpointError, match=r"polite.zip does not exist. Give a directory in PEFT's format, a run"):
        load_adapted(NAME, ["polite.zip"], device="cpu")


def test_a_model_of_sheepop_by_name_is_what_was_saved_also_one_that_judges(hub: LoopbackHub, tmp_path: Path):
    sizes = {"vocab_size": 128, "d_model": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 64, "dropout": 0.0}
    model = build_model(ModelConfig(**sizes), seed=1).eval()
    torch.nn.init.normal_(add_scalar_head(model, REWARD_HEAD).weight, generator=torch.Generator().manual_seed(2))
    save_model(tmp_path / "judge", model, CharTokenizer(), {"made": "here"})
    hub.repository("org/judge", files_of(tmp_path / "judge"))
    answer = Answer("1 + 1 =", " 2", [5, 17, 100, 41])
    rewards = []
    for place in ("org/judge", str(tmp_path / "judge")):
        reward = open_reward(place, 5.0, CharTokenizer(), device="cpu", batch_size=2)
        rewards.append(reward([answer]))
    assert rewards[0] == rewards[1]
    assert load_model("org/judge").provenance == {"made": "here"}
    with pytest.raises(ConfigError, match=r"judges/check\.py does not exist, so it cannot judge answers"):
        open_reward("judges/check.py", 5.0, CharTokenizer(), device="cpu", batch_size=2)


def test_a_tokenizer_is_fetched_without_the_weights_which_a_later_start_fetches(hub: LoopbackHub, toy: Path):
    hub.repository(NAME, files_of(toy))
    expected = load_tokenizer(toy).encode("Hello World")
    for _ in range(2):
        assert [token["id"] for token in encode_text(Path(NAME), "Hello World", False)] == expected
        assert not any(path.endswith((".safetensors", ".index.json")) for path in content_paths(hub))
    (entry,) = list_models()
    assert entry["stored"] == ["tokenizer"] and entry["name"] == NAME
    load_model(NAME)
    (whole,) = list_models()
    assert whole["path"] != entry["path"]
    asked = len(hub.requests)
    assert [token["id"] for token in encode_text(Path(NAME), "Hello World", False)] == expected
    assert len(hub.requests) == asked


def test_a_repository_with_a_tokenizer_alone_has_one_and_is_no_model(hub: LoopbackHub, toy: Path):
    hub.repository(NAME, {name: data for name, data in files_of(toy).items() if not name.startswith("model")})
    assert find_tokenizer(NAME).encode("Hello") == load_tokenizer(toy).encode("Hello")
    assert "is not a model that SheepOp reads" in refused(NAME)


def test_a_second_start_asks_nobody_and_loads_no_torch(hub: LoopbackHub, toy: Path, cache: Path):
    hub.repository(NAME, files_of(toy))
    first = resolve_model_directory(NAME, Console.silent())
    asked = len(hub.requests)
    assert resolve_model_directory(Path(NAME)) == resolve_model_directory(f"hf:{NAME}") == first
    assert resolve_model_directory("ORG/toy-1@main") == first
    assert len(hub.requests) == asked
    program = (
        "import sys\nfrom sheepop.checkpoint.model_source import resolve_model_directory\n"
        f"print(resolve_model_directory({NAME!r}))\nsys.exit(len({{'torch', 'huggingface_hub'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(first)), done.stderr


def test_a_path_wins_over_a_name(hub: LoopbackHub, toy: Path, tmp_path: Path):
    hub.repository(NAME, files_of(toy))
    shutil.copytree(toy, tmp_path / NAME)
    load_model(NAME)
    assert hub.requests == []


def test_a_missing_path_in_a_folder_that_exists_does_not_go_to_the_hub(hub: LoopbackHub, tmp_path: Path):
    (tmp_path / "runs").mkdir()
    assert "write hf:runs/quikstart" in refused("runs/quikstart")
    assert hub.requests == []


def test_a_revision_is_another_model(hub: LoopbackHub, toy: Path):
    files = files_of(toy)
    settings = {"eos_token_id": [9]}
    repository = hub.repository(NAME, files)
    commit = repository.branches["main"]
    repository.commit(files | {"generation_config.json": json.dumps(settings).encode()}, branch="v2")
    assert load_model(f"{NAME}@v2").end_ids == (9,)
    assert load_model(f"{NAME}@{commit}").end_ids == load_model(NAME).end_ids == (1, 7)
    asked = len(hub.requests)
    assert load_model(f"{NAME}@{commit[:9]}").end_ids == (1, 7)
    assert len(hub.requests) == asked
    assert "has no revision v3" in refused(f"{NAME}@v3")


def test_a_pull_fetches_a_newer_commit_and_a_name_then_means_it(hub: LoopbackHub, toy: Path):
    repository = hub.repository(NAME, files_of(toy))
    old = pull_model(NAME)
    repository.commit(files_of(toy) | {"generation_config.json": b'{"eos_token_id": 9}'})
    assert load_model(NAME).end_ids == (1, 7)
    new = pull_model(NAME)
    assert load_model(NAME).end_ids == (9,) and load_model(f"{NAME}@{old['revision']}").end_ids == (1, 7)
    assert {old["revision"], new["revision"]} == {model["revision"] for model in list_models()}


def test_a_transfer_that_breaks_off_goes_on_where_it_stopped(
    hub: LoopbackHub, toy: Path, fault: type[Fault], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub_module, "_CHUNK", 500)
    hub.repository(NAME, files_of(toy))
    shard = max(toy.glob("model-*.safetensors"), key=lambda file: file.stat().st_size)
    hub.fail(shard.name, *[fault(after=2000) if number == 0 else fault(status=500) for number in range(7)])
    assert "failed (status 500)" in refused(NAME)
    hub.faults.clear()
    load_model(NAME)
    ranges = [headers["range"] for _, path, headers in hub.requests if path.endswith(shard.name) and "range" in headers]
    assert ranges[-1].startswith("bytes=2000-")


def test_other_bytes_than_the_listed_ones_are_refused(hub: LoopbackHub, toy: Path, fault: type[Fault]):
    hub.repository(NAME, files_of(toy))
    shard = sorted(toy.glob("model-*.safetensors"))[0].name
    spoil = fault(change=lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    hub.fail(shard, spoil, spoil)
    message = refused(NAME)
    assert shard in message and "its hash is" in message
    assert not [entry for entry in cached_models() if entry.is_finished]


def test_two_processes_fetch_a_model_once(hub: LoopbackHub, toy: Path, tmp_path: Path, launcher: Launcher):
    hub.repository(NAME, files_of(toy))
    hub.pause = 0.02
    environment = hub.environment(tmp_path) | {"SHEEPOP_MODELS": str(tmp_path / "cache")}
    started = [launcher.start("models", "pull", NAME, "--json", environment=environment) for _ in range(2)]
    ended = [process.wait() for process in started]
    assert [end.code for end in ended] == [0, 0], ended[0].err + ended[1].err
    one, other = (json.loads(end.out) for end in ended)
    assert one["path"] == other["path"]
    fetched = content_paths(hub)
    assert len(fetched) == len(set(fetched))


def test_the_cache_of_hugging_faces_library_is_used(hub: LoopbackHub, toy: Path, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import hf_hub_download

    commit = hub.repository(NAME, files_of(toy)).branches["main"]
    for name in files_of(toy):
        path = hf_hub_download(NAME, name, revision=commit, endpoint=hub.address, cache_dir=constants.HF_HUB_CACHE)
    place = Path(path).parent
    (place.parents[1] / "refs").mkdir()
    (place.parents[1] / "refs" / "main").write_text(commit)
    before = hub.total_sent
    resolve_model_directory(NAME, Console.silent())
    assert hub.total_sent == before
    for entry in cached_models():
        entry.remove()
    with monkeypatch.context() as patch:
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
        patch.setattr(hub_module, "WAITS", ())
        resolve_model_directory(NAME, Console.silent())
        assert "cannot be reached" in refused("org/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for entry in cached_models():
        entry.remove()
    torch.testing.assert_close(load_model(NAME).model(IDS), theirs(toy), rtol=1e-4, atol=1e-5)
    for entry in cached_models():
        entry.remove()
    shard = sorted(place.glob("model-*.safetensors"))[-1]
    shard.unlink()
    message = refused(NAME)
    assert shard.name in message and "sheepop models pull org/Toy-1" in message and "HF_HUB_OFFLINE" in message


# GGUF


def test_a_gguf_file_in_a_repository(hub: LoopbackHub, toy: Path, gguf: bytes):
    hub.repository("org/One-GGUF", {"README.md": b"", "toy-f32.gguf": gguf})
    hub.repository("org/Many-GGUF", {"a.gguf": b"GGUF", "more/toy-f32.gguf": gguf, "b-00001-of-00002.gguf": b"GGUF"})
    want = theirs(toy)
    torch.testing.assert_close(load_model("org/One-GGUF").model(IDS), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(load_model("org/Many-GGUF/more/toy-f32.gguf").model(IDS), want, rtol=1e-4, atol=1e-5)
    several = refused("org/Many-GGUF")
    assert "a.gguf, b-00001-of-00002.gguf, more/toy-f32.gguf" in several and "org/Many-GGUF/a.gguf" in several
    assert "has no file c.gguf. It has a.gguf" in refused("org/Many-GGUF/c.gguf")
    assert "has no file b-00002-of-00002.gguf" in refused("org/Many-GGUF/b-00001-of-00002.gguf")


def test_files_of_other_programs_are_imported_once(toy: Path, gguf: bytes, tmp_path: Path):
    path = tmp_path / "toy.gguf"
    path.write_bytes(gguf)
    first = resolve_model_directory(path, Console.silent())
    torch.testing.assert_close(load_model(path).model(IDS), theirs(toy), rtol=1e-4, atol=1e-5)
    directory = tmp_path / "hf"
    shutil.copytree(toy, directory)
    torch.testing.assert_close(load_model(directory).model(IDS), theirs(toy), rtol=1e-4, atol=1e-5)
    assert resolve_model_directory(path) == first and len(cached_models()) == 2
    (directory / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert load_model(directory).end_ids == (9,)
    assert len(cached_models()) == 2


def test_a_folder_of_gguf_files_is_told(gguf: bytes, tmp_path: Path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "toy.gguf").write_bytes(gguf)
    assert "give one of them, such as files/toy.gguf" in refused("files")


# Refusals


@pytest.mark.parametrize(
    ("status", "words"), [(401, "set HF_TOKEN"), (403, "set HF_TOKEN"), (404, "There is no model"), (429, "429")]
)
def test_a_refusal_of_the_hub_is_explained(
    hub: LoopbackHub, toy: Path, fault: type[Fault], status: int, words: str, monkeypatch: pytest.MonkeyPatch
):
    hub.repository(NAME, files_of(toy))
    hub.fail("/main", *[fault(status=status)] * 9)
    message = refused(NAME)
    assert words in message and "neither a path here nor in the cache" in message


def test_a_token_opens_a_private_repository(hub: LoopbackHub, toy: Path, monkeypatch: pytest.MonkeyPatch):
    hub.repository(NAME, files_of(toy), private=True)
    assert "set HF_TOKEN" in refused(NAME)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    load_model(NAME)


def test_a_gated_repository_says_where_to_accept_its_terms(hub: LoopbackHub, toy: Path):
    hub.repository(NAME, files_of(toy), gated=True)
    assert f"{hub.address}/{NAME} while logged in" in refused(NAME)


def test_a_hub_that_hangs_is_given_up(hub: LoopbackHub, toy: Path, fault: type[Fault], monkeypatch: pytest.MonkeyPatch):
    hub.repository(NAME, files_of(toy))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(hub_module, "WAITS", ())
    hub.fail("config.json", *[fault(after=10, stall=True)] * 9)
    assert "keeps breaking off" in refused(NAME)


def test_without_a_network_the_missing_file_is_named(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = refused(NAME)
    assert "HF_HUB_OFFLINE is set" in message and "sheepop models pull org/Toy-1" in message


def test_pickles_are_refused_before_they_are_fetched(hub: LoopbackHub, toy: Path):
    kept = {name: data for name, data in files_of(toy).items() if "safetensors" not in name}
    hub.repository(NAME, kept | {"pytorch_model.bin": b"x" * 999})
    assert "pytorch_model.bin, a pickle" in refused(NAME)
    assert content_paths(hub) == []


def test_an_unknown_family_is_refused_before_its_weights_are_fetched(hub: LoopbackHub, toy: Path):
    config = json.loads((toy / "config.json").read_text()) | {"model_type": "mamba"}
    hub.repository(NAME, files_of(toy) | {"config.json": json.dumps(config).encode()})
    assert "model_type = 'mamba' is not supported" in refused(NAME)
    assert content_paths(hub) == ["config.json"]


def test_a_repository_without_a_model_says_what_is_missing(hub: LoopbackHub):
    hub.repository(NAME, {"README.md": b"hello"})
    assert "neither config.json" in refused(NAME)


def test_an_index_that_leads_out_of_the_repository_is_refused(hub: LoopbackHub, toy: Path):
    index = {"metadata": {}, "weight_map": {"a": "../../../evil.safetensors"}}
    files = files_of(toy) | {"model.safetensors.index.json": json.dumps(index).encode()}
    hub.repository(NAME, files | {"../../../evil.safetensors": b"x" * 300, "../x.gguf": b"GGUF"})
    assert "'../../../evil.safetensors'" in refused(NAME)


def test_a_full_disk_is_told_before_the_transfer(hub: LoopbackHub, toy: Path, monkeypatch: pytest.MonkeyPatch):
    hub.repository(NAME, files_of(toy))
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(model_cache.shutil, "disk_usage", lambda _: usage._replace(free=2**24 + 1000))
    message = refused(NAME, StorageError)
    assert "SHEEPOP_MODELS" in message and content_paths(hub) == []


@pytest.mark.parametrize("place", ["/proc/cache", "/dev/null"])
def test_a_cache_that_cannot_be_written_is_told(
    hub: LoopbackHub, toy: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch, place: str
):
    """By its directory and the variable that names another, before anything is fetched."""
    monkeypatch.delenv("SHEEPOP_MODELS")
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    hub.repository(NAME, files_of(toy))
    Path("toy.gguf").write_bytes(gguf)
    for name in ("toy.gguf", str(toy), NAME):
        message = refused(name, StorageError)
        assert message.startswith(f"Cannot write {place}/sheepop/models: "), message
        assert message.endswith("It is the cache of models; SHEEPOP_MODELS can name another directory for it.")
    assert content_paths(hub) == []


@pytest.mark.parametrize("name", ["hf:../etc", "hf:a", "hf:a/../b", "hf:a/b/c.bin", "hf:a/b/../c.gguf", "hf:a--b/c"])
def test_what_is_no_name_is_refused(hub: LoopbackHub, name: str):
    refused(name, UsageError)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["nothing", "/nothing/here", "../a/b", "a/b/c.bin", "a b/c", "~/a/b", "a/.b"])
def test_what_is_neither_a_path_nor_a_name_is_refused(hub: LoopbackHub, name: str):
    assert f"{name} does not exist" in refused(name)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", "main", None)),
        ("hf:org/name@refs/pr/1", ("org/name", "refs/pr/1", None)),
        ("org/name/BF16/file.gguf", ("org/name", "main", "BF16/file.gguf")),
        ("org/name/file.gguf@v1.0", ("org/name", "v1.0", "file.gguf")),
    ],
)
def test_the_parts_of_a_name(text: str, parts: tuple[Any, ...]):
    name = PublishedName.parse(text)
    assert name is not None and (name.repository, name.revision, name.file) == parts
    assert PublishedName.parse(str(name)) == name


# The cache


def test_models_are_listed_and_removed(hub: LoopbackHub, toy: Path, gguf: bytes, tmp_path: Path):
    hub.repository(NAME, files_of(toy))
    (tmp_path / "toy.gguf").write_bytes(gguf)
    pulled = pull_model(NAME)
    resolve_model_directory("toy.gguf", Console.silent())
    listed = list_models()
    assert {model["name"] for model in listed} == {NAME, str(tmp_path / "toy.gguf")}
    assert pulled["bytes"] == sum(
        file.stat().st_size for file in Path(pulled["path"]).parent.rglob("*") if file.is_file()
    )

    def all_of(_: list[Mapping[str, Any]]) -> bool:
        return True

    with pytest.raises(UsageError, match="org/other is not in the cache, which holds"):
        remove_models([NAME, "org/other"], all_of)
    assert remove_models([NAME], lambda _: False) == [] and len(list_models()) == 2
    assert [model["name"] for model in remove_models([f"{NAME}@{pulled['revision'][:8]}", "toy.gguf"], all_of)]
    assert list_models() == [] and not Path(pulled["path"]).exists()


def test_an_unfinished_entry_is_listed_and_can_be_removed(hub: LoopbackHub, toy: Path, fault: type[Fault]):
    hub.repository(NAME, files_of(toy))
    hub.fail("model.safetensors.index.json", *[fault(status=500)] * 9)
    refused(NAME)
    (entry,) = list_models()
    assert not entry["finished"] and entry["last_used"] is None
    remove_models([entry["name"]], lambda _: True)
    assert list_models() == []


def test_a_record_of_another_version_is_no_model(hub: LoopbackHub, toy: Path):
    hub.repository(NAME, files_of(toy))
    entry = pull(PublishedName(NAME), Console.silent())
    record = entry.path / "record.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "version": 0}))
    asked = len(hub.requests)
    load_model(NAME)
    assert len(hub.requests) > asked
