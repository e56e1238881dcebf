"""One layer of experts, forward and backward: ours, a loop over the experts, and Mixtral's of transformers.

All have the same weights and inputs and run in turn; outputs and gradients must agree, except for one token in twenty:
transformers' router rounds its scores in bf16, and sends tokens to other experts where two scores are nearly equal.
Shown are the medians of the processor's own time on a CPU, of the clock elsewhere, and their ratios: above 1 SheepOp is
faster.

python bench/experts.py --json bench/results/experts.json
python bench/experts.py --device cuda --precision bf16
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from record import add_json_option, write_record
from sheepop.core.device import resolve_device
from sheepop.core.speed import synchronize
from sheepop.model import ModelConfig
from sheepop.model.experts import MixtureOfExperts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 1e-4, "bf16": 0.1}


@dataclass(frozen=True)
class Shape:
    """Tokens, width of the network and of an expert, experts, and how many a token is sent to."""

    tokens: int
    width: int
    d_ff: int
    experts: int
    per_token: int


SHAPES = {
    "few": Shape(2048, 256, 704, 8, 2),
    "many": Shape(2048, 256, 128, 64, 8),
    "short": Shape(64, 256, 704, 8, 2),
}


def our_layer(shape: Shape) -> MixtureOfExperts:
    """Experts with random weights."""
    config = ModelConfig(
        d_model=shape.width, num_heads=1, activation="swiglu", bias=False, dropout=0.0,
        experts={"count": shape.experts, "per_token": shape.per_token, "d_ff": shape.d_ff},
    )  # fmt: skip
    assert config.experts is not None
    layer = MixtureOfExperts(config, config.experts)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, shape.width**-0.5, generator=generator)
    return layer


def loop_of(layer: MixtureOfExperts) -> Callable[[Tensor], Tensor]:
    """The same layer as it is often written: for every expert its tokens are picked out, and added back."""
    router, experts = layer.router, layer.experts

    def run(x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        _, weights_Nk, chosen_Nk = router(x_ND)
        out_ND = torch.zeros_like(x_ND)
        assert experts.gate_proj is not None
        for expert in range(len(experts.up_proj)):
            tokens, place = torch.where(chosen_Nk == expert)
            rows = x_ND[tokens]
            hidden = F.silu(F.linear(rows, experts.gate_proj[expert])) * F.linear(rows, experts.up_proj[expert])
            found = F.linear(hidden, experts.down_proj[expert]) * weights_Nk[tokens, place, None].to(rows.dtype)
            out_ND = out_ND.index_add(0, tokens, found)
        return out_ND.view_as(x_BTD)

    return run


def mixtral_of(layer: MixtureOfExperts, shape: Shape) -> nn.Module:
    """The block of transformers with the weights of `layer`."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=shape.width,
        intermediate_size=shape.d_ff,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.per_token,
    )
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    experts = layer.experts
    assert experts.gate_proj is not None
    with torch.no_grad():
        block.gate.weight.copy_(layer.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat((experts.gate_proj, experts.up_proj), dim=1))
        block.experts.down_proj.copy_(experts.down_proj)
    return block


def compare(name: str, device: str, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Median seconds of each, and how far outputs and gradients of inputs are apart for 95 percent of the tokens."""
    shape = SHAPES[name]
    layer = our_layer(shape)
    theirs = mixtral_of(layer, shape).to(device, dtype)
    layer = layer.to(device, dtype)
    x_BTD = torch.randn(1, shape.tokens, shape.width, generator=torch.Generator().manual_seed(1))
    x_BTD = x_BTD.to(device, dtype).requires_grad_()
    gradient = torch.randn_like(x_BTD)
    runs: dict[str, tuple[Callable[[Tensor], Tensor], nn.Module]] = {
        "sheepop": (lambda x_BTD: layer(x_BTD)[0], layer),
        "loop": (loop_of(layer), layer),
        "transformers": (theirs, theirs),
    }
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {who: [] for who in runs}
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for number in range(-2, rounds):
        for who, (run, module) in runs.items():
            module.zero_grad(set_to_none=True)
            x_BTD.grad = None
            synchronize(device)
            started = clock()
            out_BTD = run(x_BTD)
            torch.autograd.backward(out_BTD, gradient)
            synchronize(device)
            if number >= 0:
                seconds[who].append(clock() - started)
            assert x_BTD.grad is not None
            found[who] = (out_BTD.detach(), x_BTD.grad)
    medians = {who: statistics.median(times) for who, times in seconds.items()}
    distances = [
        ((one - other).abs().amax(dim=-1).float().quantile(0.95) / other.abs().max()).item()
        for who in ("loop", "transformers")
        for one, other in zip(found["sheepop"], found[who], strict=True)
    ]
    return {"shape": name, **vars(shape), "seconds": medians, "distance": max(distances)}


def main() -> int:
    """Compares every shape, prints the table, writes the JSON that was asked for; 1 when results differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=15, help="timed passes of each")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    add_json_option(parser)
    options = parser.parse_args()
    device = resolve_device(options.device)
    print(f"{options.precision}, {device}, {torch.get_num_threads()} threads, forward and backward")
    columns = f"{'shape':<7} {'SheepOp':>10} {'loop':>10} {'transformers':>13} {'to loop':>8} {'to theirs':>10}"
    print(f"{columns} {'distance':>9}")
    rows = []
    for name in options.shapes:
        row = compare(name, device, DTYPES[options.precision], options.rounds)
        rows.append(row)
        ours, loop, theirs = (1e3 * row["seconds"][who] for who in ("sheepop", "loop", "transformers"))
        print(
            f"{name:<7} {ours:>7,.1f} ms {loop:>7,.1f} ms {theirs:>10,.1f} ms "
            f"{loop / ours:>6.2f} {theirs / ours:>7.2f} {row['distance']:>9.1e}",
            flush=True,
        )
    write_record(options.json, {"device": device, "precision": options.precision, "layers": rows})
    return 0 if all(row["distance"] < TOLERANCES[options.precision] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
