"""Follows a text through a model and writes down every step with the model's numbers.

The page begins with the bytes and ends with the probabilities of the next token. Of long vectors it shows only the
first numbers. One number of each kind is computed by hand from those above it.

Example:  python examples/hello_world.py runs/quickstart --output hello-world.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

import sheepop
from sheepop.core.facts import visible_line
from sheepop.interpret.checks import check_trace
from sheepop.interpret.lens import logit_lens, residual_norms
from sheepop.interpret.parts import FrozenNorm, direct_attribution, project_heads
from sheepop.interpret.trace import Trace

SHOWN = 5  # numbers of a vector


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="Follow a text through a model, with real numbers.")
    parser.add_argument("model", type=Path, help="a run, checkpoint or model directory")
    parser.add_argument("--prompt", default="Hello World")
    parser.add_argument("--output", type=Path, default=Path("hello-world.md"), help="the page, in Markdown")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--picture", help="a picture to open with, such as docs/site/journey.py draws")
    arguments = parser.parse_args()
    lm = sheepop.load(arguments.model, device=arguments.device, dtype="float32")
    arguments.output.write_text(page(lm.trace(arguments.prompt), arguments.picture), encoding="utf-8")
    print(f"Written: {arguments.output}")


def page(trace: Trace, picture: str | None = None) -> str:
    """All steps as Markdown, below a picture if there is one."""
    config = trace.config
    opening = [] if picture is None else [f"![`{trace.prompt.text}` on its way through the whole model]({picture})"]
    title = (
        f"# `{trace.prompt.text}`, number by number\n\n"
        f"A model with {trace.num_layers} blocks of width {config.d_model} and {config.num_heads} heads reads "
        f"`{trace.prompt.text}`. All numbers are from this model; `python examples/hello_world.py MODEL` writes such a "
        f"page for any model. Of long vectors, only the first {SHOWN} numbers are shown."
    )
    steps = [title, *opening, tokens(trace), embedding(trace), attention(trace), one_output(trace), feed_forward(trace)]
    return "\n\n".join([*steps, stream(trace), layers(trace), prediction(trace), parts(trace), checks(trace)]) + "\n"


def tokens(trace: Trace) -> str:
    """The pieces of the text."""
    rows = [[token.position, token.id, shown(token.text), token.bytes] for token in trace.tokens]
    return section(
        "Text to tokens",
        "The tokenizer cuts the text into pieces that it knows. A model sees only their numbers.",
        table(["position", "id", "token", "bytes"], rows),
    )


def embedding(trace: Trace) -> str:
    """The vector of each token, and its position."""
    also = " Rows for the n-grams that end with it are added." if trace.model.ngrams is not None else ""
    words = [f"Each id picks a row of a table: that is its vector, $`x_0`$.{also}", vectors(trace, trace.embedded)]
    if trace.model.added_positions is not None:
        added = trace.residuals[0] - trace.embedded
        words += ["A vector for each position is added:", vectors(trace, added), vectors(trace, trace.residuals[0])]
    elif trace.model.rotary_positions is not None:
        words += [
            "No vector is added for the position. Instead, each pair of numbers in queries and keys is rotated by one "
            "of these angles, in radians between -π and π:",
            vectors(trace, trace.angles("blocks.0.attention")),
        ]
    return section("Tokens to vectors", *words)


def attention(trace: Trace) -> str:
    """Queries, keys, values, scores and weights of one head."""
    name, head = "blocks.0.attention", 0
    norm = FrozenNorm.of(trace.blocks[0].attention_norm, trace.residuals[0])
    statistics = torch.cat([norm.mean, norm.scale], -1)
    masked, weights = trace[f"{name}.scores"][head], trace[f"{name}.weights"][head]
    return section(
        "Attention in block 0",
        "First the norm: the mean that it subtracts, the scale that it divides by, and its output.",
        table(["token", "mean", "scale"], named(trace, statistics)),
        vectors(trace, trace["blocks.0.attention_input"]),
        f"Queries, keys and values of head {head}; with rotary positions, queries and keys are already rotated:",
        *(vectors(trace, trace[f"{name}.{part}"][0], part) for part in ("rotated_q", "rotated_k", "v")),
        "How well each query (row) fits each key (column), $`s_{ij} = q_i \\cdot k_j / \\sqrt{C}`$:",
        grid(trace, trace.unmasked_scores("blocks.0.attention")[head]),
        "Later tokens are hidden: their scores are $`-\\infty`$.",
        grid(trace, masked),
        "The softmax turns each row into weights that sum to 1:",
        grid(trace, weights),
    )


def one_output(trace: Trace) -> str:
    """A weighted sum in full, and each head's part of the result."""
    name, last = "blocks.0.attention", trace.num_tokens - 1
    weights, values = trace[f"{name}.weights"][0, last], trace[f"{name}.v"][0, :, 0]
    terms = " + ".join(f"{w:.4f} · {v:.4f}" for w, v in zip(weights.tolist(), values.tolist(), strict=True))
    found = float(trace[f"{name}.head_outputs"][0, last, 0])
    heads, bias = project_heads(trace.blocks[0].attention, trace[f"{name}.head_outputs"][:, last])
    rows = [[f"head 0.{head}", *numbers(vector)] for head, vector in enumerate(heads)]
    rows += [["bias", *numbers(bias)]] if bool(bias.any()) else []
    return section(
        "One number by hand",
        "The output of a head is the sum of all values, each times its weight. Its first number for the last token:",
        f"{terms} = **{found:.4f}**",
        "Each head's output goes through its own columns of $`W_O`$. The heads add these vectors to the last token's "
        "vector:",
        table(["part", *(str(number) for number in range(SHOWN))], rows),
    )


