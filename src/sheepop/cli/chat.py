"""``sheepop chat``: a conversation in the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sheepop.cli.options import Device, Dtype, make_console, print_text
from sheepop.core.errors import SheepOpError, UsageError

if TYPE_CHECKING:
    from sheepop.jobs.chat import Conversation

_COMMANDS = {
    "/help": "these commands",
    "/system TEXT": "set the system prompt; without TEXT show it",
    "/again": "another answer to the last message",
    "/clear": "forget the conversation",
    "/save FILE": "write the conversation to a JSON file",
    "/load FILE": "take up a conversation from a file",
    "/quit": "leave; Ctrl-D does the same, and Ctrl-C stops an answer",
}


def chat(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|URL", help="A run, checkpoint or model directory; or a server.")
    ],
    system: Annotated[str | None, typer.Option(help="What the model is told first.", show_default="nothing")] = None,
    load: Annotated[Path | None, typer.Option(help="Take up a conversation that was saved.")] = None,
    name: Annotated[
        str | None, typer.Option("--model", help="Which model of a server.", show_default="its first")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The key for a server.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="The most tokens of an answer.", show_default="generation.max_new_tokens")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Above 1 is wilder, below 1 tamer, 0 is greedy.", show_default="generation.temperature"),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the likeliest tokens whose probabilities add up to P.", show_default="generation.top_p"
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same answers.", show_default="random")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Chat with a model in the terminal.

    A model without a chat template continues your text instead. Lines that begin with / are commands; /help lists them.

    Examples:

      sheepop chat runs/mine

      sheepop chat http://localhost:8000 --system "Answer in one sentence."
    """
    from sheepop.generate.config import requested

    config = requested(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    from sheepop.jobs.chat import Conversation, ModelSpeaker, ServerSpeaker, Speaker

    console = make_console(quiet=False)
    speaker: Speaker
    if model.startswith(("http://", "https://")):
        speaker = ServerSpeaker(model, model=name, api_key=api_key)
    else:
        speaker = ModelSpeaker(model, device=device or "auto", dtype=dtype)
    conversation = Conversation(speaker, config, system=system)
    try:
        if load is not None:
            conversation.load(load)
        if speaker.note:
            console.info(speaker.note)
        console.info("/help lists the commands; Ctrl-D ends the chat.")
        for line in _lines():
            try:
                if not _obey(conversation, line):
                    return
            except SheepOpError as error:
                console.warn(str(error))
    finally:
        speaker.close()


def _lines() -> Iterator[str]:
    """What the user types, with editing and history where the terminal has them."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # gives `input` editing and history
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            print_text("\n")
            return
        if line.strip():
            yield line


def _obey(conversation: Conversation, line: str) -> bool:
    """Does what a line says; whether the chat goes on."""
    command, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if not command.startswith("/"):
        _show(conversation.say(line))
    elif command in ("/quit", "/exit"):
        return False
    elif command == "/again":
        _show(conversation.regenerate())
    elif command == "/clear":
        conversation.clear()
    elif command == "/system":
        if rest:
            conversation.system = rest
        print_text(f"System prompt: {conversation.system or 'none'}\n")
    elif command in ("/save", "/load"):
        path = _path(command, rest)
        (conversation.save if command == "/save" else conversation.load)(path)
        print_text(f"{'Saved to' if command == '/save' else 'Loaded'} {path}.\n")
    elif command == "/help":
        width = max(map(len, _COMMANDS))
        print_text("".join(f"  {name:<{width}}  {meaning}\n" for name, meaning in _COMMANDS.items()))
    else:
        raise UsageError(f"There is no command {command}. The commands are: {', '.join(_COMMANDS)}.")
    return True


def _path(command: str, rest: str) -> Path:
    try:
        (path,) = shlex.split(rest)
    except ValueError:
        raise UsageError(f"{command} needs one file name, for example: {command} talk.json") from None
    return Path(path).expanduser()


def _show(pieces: Iterator[str]) -> None:
    """Prints an answer as it comes; Ctrl-C ends it, and what was said of it stays."""
    try:
        for piece in pieces:
            print_text(piece)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        print_text(" [stopped]")
    print_text("\n")
