"""``sheepop import`` and ``sheepop export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sheepop.cli.options import MODEL, Dtype, Json, Quiet, make_console, print_json
from sheepop.core.errors import UsageError

ShardSize = Annotated[
    str | None, typer.Option(help="Split weights larger than this into several files.", show_default="5GB")
]
Public = Annotated[bool, typer.Option("--public", help="Make a new repository public instead of private.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the result of an earlier command.")]


def import_model(
    source: Annotated[
        Path, typer.Argument(help="A directory in Hugging Face format, or a GGUF file (any part of a split one).")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the model.")],
    dtype: Dtype = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Use this tokenizer instead of the one in SOURCE.", show_default="its own")
    ] = None,
    max_shard_size: ShardSize = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Import a model in the format of another program.

    Families: Llama, Mistral, Qwen, Gemma, Phi, OLMo, Granite, GLM, DeepSeek, GPT-2 and more (docs/exchange.md).

    Examples:

      sheepop import downloads/SmolLM2-135M --output models/smollm

      sheepop import downloads/tiny.gguf -o models/tiny --dtype float32
    """
    from sheepop.jobs.exchange import import_model

    result = import_model(
        source,
        output,
        dtype=dtype,
        tokenizer=tokenizer,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        console=make_console(quiet or as_json),
    )
    _show(result, quiet, as_json)


def export_model(
    model: Annotated[Path, typer.Argument(help=MODEL)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory (hf, peft) or file (gguf) for the export.")],
    format: Annotated[
        Literal["hf", "gguf", "peft"],
        typer.Option(
            help="hf for transformers and vLLM, gguf for llama.cpp and Ollama, peft for a LoRA adapter alone."
        ),
    ] = "hf",
    dtype: Dtype = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Makes a GGUF file smaller: q8_0, q6_k, q5_k_m, q5_0, q4_k_m or q4_0 (from 8.5 to 4.5 bits a weight).",
            show_default="none",
        ),
    ] = None,
    no_tokenizer: Annotated[bool, typer.Option("--no-tokenizer", help="Leave the tokenizer out (gguf).")] = False,
    max_shard_size: ShardSize = None,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Refuse a model without a LoRA adapter to merge into its weights (hf, gguf)."),
    ] = False,
    push: Annotated[
        str | None, typer.Option(help="Also upload the export to this repository of the hub, owner/name.")
    ] = None,
    public: Public = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Export a model for other programs. The export is read back and compared with the model.

    Examples:

      sheepop export runs/llama --format hf --output exports/llama

      sheepop export runs/llama --format gguf --output exports/llama.gguf --quantize q4_k_m

      sheepop export runs/chat --format peft --output exports/chat-adapter

      sheepop export runs/chat --merge --output exports/chat --push me/chat
    """
    from sheepop.checkpoint.model_source import resolve_model_directory

    if public and push is None:
        raise UsageError("--public is for --push.")
    resolve_model_directory(model, make_console(quiet or as_json))  # refuses a mistyped path before torch is loaded
    from sheepop.jobs.exchange import export_model

    result = export_model(
        model,
        output,
        format=format,
        dtype=dtype,
        quantize=quantize,
        max_shard_size=max_shard_size,
        with_tokenizer=not no_tokenizer,
        merge=merge,
        overwrite=overwrite,
        console=make_console(quiet or as_json),
    )
    if push is not None:
        from sheepop.jobs.push import push_model

        result["pushed"] = push_model(output, push, public=public, console=make_console(quiet or as_json))
    _show(result, quiet, as_json)


def push(
    source: Annotated[Path, typer.Argument(help="A directory or GGUF file that sheepop export wrote, or a model.")],
    repository: Annotated[str, typer.Argument(help="The repository on the hub, owner/name.")],
    public: Public = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Upload an export to the Hugging Face hub, with the access token in HF_TOKEN or of `hf auth login`.

    A new repository is private unless --public is given. Files with secrets, links, and files that no model needs are
    refused.

    Example:

      sheepop push exports/llama me/llama
    """
    from sheepop.jobs.push import push_model

    result = push_model(source, repository, public=public, console=make_console(quiet or as_json))
    if as_json:
        print_json(result)
    elif not quiet:
        _say_pushed(result)


def _say_pushed(result: dict[str, Any]) -> None:
    kind = "a private" if result["private"] else "a public"
    typer.echo(
        f"Uploaded {result['files']} files, {result['bytes'] / 1e6:,.1f} MB, to {kind} repository: {result['url']}"
    )


def _show(result: dict[str, Any], quiet: bool, as_json: bool) -> None:
    if as_json:
        print_json(result)
    elif not quiet:
        typer.echo(
            f"Wrote {result['path']}: {result['family']}, {result['parameters']:,} parameters, "
            f"{result['bytes'] / 1e6:,.1f} MB in {', '.join(result['dtypes'])}."
        )
        if "pushed" in result:
            _say_pushed(result["pushed"])
