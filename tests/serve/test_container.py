"""The container's commands run, its files fit together, and the dashboard asks for what the server measures."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sheepop.checkpoint import save_model
from sheepop.serve.metrics import merged

from ..command_line import Launcher, free_port
from .conftest import WithTemplate, tiny_network, wait_for

httpx = pytest.importorskip("httpx")
ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "sheepop.json").read_text(encoding="utf-8"))


def words(instruction: str) -> list[str]:
    """The arguments of an instruction in the form of JSON."""
    (found,) = re.findall(rf"^{instruction} (?:--\S+ |\\\n *CMD )*(\[.*\])$", DOCKERFILE, re.MULTILINE)
    return list(json.loads(found))


@pytest.fixture(scope="module")
def url(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server started as the container starts it, but for the model's place and the port."""
    place, port = tmp_path_factory.mktemp("models") / "model", free_port()
    save_model(place, tiny_network(), WithTemplate("[user] Hi\nassn"), {})
    changed = {"model=/models/model": f"model={place}", "8000": str(port)}
    assert words("ENTRYPOINT") == ["sheepop"] and changed.keys() <= set(words("CMD"))
    process = launcher.start(*(changed.get(word, word) for word in words("CMD")))

    def is_ready() -> bool:
        assert process.poll() is None, process.wait().err
        try:
            return bool(httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200)
        except httpx.TransportError:
            return False

    wait_for(is_ready)
    yield f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGTERM)
    assert process.wait().code in (0, 143)


def test_a_started_container_answers_and_is_healthy(url: str):
    asked = {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).status_code == 200
    program, *arguments = words("HEALTHCHECK")
    assert program == "python" and "http://127.0.0.1:8000/health" in arguments[1]
    for place, healthy in ((url, True), (f"http://127.0.0.1:{free_port()}", False)):
        check = [sys.executable, *(word.replace("http://127.0.0.1:8000", place) for word in arguments)]
        assert (subprocess.run(check, check=False, capture_output=True).returncode == 0) == healthy


def test_the_dashboard_shows_every_metric_of_the_server_and_no_other(url: str):
    text = merged(httpx.get(f"{url}/metrics").content, {})
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    suffixes = {"counter": "_total", "histogram": "_bucket", "gauge": ""}
    kinds = {name: family.type for name, family in families.items() if not name.endswith("_created")}
    served = {name + suffixes[kind] for name, kind in kinds.items()}
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert {name for expression in asked for name in re.findall(r"sheepop_\w+", expression)} == served
    for expression in asked:
        (metric,) = re.findall(r"(sheepop_\w+)", expression)
        labels = set(re.findall(r"\b(?:by|sum by) \(([^)]*)\)", expression)) | set(re.findall(r"\{(\w+)", expression))
        family = families[re.sub("_(total|bucket)$", "", metric)]
        known = {label for sample in family.samples for label in sample.labels}
        # Counters and times that this server has not yet met have no labels.
        assert not known or {each.strip() for label in labels for each in label.split(",")} <= known, expression


def test_the_files_beside_compose_fit_together():
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            place, *_ = volume.split(":")
            if place.startswith("./"):
                assert (ROOT / place).is_file(), volume
            elif not place.startswith("${"):
                assert place in COMPOSE["volumes"], volume
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"] == [{"targets": [f"server:{words('CMD')[-1]}"]}]
    (source,) = yaml.safe_load((ROOT / "deploy" / "grafana" / "sources.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    (folder,) = yaml.safe_load((ROOT / "deploy" / "grafana" / "dashboards.yaml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert f"{folder['options']['path']}/sheepop.json" in mounted


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_ends_without_rights_and_has_what_it_copies(target: str):
    last = DOCKERFILE.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == ["1000"]
    files = {"compose.yaml": COMPOSE, "compose.cuda.yaml": yaml.safe_load((ROOT / "compose.cuda.yaml").read_text())}
    built = [each["services"]["server"]["build"]["target"] for each in files.values()]
    assert target in built
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    copied = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    names = {name for line in copied for name in line}
    assert names == allowed and all((ROOT / name).exists() for name in names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= names


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint")
def test_the_dockerfile_is_clean():
    done = subprocess.run(["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
