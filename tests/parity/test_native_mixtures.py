"""Mixtures that SheepOp trained and exported write the same text in transformers as its native blocks do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.adapt.stored_weight import has_kernels
from sheepop.checkpoint import save_model
from sheepop.core.native import say_once
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.native_block import NativeBlock
from sheepop.jobs.exchange import export_model
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.loss import cross_entropy
from sheepop.tokenizer import CharTokenizer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not has_kernels(), reason="there are no native kernels for this machine")

TEXT = "A flock of sheep crossed the road; one of them, the oldest, waited at the gate until all others were in. " * 4
PROMPTS = ("The o", "One of the sheep waited at", "a", "until all", "; one of them, ")
SPECIAL = [0, 1, 2, 3]  # tokens that a text of the least length never has
SIZES: dict[str, Any] = {
    "d_model": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "d_ff": 64, "max_seq_len": 128, "dropout": 0.0,
    "norm": "rmsnorm", "activation": "swiglu", "position_encoding": "rope", "bias": False,
}  # fmt: skip
NEAR = 1e-3  # a hundred times what the logits of two programs differ by
BEHIND = {"count": 6, "d_ff": 32, "layers": (1, 2)}
# By the family that expresses them.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"experts": {"count": 5}},
    "qwen3_moe": {"qk_norm": "head", "experts": BEHIND | {"per_token": 3, "normalize": False}},
    "qwen2_moe": {"attention_bias": True, "experts": BEHIND | {"shared": 2, "shared_gate": True, "normalize": False}},
    "glm4_moe": {
        "rotary_fraction": 0.5, "experts": BEHIND | {
            "per_token": 3, "shared": 1, "scores": "sigmoid", "scale": 1.5, "groups": 3, "groups_per_token": 2,
            "group_top": 2,
        },
    },
    "olmoe": {"qk_norm": "width", "experts": {"count": 4, "normalize": False}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def kernels_for_the_smallest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SHEEPOP_NATIVE", "1")
    say_once.cache_clear()
    yield
    say_once.cache_clear()


def trained(config: ModelConfig, tokenizer: CharTokenizer) -> Transformer:
    """A network that has learned a text, so that its routers prefer some experts, with a balance where one is added."""
    model = build_model(config, seed=1)
    rows = torch.tensor(tokenizer.encode(TEXT))[: 8 * 48].view(8, 48)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(25):
        loss = cross_entropy(model(rows[:, :-1]), rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    generator = torch.Generator().manual_seed(2)
    for mixture in model.mixtures.values():
        if mixture.router.scores == "sigmoid":
            mixture.router.balance.uniform_(-0.3, 0.3, generator=generator)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("family", MIXTURES)
def test_native_blocks_write_the_text_of_transformers(family: str, tmp_path: Path) -> None:
    tokenizer = CharTokenizer()
    model = trained(ModelConfig(**SIZES, **MIXTURES[family], vocab_size=tokenizer.vocab_size), tokenizer)
    save_model(tmp_path / "ours", model, tokenizer, {})
    assert export_model(tmp_path / "ours", tmp_path / "theirs")["family"] == family
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    generator = Generator(model, tokenizer)
    assert all(type(block) is NativeBlock for block in generator.model.layers)
    config = GenerationConfig(temperature=0, max_new_tokens=24, min_new_tokens=24)
    together, compared = generator.generate(PROMPTS, config), list[int]()
    for prompt, completion in zip(PROMPTS, together, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
            suppress_tokens=SPECIAL, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        first, second = torch.stack(expected.logits)[:, 0, len(SPECIAL) :].topk(2).values.unbind(-1)
        ties = (first - second < NEAR).nonzero()
        count = int(ties[0]) if len(ties) else len(first)  # behind a near tie the texts may part
        compared.append(count)
        assert completion.token_ids[:count] == expected.sequences[0, ids.shape[1] :][:count].tolist()
    assert sum(compared) >= 60
