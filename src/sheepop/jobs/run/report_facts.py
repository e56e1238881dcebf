"""The sections of a run's report about how it was made: settings requested, model, data, layout, times, machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sheepop.checkpoint import RunDirectory
from sheepop.core.config import value_text
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.record import LAYOUT, RunRecord, dump_requested, entry, text
from sheepop.model.accounting.cost import num_parameters
from sheepop.report import Page, data_size, duration, flops, number, shown, stage_times_chart


def add_model(page: Page, config: SheepOpConfig) -> None:
    """Adds the sizes of the model and the main settings of its training."""
    page.add_section("Model")
    model = config.model
    page.add_facts(
        {
            "Parameters": trained_parameters(config),
            "Layers": model.num_layers,
            "Width (d_model)": model.d_model,
            "Heads": model.num_heads,
            "Key-value heads": model.num_kv_heads,
            "Head width": model.head_dim,
            "Feed-forward width": model.d_ff,
            "Vocabulary": model.vocab_size,
            "Context (tokens)": model.max_seq_len,
            "Positions": model.position_encoding,
            "Normalisation": model.norm,
            "Activation": model.activation,
            "Dropout": model.dropout,
            "Tied embeddings": model.tie_weights,
            "Post-training": config.tuning.method,
            "Optimizer": config.training.optimizer,
            "Precision": config.training.precision,
            "Sequences per step": config.training.global_batch_size,
            "Seed": config.seed,
        }
    )


def trained_parameters(config: SheepOpConfig) -> int | None:
    """The number of trained parameters, tied ones once; None while the vocabulary is unknown."""
    return None if config.model.vocab_size is None else num_parameters(config.model)


def add_data(page: Page, manifest: Mapping[str, Any]) -> None:
    """Adds what the manifest says of examples or a corpus."""
    page.add_section("Data")
    (_add_examples if "examples" in manifest else _add_corpus)(page, manifest)


def _add_examples(page: Page, manifest: Mapping[str, Any]) -> None:
    counts, tokens = entry(manifest, "examples"), entry(manifest, "tokens")
    page.add_facts(
        {
            "Inputs": list(entry(manifest, "inputs")),
            "Examples read": counts.get("read"),
            "To train on": counts.get("train"),
            "Held out": counts.get("validation"),
            "Not to be learnt, left out": counts.get("bad"),
            "First of these": manifest.get("problems") or None,
            **{f"{how}, conversations": count for how, count in entry(manifest, "changed").items()},
            "Too long, left out": counts.get("left_out"),
            "Too long, cut": counts.get("cut"),
            "Conversations among them": manifest.get("conversations"),
            "Tokens to train on": tokens.get("train"),
            "Tokens held out": tokens.get("validation"),
        }
    )


def _add_corpus(page: Page, manifest: Mapping[str, Any]) -> None:
    files, documents = entry(manifest, "files"), entry(manifest, "documents")
    page.add_facts(
        {
            "Inputs": manifest.get("inputs"),
            "Files found": files.get("found"),
            "Files read": files.get("read"),
            "Documents found": documents.get("in"),
            "Documents kept": documents.get("kept"),
            "Empty documents left out": documents.get("empty"),
            "Text": data_size(number(documents.get("bytes"))),
        }
    )
    removed = [(stage.replace("_", " "), count) for stage, count in entry(documents, "removed").items() if count]
    if removed:
        page.add_table(["Stage", "Documents removed"], removed, caption="Each one is listed in removed.jsonl.zst.")
    splits = entry(manifest, "tokens", "splits")
    names = {"train": "Training", "validation": "Held out"}
    columns = ("documents", "tokens", "bytes", "unknown")
    page.add_table(
        ["Split", "Documents", "Tokens", "Bytes", "Unknown tokens"],
        [(names.get(name, name), *(entry(splits, name).get(key) for key in columns)) for name in splits],
    )
    words = entry(manifest, "split").get("words")
    if words:
        page.add_text(text(words))
    skipped = [
        (kind, reason.replace("_", " "), count)
        for kind, key in (("files", "skipped"), ("folders", "folders_skipped"))
        for reason, count in entry(files, key).items()
    ]
    if skipped:
        page.add_table(["Skipped", "Reason", "Number"], skipped, caption="Each one is listed in quarantine.jsonl.")


def add_layout(page: Page, run: RunDirectory, record: RunRecord) -> None:
    """Adds words and picture of the layout at the last start of a run, if it had several ranks."""
    if record.layout is None:
        return
    page.add_section("Layout")
    page.add_text(record.layout)
    picture = run.plots / LAYOUT
    if picture.is_file():
        page.add_picture(picture.read_bytes(), "What each rank holds, and which ranks communicate")


def add_stages(page: Page, record: RunRecord) -> None:
    """Adds the time that each stage took."""
    seconds = record.stage_seconds
    if not seconds:
        return
    page.add_section("Time")
    sessions = f" over {1 + len(record.resumed):,} sessions" if record.resumed else ""
    page.add_chart(stage_times_chart(seconds), f"Stages, {duration(sum(seconds.values()))} in all{sessions}")


def add_request(page: Page, record: RunRecord) -> None:
    """Adds the command, the settings that were given, and those that the recipe chose."""
    page.add_section("What was asked for")
    if record.command is not None:
        page.add_source(record.command, "The command")
    page.add_text("The settings that were given and differ from the defaults, before anything was derived or measured.")
    page.add_source(dump_requested(record), "Asked for")
    if record.chosen:
        page.add_text("What was left open, as chosen for the text, machine and budget. A key that is given wins.")
        page.add_source("\n".join(f"{key}: {value_text(value)}" for key, value in record.chosen.items()), "Chosen")


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
    """Adds when, with which seed and on which commit of the working directory the run was started and resumed."""
    if record.started is None:  # an older record
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
