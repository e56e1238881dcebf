"""One contestant of `generate_speed.py` in a process of its own: it continues prompts of token ids.

Reads one JSON request a line, {"prompts": [[...]], "counts": [...], "sampled": false}, and answers with the seconds,
the processor seconds of all its threads and the tokens. Sampled texts have SheepOp's default settings.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Prompts = Sequence[Sequence[int]]
Write = Callable[[Prompts, Sequence[int], bool], list[list[int]]]
HEAT, TOP_P = 0.8, 0.95
MOST = 64  # texts that SheepOp writes at a time


class SheepOp:
    """The engine, with exact or rounded inputs of products; int8 and int4 weights are quantised here."""

    def __init__(self, files: Path, precision: str, threads: int, device: str, activations: Any) -> None:
        import torch

        from sheepop.adapt.quantization import quantize
        from sheepop.checkpoint import load_model
        from sheepop.generate import Generator
        from sheepop.jobs.model_bench import read_bytes

        torch.set_num_threads(threads)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(precision)
        loaded = load_model(files / "sheepop", device, dtype)
        model = loaded.model if dtype is not None else quantize(loaded.model, "int8" if precision == "int8" else "int4")
        self.read_bytes = [read_bytes(model, texts) for texts in range(1, MOST + 1)]
        self._activations = activations
        self._generator = Generator(model, loaded.tokenizer, max_batch_size=MOST)

    def __call__(self, prompts: Prompts, counts: Sequence[int], sampled: bool) -> list[list[int]]:
        """Writes as many tokens as are asked for after each prompt."""
        from sheepop.generate import GenerationConfig

        kind: dict[str, Any] = {"temperature": HEAT, "top_p": TOP_P} if sampled else {"temperature": 0.0}
        kind["activations"] = self._activations
        configs = [GenerationConfig(max_new_tokens=count, min_new_tokens=count, **kind) for count in counts]
        return [completion.token_ids for completion in self._generator.generate(prompts, configs)]


def transformers(files: Path, precision: str, threads: int, device: str) -> Write:
    """`generate` with its cache; prompts of different lengths are padded on the left, as its users do."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = AutoModelForCausalLM.from_pretrained(files / "transformers", dtype=dtype).to(device).eval()

    @torch.inference_mode()
    def write(prompts: Prompts, counts: Sequence[int], sampled: bool) -> list[list[int]]:
        longest, most = max(map(len, prompts)), max(counts)
        ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        out = model.generate(
            torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=most,
            min_new_tokens=most,
            pad_token_id=0,
            **(
                {"do_sample": True, "temperature": HEAT, "top_p": TOP_P, "top_k": 0}
                if sampled
                else {"do_sample": False}
            ),
        )
        return [row[longest : longest + count].tolist() for row, count in zip(out, counts, strict=True)]

    return write


def ctranslate2(files: Path, precision: str, threads: int, _: str) -> Write:
    """Its generator of decoder-only models."""
    import ctranslate2 as library

    kind = {"fp32": "float32", "int8": "int8", "bf16": "bfloat16"}[precision]
    model = library.Generator(str(files / "ctranslate2"), compute_type=kind, intra_threads=threads)
    names = json.loads((files / "names.json").read_text())

    def write(prompts: Prompts, counts: Sequence[int], sampled: bool) -> list[list[int]]:
        most = max(counts)
        kind = {"sampling_topk": 0, "sampling_topp": TOP_P, "sampling_temperature": HEAT}
        results = model.generate_batch(
            [[names[token] for token in prompt] for prompt in prompts],
            max_length=most,
            min_length=most,
            beam_size=1,
            **(kind if sampled else {"sampling_topk": 1}),
            include_prompt_in_result=False,
        )
        return [found.sequences_ids[0][:count] for found, count in zip(results, counts, strict=True)]

    return write


