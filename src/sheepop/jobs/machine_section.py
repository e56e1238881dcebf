"""The section of a run's report about where, when and with what it was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sheepop.jobs.record_values import entry, text
from sheepop.jobs.run_record import RunRecord
from sheepop.report import Page, data_size, flops, number, shown


def add_machine(page: Page, record: RunRecord) -> None:
    """Adds machine, start, versions and fingerprints."""
    page.add_section("Machine")
    machine = dict(record.machine)
    versions = entry(machine, "versions")
    machine.pop("versions", None)
    facts = [(_label(key), _machine_value(key, value)) for key, value in machine.items()]
    facts.append(("Matrix speed, measured", flops(number(record.matrix_peak_flops))))
    if record.nominal_peak_flops is not None:
        facts.append(("Matrix speed, from the data sheet", flops(number(record.nominal_peak_flops))))
    if record.step_seconds is not None:
        facts.append(("Step time, measured at the start", f"{record.step_seconds:.4g} s"))
    page.add_facts(facts)
    _add_circumstances(page, record)
    page.add_heading("Versions")
    page.add_facts({"sheepop": record.sheepop_version, **versions})
    page.add_heading("Fingerprints")
    page.add_facts({"Corpus": record.corpus_fingerprint, "Tokenizer": record.tokenizer_fingerprint})


def _add_circumstances(page: Page, record: RunRecord) -> None:
    """When, with which seed and which revision of the user's own files the run was started, and went on."""
    if record.started is None:  # a record written before these were kept
        return
    page.add_heading("Start")
    git = record.git or {}
    dirty = git.get("dirty")
    compute = record.compute or {}
    page.add_facts(
        {
            "Started (UTC)": record.started[:19].replace("T", " "),
            "Seed": record.seed,
            "Commit of the working directory": git.get("commit"),
            "Its tracked files": None if dirty is None else "changed since" if dirty else "unchanged",
            **{_label(key): value for key, value in compute.items() if value is not None},
        }
    )
    if record.resumed:
        rows = [
            (text(session.get("time"))[:19].replace("T", " "), session.get("step"), entry(session, "git").get("commit"))
            for session in record.resumed
        ]
        page.add_table(["Resumed (UTC)", "From step", "Commit"], rows)


def _machine_value(key: str, value: Any) -> Any:
    if key in ("memory", "memory_available", "disk_free"):
        return data_size(number(value))
    if key == "accelerators" and isinstance(value, list | tuple):
        cards = [card for card in value if isinstance(card, Mapping)]
        return [f"{shown(card.get('name'))} ({data_size(number(card.get('memory')))})" for card in cards] or "none"
    if isinstance(value, Mapping):
        return [f"{name}: {shown(item)}" for name, item in value.items()]
    return value


def _label(key: str) -> str:
    words = key.replace("_", " ")
    return words[:1].upper() + words[1:]
