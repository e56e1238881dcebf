"""The forward pass of every family of models that can be imported, beside that of transformers.

A model of each family with random weights is saved by transformers, imported, and run by both on the same tokens in
the same data type, in turn, in one process. Logits must agree. Shown are median times, and the median of how many times
as long as one of our passes those of transformers before and after it took, on average: what slows the machine down
for a while changes that less than the times. Above 1 SheepOp is faster. `+-` is the standard error of that median; the
processor's own time is compared as well.

python bench/forward_speed.py --quick
python bench/forward_speed.py --json bench/results/forward_speed.json
python bench/forward_speed.py --device cuda --size large --precision bf16
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from record import add_json_option, write_record
from sheepop.checkpoint import load_model
from sheepop.core.device import resolve_device
from sheepop.core.speed import synchronize
from sheepop.jobs.exchange import import_model
from sheepop.tokenizer import CharTokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of the largest logit.
TOLERANCES = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Size:
    """Width, layers, heads, vocabulary, longest sequence, and the rows and tokens of a forward pass."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    context: int
    rows: int
    length: int
    experts: int = 8

    @property
    def window(self) -> int:
        """Keys that a layer with a sliding window sees."""
        return self.context // 4

    @property
    def shared(self) -> dict[str, Any]:
        """The keys that most families have in common."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.width * 11 // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "max_position_embeddings": self.context,
        }


SIZES = {
    "quick": Size(64, 2, 4, 256, context=256, rows=2, length=256, experts=4),
    "small": Size(512, 6, 8, 8192, context=512, rows=4, length=256),
    "large": Size(2048, 8, 16, 32000, context=2048, rows=8, length=1024),
}


def _gpt2(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary,
        "n_embd": size.width,
        "n_layer": size.layers,
        "n_head": size.heads,
        "n_positions": size.context,
    }


def _alternating(size: Size) -> list[str]:
    return [SLIDING if layer % 2 == 0 else FULL for layer in range(size.layers)]


@dataclass(frozen=True)
class Family:
    """How transformers builds a model of a family: its classes, and the keys of its configuration."""

    model: str
    config: str
    keys: Callable[[Size], dict[str, Any]]


def _llama_like(name: str, **changes: Any) -> Family:
    return Family(f"{name}ForCausalLM", f"{name}Config", lambda size: {**size.shared, **changes})


FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", _gpt2),
    "llama": _llama_like("Llama"),
    "mistral": Family(
        "MistralForCausalLM", "MistralConfig", lambda size: {**size.shared, "sliding_window": size.window}
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        lambda size: {**size.shared, "num_local_experts": size.experts, "num_experts_per_tok": 2},
    ),
    "qwen2": _llama_like("Qwen2"),
    "qwen3": _llama_like("Qwen3", head_dim=64),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        lambda size: {
            **size.shared,
            "num_experts": 4 * size.experts,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": size.width // 2,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        lambda size: {**size.shared, "head_dim": 64, "sliding_window": size.window},
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        lambda size: {
            **size.shared,
            "head_dim": 64,
            "sliding_window": size.window,
            "layer_types": _alternating(size),
        },
    ),
    "phi3": _llama_like("Phi3", pad_token_id=None),
    "olmo2": _llama_like("Olmo2"),
    "pythia": Family(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        lambda size: {key: value for key, value in size.shared.items() if key != "num_key_value_heads"},
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        lambda size: {
            "vocab_size": size.vocabulary,
            "hidden_size": size.width,
            "n_layer": size.layers,
            "n_head": size.heads,
        },
    ),
    "smollm": _llama_like("Llama", tie_word_embeddings=True),
}


@contextmanager
def contestants(
    family: Family, size: Size, dtype: torch.dtype, device: str
) -> Iterator[tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]]:
    """The forward pass of transformers and ours, token ids (B, T) to logits (B, T, V), with the same weights."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    torch.manual_seed(0)
    theirs = getattr(transformers, family.model)(
        getattr(transformers, family.config)(**{**ids, **family.keys(size)})
    ).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(Path(folder) / "theirs")
        CharTokenizer().save(Path(folder) / "theirs")
        import_model(Path(folder) / "theirs", Path(folder) / "ours")
        ours = load_model(Path(folder) / "ours", device).model.to(dtype)
        # `theirs.to(dtype)` would round the angles of the positions as well.
        theirs = type(theirs).from_pretrained(Path(folder) / "theirs", dtype=dtype).to(device).eval()
    yield lambda tokens: theirs(input_ids=tokens, use_cache=False).logits, ours