def llama_cpp(files: Path, precision: str, threads: int, _: str) -> Write:
    """Its library called directly: several sequences a pass, logits where a token is chosen."""
    import llama_cpp as library

    silent = library.llama_log_callback(lambda *_: None)
    library.llama_log_set(silent, None)
    library.llama_backend_init()
    file = str(files / f"{GGUF[precision]}.gguf")
    model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
    vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    sampler = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
    for part in (
        library.llama_sampler_init_top_p(TOP_P, 1),
        library.llama_sampler_init_temp(HEAT),
        library.llama_sampler_init_dist(1),
    ):
        library.llama_sampler_chain_add(sampler, part)

    def write(prompts: Prompts, counts: Sequence[int], sampled: bool, _: object = silent) -> list[list[int]]:
        settings = library.llama_context_default_params()
        settings.n_ctx = sum(map(len, prompts)) + sum(counts) + 256 * len(prompts)
        settings.n_batch = settings.n_ubatch = 512
        settings.n_seq_max, settings.n_threads, settings.n_threads_batch = len(prompts), threads, threads
        settings.kv_unified = True
        context = library.llama_init_from_model(model, settings)
        batch = library.llama_batch_init(512, 0, 1)
        written: list[list[int]] = [[] for _ in prompts]

        def read(entries: list[tuple[int, int, int, bool]]) -> None:
            batch.n_tokens = len(entries)
            for i, (token, place, text, predicts) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, place, 1, text
                batch.logits[i] = predicts
            assert library.llama_decode(context, batch) == 0
            for i, (_, _, text, predicts) in enumerate(entries):
                if predicts and sampled:
                    written[text].append(library.llama_sampler_sample(sampler, context, i))
                elif predicts:
                    row = np.ctypeslib.as_array(library.llama_get_logits_ith(context, i), shape=(vocabulary,))
                    written[text].append(int(row.argmax()))

        entries = [
            (token, place, text, place == len(prompt) - 1)
            for text, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        for begin in range(0, len(entries), 512):
            read(entries[begin : begin + 512])
        while open_ones := [text for text, count in enumerate(counts) if len(written[text]) < count]:
            read([(written[t][-1], len(prompts[t]) + len(written[t]) - 1, t, True) for t in open_ones])
        library.llama_batch_free(batch)
        library.llama_free(context)
        return written

    return write


def openvino_genai(files: Path, precision: str, threads: int, _: str) -> Write:
    """Its pipeline, which reads GGUF files of some architectures itself."""
    import openvino
    import openvino_genai as library

    kind = {"fp32": openvino.Type.f32, "bf16": openvino.Type.bf16}.get(precision, openvino.Type.f32)
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": kind}
    pipeline = library.LLMPipeline(str(files / f"{GGUF[precision]}.gguf"), "CPU", settings)

    def write(prompts: Prompts, counts: Sequence[int], sampled: bool) -> list[list[int]]:
        config = library.GenerationConfig(max_new_tokens=max(counts), min_new_tokens=max(counts), ignore_eos=True)
        if sampled:
            config.do_sample, config.temperature, config.top_p = True, HEAT, TOP_P
        ids = np.array(prompts, dtype=np.int64)
        inputs = library.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return [list(found) for found in pipeline.generate(inputs, config).tokens]

    return write


GGUF = {"fp32": "f32", "bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
CONTESTANTS = {
    "SheepOp": SheepOp,
    "transformers": transformers,
    "ctranslate2": ctranslate2,
    "llama.cpp": llama_cpp,
    "openvino-genai": openvino_genai,
}
PRECISIONS = {
    "SheepOp": ("fp32", "bf16", "int8", "int4"),
    "transformers": ("fp32", "bf16"),
    "ctranslate2": ("fp32", "int8"),
    "llama.cpp": ("fp32", "bf16", "int8", "int4"),
    "openvino-genai": ("int8", "int4"),  # it refuses GGUF files in float32 and bfloat16
}


def main() -> None:
    """Answers requests until there are no more."""
    name, files, precision, threads, device = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
    # What a library prints belongs on standard error; the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    write = CONTESTANTS[name](files, precision, threads, device, *sys.argv[6:])
    answers.write(json.dumps({"read_bytes": getattr(write, "read_bytes", None)}) + "\n")
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        begin, used = time.perf_counter(), time.process_time()
        tokens = write(request["prompts"], request["counts"], request["sampled"])
        taken = {"seconds": time.perf_counter() - begin, "processor": time.process_time() - used}
        answers.write(json.dumps({**taken, "tokens": tokens}) + "\n")


if __name__ == "__main__":
    main()
