"""``sheepop data``: build, look into and download corpora."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sheepop.cli.options import ConfigFile, Group, Json, Quiet, make_console, print_json
from sheepop.core.facts import counted, visible, visible_line

app = typer.Typer(cls=Group, help="Build a training corpus from files, and inspect it.", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A corpus directory, or a run that has one.")]


@app.command("build")
def build(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT... [KEY=VALUE]...",
            help="Files, folders, git+PATH@REVISION, or a database address with --query; and settings.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The corpus directory to write.")],
    config: ConfigFile = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option("--engine", help="Run on this machine or on a Ray cluster.")
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=0, help="Worker processes; 0 uses only this process.", show_default="one per core"
        ),
    ] = None,
    query: Annotated[
        str | None, typer.Option("--query", help="The query that reads the database: a SELECT with ORDER BY.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the corpus at --output.")] = False,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", metavar="OLD", help="Say which documents of the corpus OLD changed or are lost."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Build a corpus directory: clean documents, tokenizer, token shards, manifest and report.

    The kind of a file is recognised by its content: text, code, PDF, images, HTML, office files, notebooks, tables,
    databases, archives. Unreadable files are listed in quarantine.jsonl, removed documents in removed.jsonl.zst. To
    resume an interrupted build, run the same command again.

    Example:  sheepop data build notes/ book.pdf --output corpora/mine tokenizer.vocab_size=2048

    Example:  sheepop data build postgresql://me@host/db --query "SELECT body FROM posts ORDER BY id" -o corpora/posts
    """
    from sheepop.core.machine import usable_cores
    from sheepop.jobs.data import build

    has_workers = workers is not None or any(text.startswith("data.num_workers=") for text in inputs)
    if not has_workers and engine == "local":
        workers = max(1, int(usable_cores()))
    result = build(
        inputs,
        output,
        config,
        make_console(quiet),
        engine=engine,
        workers=workers,
        overwrite=overwrite,
        query=query,
    )
    if compare is not None:
        from sheepop.jobs.data import compare as compare_corpora

        result["difference"] = compare_corpora(compare, output)
    if as_json:
        print_json(result)
    elif not quiet:
        typer.echo(
            f"{result['path']}: {_size(result, 'train')} for training, {_size(result, 'validation')} held out. "
            f"{_left_out(result)}"
        )
        if compare is not None:
            _print_difference(result["difference"], compare)


def _print_difference(difference: dict[str, Any], old: Path) -> None:
    counts = ", ".join(f"{count:,} {kind}" for kind, count in difference["counts"].items())
    typer.echo(f"Documents compared with {old}: {counts}.")
    for kind, examples in difference["examples"].items():
        for example in examples:
            typer.echo(visible_line(f"  {kind}: {example}"))


def _left_out(result: dict[str, Any]) -> str:
    """What a build left out and removed, and where the reasons are."""
    counts = (("file", "skipped_files", "left out"), ("unreadable part", "refused_parts", "left out"),
              ("document", "removed_documents", "removed"))  # fmt: skip
    words = [f"{counted(result[key], what)} {verb}" for what, key, verb in counts if result[key]]
    return f"{', '.join(words)}; report.html shows why." if words else "Nothing left out."


@app.command("stats")
def stats(directory: Directory, as_json: Json = False) -> None:
    """Show the contents of a corpus, and what was left out or removed.

    Example:  sheepop data stats corpora/mine
    """
    from sheepop.jobs.data import stats

    report = stats(directory)
    if as_json:
        print_json(report)
    else:
        _print_stats(report)


