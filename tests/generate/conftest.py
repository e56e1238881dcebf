"""Networks with weights that make them write varied or exactly predictable text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sheepop.generate.config import CacheDtype
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.attention.choose import prepare_attention
from sheepop.model.attention.kernel import PLAIN, Attending, AttentionKind, Score
from sheepop.model.cache import AttendLatents, LatentCache, Recurrence
from sheepop.tokenizer import CharTokenizer, Tokenizer

TINY = {
    "vocab_size": 128,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 64,
    "dropout": 0.1,
    "tie_weights": False,
}

# Heads of two widths, two layers with the keys of others, and vectors of layers.
SHARED: dict[str, Any] = {
    "num_layers": 5, "head_dim": 8, "num_kv_heads": 1, "sliding_window": 5, "sliding_layers": [0, 2, 3],
    "sliding_head_dim": 4, "sliding_num_kv_heads": 2, "shared_kv_layers": 2, "keys_as_values": [1], "value_norm": True,
    "layer_inputs": {"width": 16}, "layer_factor": True,
}  # fmt: skip


# By the definition of e4m3: 3 bits of a fraction, which has no leading 1 if the exponent is 0; the last code is NaN.
_E4M3 = torch.tensor([(code % 8 + 8 * (code >= 8)) * 2.0 ** (max(code // 8, 1) - 10) for code in range(127)]).double()


def rounded(x: Tensor, cache_dtype: CacheDtype) -> Tensor:
    """What a cache holds of keys or values (..., C): the nearest steps of the largest number; ties go to even codes."""
    if cache_dtype == "auto":
        return x
    scales = (x.abs().amax(-1, keepdim=True).float() / (127 if cache_dtype == "int8" else 448)).double()
    steps = (x / scales).nan_to_num()
    if cache_dtype == "int8":
        return steps.round() * scales
    sizes = steps.abs().contiguous()
    above = torch.searchsorted(_E4M3, sizes).clamp(1, 126)
    low, high = sizes - _E4M3[above - 1], _E4M3[above] - sizes
    codes = torch.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return _E4M3[codes].copysign(steps) * scales


@dataclass
class RoundedPass(LatentCache):
    """A pass over whole texts whose keys and values are rounded as those of a cache are."""

    cache_dtype: CacheDtype
    num_tokens: int = 0

    def begin(self, num_rows: int, num_tokens: int) -> tuple[Tensor, int]:
        self.num_tokens = num_tokens
        return torch.arange(num_tokens).expand(num_rows, -1), num_tokens

    def preceding(self, place: str, new: Tensor, count: int) -> Tensor:
        return new.new_zeros(len(new), count, *new.shape[2:])

    def recur(self, place: str, recurrence: Recurrence, start: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return recurrence(start.expand(len(inputs[0]), *start.shape), *inputs)[0]

    def prepare(self, window: int | None, kind: Callable[[], AttentionKind]) -> Attending:
        return prepare_attention(kind(), kind().sight(self.num_tokens))

    def attend(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score = PLAIN
    ) -> Tensor:
        return attending.attend(q_BHTC, *(rounded(x, self.cache_dtype) for x in (k_BKTC, v_BKTC)), score)

    def attend_latents(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_B1TR: Tensor, c_B1TL: Tensor, attend: AttendLatents
    ) -> Tensor:
        return attend(attending, q_BHTC, *(rounded(x, self.cache_dtype) for x in (k_B1TR, c_B1TL)))

    def memory(self, layer: int, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return project()


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Uses one thread: for tensors this small, more threads are slower."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def characters() -> CharTokenizer:
    return CharTokenizer()


@pytest.fixture(scope="session")
def toy_model() -> Callable[..., Transformer]:
    """Builds a tiny network with weights large enough that its distribution is far from uniform."""

    def build(seed: int = 4, **changes: Any) -> Transformer:
        model = build_model(ModelConfig(**{**TINY, **changes}), seed).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, 0.3, generator=generator)
                else:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return model

    return build


@pytest.fixture(scope="session")
def chain_model() -> Callable[..., Transformer]:
    """Builds a network that writes the cycle `ids`: after each of them the next one has the logit `score`, others 0.

    Every residual branch ends in zeros and the embedding is the identity, so the final norm of token i is
    sqrt(V) times unit vector i, and column i of the head holds the logits.
    """

    def build(tokenizer: Tokenizer, ids: Sequence[int], *, score: float = 20.0, max_seq_len: int = 64) -> Transformer:
        vocab_size = tokenizer.vocab_size
        config = ModelConfig(
            vocab_size=vocab_size,
            d_model=vocab_size,
            head_dim=8,
            num_heads=1,
            num_layers=1,
            d_ff=8,
            max_seq_len=max_seq_len,
            position_encoding="rope",
            norm="rmsnorm",
            norm_eps=1e-12,
            bias=False,
            tie_weights=False,
        )
        model = build_model(config, 0).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                    parameter.zero_()
            model.embedding.weight.copy_(torch.eye(vocab_size))
            for token_id, successor in zip(ids, [*ids[1:], ids[0]], strict=True):
                model.lm_head.weight[successor, token_id] = score / vocab_size**0.5
        return model

    return build