def feed_forward(trace: Trace) -> str:
    """The hidden numbers of the first block's feed-forward network, or its chosen experts."""
    inside = trace.blocks[0].feed_forward
    if trace.config.experts is not None and not hasattr(inside, "pre_activation"):
        chosen = trace["blocks.0.feed_forward.router.chosen"]
        words = ["The experts that the router chose for each token:", vectors(trace, chosen.float())]
    else:
        words = [
            f"Each token is computed on its own. Before and after the activation ({trace.config.activation}):",
            vectors(trace, trace["blocks.0.feed_forward.pre_activation"]),
            vectors(trace, trace["blocks.0.feed_forward.hidden"]),
        ]
    return section("Feed-forward in block 0", *words)


def stream(trace: Trace) -> str:
    """The vectors that the first block adds to that of the last token."""
    parts = [
        ("before block 0", trace.residuals[0]),
        ("attention adds", trace["blocks.0.attention_output"]),
        ("feed-forward adds", trace["blocks.0.feed_forward_output"]),
        ("after block 0", trace.residuals[1]),
    ]
    rows = [[name, *numbers(value[-1])] for name, value in parts]
    return section(
        "The residual stream",
        "Both results are added to the vector. For the last token:",
        table(["", *(str(number) for number in range(SHOWN))], rows),
    )


def layers(trace: Trace) -> str:
    """The last token from block to block."""
    lens, norms = logit_lens(trace, 1), residual_norms(trace.target)
    rows = [
        [layer, f"{norms[layer, -1]:.2f}", shown(trace.text_of(int(lens.ids[layer, -1, 0]))),
         f"{lens.probabilities[layer, -1, 0]:.1%}", f"{lens.divergence[layer, -1]:.3f}"]
        for layer in range(trace.num_layers + 1)
    ]  # fmt: skip
    return section(
        "Through all blocks",
        "The length of the last token's vector, and the next token that the network would predict if it ended there:",
        table(["blocks passed", "length", "prediction", "probability", "nats from the end"], rows),
    )


def prediction(trace: Trace) -> str:
    """From the last vector to probabilities."""
    last, logits = trace.predictions[-1], trace.logits_behind(-1)
    total = float(logits.double().exp().sum())
    token, probability = last.top[0]
    rows = [[shown(trace.text_of(token)), f"{logits[token]:.4f}", f"{p:.2%}"] for token, p in last.top]
    return section(
        "The next token",
        "The last vector times each row of the output table gives a logit for every token:",
        table(["token", "logit", "probability"], rows),
        f"By hand: $`e^{{{float(logits[token]):.4f}}}`$ over the sum of all, {total:.2f}, is **{probability:.2%}**. "
        f"The entropy of the whole distribution is {last.entropy:.3f} nats.",
    )


def parts(trace: Trace) -> str:
    """The logit of the likeliest token as a sum."""
    found = direct_attribution(trace, -1, trace.predictions[-1].top[0][0])
    ranked = sorted(zip(found.values, found.names, strict=True), key=lambda part: -abs(part[0]))
    rows = [[name, f"{value:+.4f}"] for value, name in ranked[:8]]
    rest = sum(value for value, _ in ranked[8:])
    word = shown(trace.text_of(found.token_id))
    return section(
        "The parts of a logit",
        f"The logit of {word} is a sum over the parts of the network:",
        table(["part", "nats"], [*rows, [f"{len(ranked[8:])} others", f"{rest:+.4f}"], ["sum", f"{found.total:+.4f}"]]),
    )


def checks(trace: Trace) -> str:
    """The invariants of the trace."""
    rows = [[check.name, f"{check.error:.1e}", "yes" if check.holds else "**no**"] for check in check_trace(trace)]
    return section("Invariants", table(["invariant", "error", "holds"], rows))


def section(title: str, *words: str) -> str:
    """A heading with paragraphs."""
    return "\n\n".join([f"## {title}", *words])


def vectors(trace: Trace, value_TD: torch.Tensor, name: str = "token") -> str:
    """A row for each token with the first numbers of its vector."""
    count = min(SHOWN, value_TD.shape[-1])
    return table([name, *(str(number) for number in range(count))], named(trace, value_TD))


def grid(trace: Trace, value_TT: torch.Tensor) -> str:
    """A number for each pair of tokens."""
    labels = [shown(token.text) for token in trace.tokens]
    rows = [[label, *(f"{x:.4f}" for x in row)] for label, row in zip(labels, value_TT.tolist(), strict=True)]
    return table(["", *labels], rows)


def named(trace: Trace, value_TD: torch.Tensor) -> list[list[str]]:
    """The token of each row, followed by the first numbers of the row."""
    return [[shown(token.text), *numbers(row)] for token, row in zip(trace.tokens, value_TD, strict=True)]


def numbers(vector: torch.Tensor) -> list[str]:
    """The first numbers of a vector."""
    return [f"{x:.4f}" for x in vector[:SHOWN].tolist()]


def shown(text: str) -> str:
    """A token as code, in one line."""
    return f"`{visible_line(text)}`"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    main()
