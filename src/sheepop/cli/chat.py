"""``sheepop chat``: a conversation in the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sheepop.cli import generation_options as option
from sheepop.cli.generation_options import show_defaults
from sheepop.cli.options import (
    MODEL,
    Adapter,
    Device,
    Dtype,
    TemplateVariables,
    make_console,
    print_text,
    template_variables,
)
from sheepop.cli.terminal import at_terminal, for_each_line, print_styled
from sheepop.core.console import Console
from sheepop.core.errors import SheepOpError, UsageError
from sheepop.core.facts import counted

if TYPE_CHECKING:
    from sheepop.jobs.chat import Conversation, Speaker

_COMMANDS = {
    "/help": "list these commands",
    "/system [TEXT]": "set the system prompt, or show it; - removes it",
    "/again": "generate another answer to the last message",
    "/clear": "forget the conversation; the system prompt stays",
    "/save FILE": "write the conversation to a JSON file",
    "/load FILE": "load a conversation from a file",
    "/quit": "end the chat, as Ctrl-D does; Ctrl-C only stops an answer",
}


def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL|URL", help=f"{MODEL} Or the URL of a server.")],
    system: Annotated[str | None, typer.Option(help="The system prompt.", show_default="none")] = None,
    load: Annotated[Path | None, typer.Option(help="Continue a saved conversation.")] = None,
    name: Annotated[
        str | None, typer.Option("--model", help="The model of a server.", show_default="its first")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The API key for a server.")] = None,
    max_new_tokens: option.MaxNewTokens = None,
    temperature: option.Temperature = None,
    top_p: option.TopP = None,
    seed: option.Seed = None,
    cache_dtype: option.CacheDtype = None,
    activations: option.Activations = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="Name of the chat template, if the model has several.", show_default="default"),
    ] = None,
    chat_template_kwargs: TemplateVariables = None,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Chat with a model in the terminal.

    A model without a chat template continues your text instead. Lines that begin with / are commands; /help lists them.

    Examples:

      sheepop chat runs/mine

      sheepop chat Qwen/Qwen3-0.6B

      sheepop chat http://localhost:8000 --system "Answer in one sentence."

      sheepop chat models/smollm --adapter adapters/polite

      sheepop chat models/qwen --chat-template-kwargs '{"enable_thinking": false}'
    """
    from sheepop.generate.config import requested

    config = requested(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        cache_dtype=cache_dtype,
        activations=activations,
    )
    console, variables = make_console(quiet=False), template_variables(chat_template_kwargs)
    speaker = _speaker(
        model,
        console,
        name=name,
        api_key=api_key,
        adapters=adapter or [],
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        activations=activations,
        chat_template=chat_template,
        variables=variables,
    )
    from sheepop.jobs.chat import Conversation

    conversation = Conversation(speaker, config, system=system)
    try:
        if load is not None:
            conversation.load(load)
        console.info(f"Chatting with {speaker.name}. /help lists the commands, Ctrl-D ends the chat.")
        show_defaults(speaker.defaults, console)
        if speaker.note:
            console.info(speaker.note)

        def handle(line: str) -> bool:
            try:
                return _handle(conversation, line, console)
            except SheepOpError as error:
                console.warn(str(error))
                return True

        for_each_line(handle, words=[command.split()[0] for command in _COMMANDS])
    finally:
        speaker.close()


def _speaker(
    model: str,
    console: Console,
    *,
    name: str | None,
    api_key: str | None,
    adapters: list[Path],
    device: str | None,
    dtype: str | None,
    cache_dtype: str | None,
    activations: str | None,
    chat_template: str | None,
    variables: dict[str, Any] | None,
) -> Speaker:
    """The chat partner that `model` names. Refuses options of the other kind before anything is loaded."""
    from sheepop.checkpoint.model_source import resolve_model_directory

    if model.startswith(("http://", "https://")):
        if (device, dtype, cache_dtype, activations) != (None, None, None, None):
            raise UsageError("A server has its own --device, --dtype, --cache-dtype and --activations. Leave them out.")
        if adapters:
            raise UsageError("A server has its own adapters; choose one with --model NAME. Leave out --adapter.")
        if chat_template is not None:
            raise UsageError("A server chooses the chat template itself. Leave out --chat-template.")
        from sheepop.jobs.chat import ServerSpeaker

        return ServerSpeaker(model, model=name, api_key=api_key, chat_template_kwargs=variables)
    if name is not None:
        raise UsageError("--model names one of a server's models. Leave it out, or give the server's URL.")
    resolve_model_directory(model, console)
    if at_terminal():
        console.info(f"Loading {model}.")
    from sheepop.jobs.chat import ModelSpeaker

    return ModelSpeaker(
        model,
        device=device or "auto",
        dtype=dtype,
        adapters=adapters,
        chat_template=chat_template,
        chat_template_kwargs=variables,
    )


def _handle(conversation: Conversation, line: str, console: Console) -> bool:
    """Runs a command or sends a message; returns whether the chat continues."""
    command, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if not command.startswith("/"):
        _show(conversation.say(line), conversation.speaker, console)
    elif command in ("/quit", "/exit"):
        return False
    elif command == "/again":
        _show(conversation.regenerate(), conversation.speaker, console)
    elif command == "/clear":
        conversation.clear()
        console.info("The conversation is forgotten.")
    elif command == "/system":
        if rest:
            conversation.system = None if rest == "-" else rest
        console.info(f"System prompt: {conversation.system or 'none'}")
    elif command == "/save":
        path = _path(command, rest)
        conversation.save(path)
        console.info(f"Saved to {path}.")
    elif command == "/load":
        path = _path(command, rest)
        conversation.load(path)
        console.info(f"Loaded {path}: {counted(len(conversation.messages), 'message')}.")
    elif command == "/help":
        width = max(map(len, _COMMANDS))
        for name, meaning in _COMMANDS.items():
            console.info(f"  {name:<{width}}  {meaning}")
    else:
        raise UsageError(f"There is no command {command}. /help lists the commands.")
    return True


def _path(command: str, rest: str) -> Path:
    try:
        (path,) = shlex.split(rest)
    except ValueError:
        raise UsageError(f"{command} needs one file name, for example: {command} talk.json") from None
    return Path(path).expanduser()


def _show(pieces: Iterator[str], speaker: Speaker, console: Console) -> None:
    """Prints an answer as it arrives; Ctrl-C stops it, and its text so far stays in the conversation.

    Only a terminal shows reasoning.
    """
    from sheepop.jobs.chat import Reasoning

    begun = reasons = False
    try:
        for piece in pieces:
            if isinstance(piece, Reasoning) and not at_terminal():
                continue  # what reads the answer would take it for a part of that
            if not begun and at_terminal() and speaker.takes_turns:
                print_styled(f"{speaker.name}: ", "bold cyan")
            begun = True
            if isinstance(piece, Reasoning):
                print_styled(piece, "dim")
            else:
                print_text(f"\n\n{piece}" if reasons else piece)
            reasons = isinstance(piece, Reasoning)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        print_text(" [stopped]")
    except SheepOpError:
        print_text("\n" if begun else "")
        raise
    print_text("\n")
    if speaker.note:
        console.info(speaker.note)