@app.command("show")
def show(
    directory: Directory,
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="A:B", help="Token positions in a split.")] = None,
    step: Annotated[int | None, typer.Option("--step", help="A training step of a run, from 1.")] = None,
    file: Annotated[
        str | None, typer.Option("--file", metavar="NAME", help="A file: its name in the corpus, or its path.")
    ] = None,
    split: Annotated[
        Literal["train", "validation"] | None,
        typer.Option("--split", help="The split for --tokens.", show_default="train"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the documents, files and pages that tokens came from, or what became of a file.

    With the path of a file, it is read again, and what each cleaning stage does to it is shown.

    Example:  sheepop data show corpora/mine --tokens 1000:1100

    Example:  sheepop data show runs/quickstart --step 12

    Example:  sheepop data show corpora/mine --file notes/plan.docx
    """
    from sheepop.core.errors import UsageError
    from sheepop.jobs.data import show_tokens

    if sum(given is not None for given in (tokens, step, file)) != 1:
        raise UsageError("Give one of --tokens A:B, --step N of a run, or --file NAME.")
    if step is not None and split is not None:
        raise UsageError("--split is only for --tokens: a step takes its rows from the training split.")
    if file is not None:
        _show_file(directory, file, split is not None, as_json)
        return
    if tokens is not None:
        records = [asdict(origin) for origin in show_tokens(directory, tokens, split or "train")]
    else:
        from sheepop.jobs.data import show_step

        rows = show_step(directory, step or 0, make_console(quiet=False))
        records = [{"row": row, **asdict(origin)} for row, origin in rows]
    if as_json:
        print_json(records)
    else:
        for record in records:
            _print_origin(record)


def _show_file(directory: Path, name: str, has_split: bool, as_json: bool) -> None:
    from sheepop.core.errors import UsageError
    from sheepop.jobs.data import show_file

    if has_split:
        raise UsageError("--split is only for --tokens: --file looks in both splits.")
    records = show_file(directory, name)
    if as_json:
        print_json(records)
        return
    for record in records:
        place = f", {record['place']}" if record["place"] else ""
        typer.echo(visible_line(f"{record['file']}{place}: {record['what']} ({record['detail']})"))
        for line in record.get("text", "").splitlines():
            typer.echo(visible(f"    {line}"))


@app.command("download")
def download(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name listed above, or hub:OWNER/DATASET[:SPLIT][:COLUMN].")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The parent directory of the dataset's folder.")
    ] = Path("data"),
    limit: Annotated[
        str | None, typer.Option("--limit", help="Stop after downloading about this much, for example 100MB.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Download a dataset from the Hugging Face hub, ready for 'sheepop data build'.

    Names: wikitext-2, wikitext-103, tinyshakespeare, tinystories, openwebtext, fineweb-edu, wikipedia, amazon-reviews,
    bookcorpus. To resume an interrupted download, run the same command again.

    Example:  sheepop data download tinystories --output data --limit 50MB
    """
    from sheepop.jobs.data import download

    result = download(name, output, limit=limit, console=make_console(quiet))
    if as_json:
        print_json(result)
    elif not quiet:
        typer.echo(result["path"])
        typer.echo(f"Next: {result['next']}")


def _size(result: dict[str, Any], split: str) -> str:
    documents, tokens = result[f"{split}_documents"], result[f"{split}_tokens"]
    return f"{counted(documents, 'document')} and {counted(tokens, 'token')}"


def _print_stats(report: dict[str, Any]) -> None:
    files, documents = report["files"], report["documents"]
    typer.echo(f"{report['path']}")
    typer.echo(f"  files      {files['found']:,} found, {files['read']:,} read")
    for reason, count in files["skipped"].items():
        typer.echo(f"             {count:,} left out: {reason}")
    for reason, count in files["refused_parts"].items():
        typer.echo(f"             {counted(count, 'part')} of files left out: {reason}")
    typer.echo(f"  documents  {documents['in']:,} found, {documents['empty']:,} empty, {documents['kept']:,} kept")
    for stage in report["stages"]:
        for reason, count in stage["removed"].items():
            typer.echo(f"             {count:,} removed by {stage['stage']}: {reason}")
        if stage["changed_documents"]:
            typer.echo(f"             {stage['changed_documents']:,} changed by {stage['stage']}")
    for name, split in report["tokens"].items():
        typer.echo(
            f"  {name:10} {split['documents']:,} documents, {split['bytes']:,} bytes, {split['tokens']:,} tokens"
        )
    largest = sorted(report["contents"]["language_bytes"].items(), key=lambda item: -item[1])[:8]
    typer.echo("  languages  " + ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in largest))
    if not report["reproducible"]:
        typer.echo("  not reproducible: a limit was hit at " + "; ".join(report["limits"]))


def _print_origin(record: dict[str, Any]) -> None:
    row = f"row {record['row']}, " if "row" in record else ""
    place = "".join(f", {part}" for part in (record["place"], ", ".join(record["pages"])) if part)
    language = f", {record['language']}" if record["language"] else ""
    head = (
        f"{row}tokens {record['start']:,}:{record['stop']:,}  document {record['document']:,}  "
        f"{record['file']}{place}  ({record['kind']}{language})"
    )
    typer.echo(visible_line(head))
    first, *_ = record["text"].strip().splitlines() or [""]
    typer.echo(visible(f"    {first[:100]}{'…' if len(record['text'].strip()) > len(first[:100]) else ''}"))