def measure(name: str, size: Size, precision: str, device: str, rounds: int) -> dict[str, Any]:
    """Median seconds and ratios of both, wall and processor time, taken in turn."""
    tokens = torch.randint(4, size.vocabulary, (size.rows, size.length), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(device)

    def timed(run: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, float]:
        synchronize(device)
        wall, processor = time.perf_counter(), time.process_time()
        run(tokens)
        synchronize(device)
        return time.perf_counter() - wall, time.process_time() - processor

    with (
        contestants(FAMILIES[name], size, DTYPES[precision], device) as (theirs, ours),
        torch.inference_mode(),
    ):
        expected, found = theirs(tokens).float(), ours(tokens).float()
        distance = ((found - expected).abs().max() / expected.abs().max()).item()
        del expected, found
        for _ in range(2):
            timed(theirs)
            timed(ours)
        others, own = [timed(theirs)], []
        for _ in range(rounds):
            own.append(timed(ours))
            others.append(timed(theirs))
    (wall, processor), (seconds, processor_seconds) = (
        [statistics.median(column) for column in zip(*found, strict=True)] for found in (others, own)
    )
    turns = list(zip(others[:-1], own, others[1:], strict=True))
    ratios = [[(before[clock] + after[clock]) / 2 / found[clock] for before, found, after in turns] for clock in (0, 1)]
    return {
        "family": name,
        "precision": precision,
        "rows": size.rows,
        "length": size.length,
        "distance": distance,
        "equal": distance < TOLERANCES[precision],
        "seconds": {"transformers": wall, "sheepop": seconds},
        "processor_seconds": {"transformers": processor, "sheepop": processor_seconds},
        "ratio": statistics.median(ratios[0]),
        "processor_ratio": statistics.median(ratios[1]),
        "standard_error": standard_error(ratios[0]),
    }


def standard_error(values: list[float]) -> float:
    """Of their median, for values that are spread normally but for some strays: by the median absolute deviation."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return (math.pi / 2 / len(values)) ** 0.5 * deviation


def main() -> int:
    """Measures every family, prints the table, writes the JSON that was asked for; 1 when logits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--quick", action="store_true", help="the smallest size, to see that it runs")
    parser.add_argument("--rows", type=int, help="B instead of the size's own")
    parser.add_argument("--length", type=int, help="T instead of the size's own")
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="of weights and arithmetic")
    parser.add_argument("--rounds", type=int, default=15, help="timed passes of each")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    add_json_option(parser)
    options = parser.parse_args()
    device = resolve_device(options.device)
    name = "quick" if options.quick else options.size
    changes = {key: getattr(options, key) for key in ("rows", "length") if getattr(options, key) is not None}
    size = Size(**{**vars(SIZES[name]), **changes})
    threads = torch.get_num_threads()
    print(f"{name}, {size.rows} x {size.length} tokens, {options.precision}, {device}, {threads} threads")
    columns = f"{'family':<10} {'transformers':>13} {'SheepOp':>10} {'ratio':>6} {'+-':>6} {'processor':>10}"
    print(f"{columns} {'distance':>9}")
    results = []
    for family in options.families:
        row = measure(family, size, options.precision, device, options.rounds)
        results.append(row)
        theirs, ours = (1e3 * row["seconds"][who] for who in ("transformers", "sheepop"))
        differs = "" if row["equal"] else "  logits differ"
        print(
            f"{family:<10} {theirs:>10,.1f} ms {ours:>7,.1f} ms {row['ratio']:>6.3f} {row['standard_error']:>6.3f} "
            f"{row['processor_ratio']:>10.3f} {row['distance']:>9.1e}{differs}",
            flush=True,
        )
    import transformers

    report = {"device": device, "threads": threads, "transformers": transformers.__version__}
    write_record(options.json, {**report, "size": {"name": name, **vars(size)}, "families": results})
    return 0 if all(row["equal"] for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
