"""Quantises a model and measures the change in perplexity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sheepop.adapt.quantization import (
    QUANTIZED,
    dequantized,
    input_importance,
    quantizable,
    quantize,
    weight_bytes,
)
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.checkpoint import LoadedModel, load_model, save_model
from sheepop.checkpoint.identity import identities
from sheepop.checkpoint.memory_file import has_memory
from sheepop.checkpoint.model_kind import BASE, is_model, require_apart, require_free
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.evaluate.likelihood import Score, score_text
from sheepop.generate import GenerationConfig, Generator
from sheepop.model import Transformer

# Number and length of the texts that the model generates for the measurement.
_TEXTS, _TOKENS = 8, 256
_WINDOW = 512  # tokens of a calibration text that are read at a time


def quantize_model(
    model: str | Path,
    output: str | Path,
    *,
    to: str,
    text: str | None = None,
    calibration: str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Writes a model with its matrices in the format `to`, one of `QUANTIZED`; returns a summary.

    `text` is scored before and after. If it is None, the model generates texts, and their scores show how far the two
    models are apart. int4 keeps the weights more exact whose inputs are large on the text `calibration`, by default on
    texts that the model generates.
    Raises `CheckpointError` for a model that SheepOp quantised, and `UsageError` for an `output` in use. A model that
    was published quantised is dequantised first.
    """
    console = console or Console.silent()
    format = next((name for name in QUANTIZED if name == to), None)
    if format is None:
        raise UsageError(f"to = {to!r} is not known. Give one of {', '.join(QUANTIZED)}.")
    if calibration is not None and format != "int4":
        raise UsageError(f"calibration is for int4, not for {to}, which rounds every weight to the nearest number.")
    output = Path(output)
    require_apart(Path(model), output)
    require_free(output, overwrite, "a model", is_model)
    loaded = load_model(model)
    if has_memory(loaded.directory):
        console.warn("The memory of the training text is left out: it fits only the weights that it was made with.")
    bytes_before = weight_bytes(loaded.model.parameters())
    if any(isinstance(weight, StoredWeight) for weight in loaded.model.parameters()):
        if "imported" not in loaded.provenance or "quantized" in loaded.provenance:
            raise CheckpointError(f"{loaded.directory} is already quantised. Quantise the model that it was made from.")
        loaded = replace(loaded, model=dequantized(loaded.model))
    with console.progress("Quantising", total=4) as progress:
        own = _own_texts(loaded) if text is None or (to == "int4" and calibration is None) else []
        texts = own if text is None else [text]
        importance = None
        if to == "int4":
            samples = own if calibration is None else [calibration]
            importance = input_importance(loaded.model, _windows(loaded, samples))
        progress.advance()
        before = _perplexity(loaded.model, loaded, texts)
        progress.advance()
        smaller = quantize(loaded.model, format, importance)
        progress.advance()
        after = _perplexity(smaller, loaded, texts)
        progress.advance()
    source: dict[str, Any] = {"weights": to, "from": str(loaded.directory), "perplexity": [before, after]}
    source[BASE] = identities(loaded.directory)
    made = {**loaded.provenance, "quantized": source}
    save_model(output, smaller, loaded.tokenizer, made, generation=loaded.generation, replace=overwrite)
    return {
        "path": str(output),
        "weights": to,
        "parameters": sum(weight.numel() for weight in loaded.model.parameters()),
        "quantized_parameters": sum(weight.numel() for _, weight in quantizable(loaded.model)),
        "bytes_before": bytes_before,
        "bytes_after": weight_bytes(smaller.parameters()),
        "text": "given" if text is not None else "written by the model",
        "perplexity_before": before,
        "perplexity_after": after,
    }


def _own_texts(loaded: LoadedModel) -> list[str]:
    """Texts that the model generates at temperature 1."""
    generator = Generator(loaded.model, loaded.tokenizer, end_ids=loaded.end_ids)
    length = max(2, min(_TOKENS, loaded.config.max_seq_len // 2))
    config = GenerationConfig(max_new_tokens=length, min_new_tokens=length, temperature=1.0, top_p=1.0, seed=0)
    start = loaded.tokenizer.special_id("bos")
    if start is None:
        start = loaded.tokenizer.special_id("eos")
    prompt = [0 if start is None else start]
    return [completion.text for completion in generator.generate([prompt] * _TEXTS, config)]


def _windows(loaded: LoadedModel, texts: list[str]) -> list[torch.Tensor]:
    """The tokens of texts in windows, after the token that begins a text; raises `UsageError` if there are none."""
    start = loaded.tokenizer.special_id("bos")
    begin = [] if start is None else [start]
    length = min(_WINDOW, loaded.config.max_seq_len) - len(begin)
    windows = []
    for ids in map(loaded.tokenizer.encode, texts):
        windows += [torch.tensor(begin + ids[at : at + length]) for at in range(0, len(ids), length)]
    if not windows:
        raise UsageError("The text for calibration is empty. Give a text like those that the model will read.")
    return windows


def _perplexity(model: Transformer, loaded: LoadedModel, texts: list[str]) -> float:
    """The perplexity of all texts together."""
    scores: list[Score] = [score_text(model, loaded.tokenizer, text) for text in texts]
    logprobs = torch.tensor([logprob for score in scores for logprob in score.logprobs], dtype=torch.float64)
    return float(logprobs.mean().neg().exp())
