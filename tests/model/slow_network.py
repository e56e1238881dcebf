"""A second network: slow, in float64 NumPy, one row of tokens at a time, written from the formulas of the papers.

Nothing of `sheepop.model` but the names of weights and settings is used. Every number that a probe of the network shows
goes through `SlowNetwork.at` under the probe's name, where a test can read or change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from sheepop.model import ModelConfig, Transformer

Array = np.ndarray
Change = Callable[[Array], Array]


def weights_of(model: Transformer) -> dict[str, Array]:
    """All weights in float64, by name."""
    return {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


ACTIVATIONS = {
    "relu": lambda x: max(x, 0.0),
    "relu_squared": lambda x: max(x, 0.0) ** 2,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swiglu": silu,
    "swiglu_clamped": lambda x: min(x, 7.0) / (1 + math.exp(-1.702 * min(x, 7.0))),
    "geglu": gelu,
    "geglu_tanh": gelu_tanh,
}


def rotary_angle(pair: int, width: int, base: float, scaling) -> float:
    """By how much pair `pair` of `width` columns turns per position; `scaling` as in the configuration."""
    angle = base ** (-2 * pair / width)
    if scaling is None:
        return angle
    factor = scaling.factor
    if scaling.kind == "linear":
        return angle / factor
    if scaling.kind == "ntk":
        return (base * factor ** (width / (width - 2))) ** (-2 * pair / width)
    if scaling.kind == "longrope":
        return angle / scaling.pair_factors[pair]
    if scaling.kind == "proportional":
        return angle / factor if pair < int(scaling.fraction * width / 2) else 0.0
    original = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / angle
        if wavelength < original / scaling.high_freq_factor:
            return angle
        if wavelength > original / scaling.low_freq_factor:
            return angle / factor
        smooth = (original / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        return (1 - smooth) * angle / factor + smooth * angle
    # YaRN: the pair that turns `turns` times over the original context, found from base^(-2 i / width).
    bounds = [
        width / 2 * math.log(original / (2 * math.pi * turns)) / math.log(base)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    low, high = (math.floor(bounds[0]), math.ceil(bounds[1])) if scaling.truncate else bounds
    low, high = max(low, 0), min(high, width - 1)
    interpolated = min(max((pair - low) / (high - low), 0.0), 1.0)
    return interpolated * angle / factor + (1 - interpolated) * angle


def alibi_slope(head: int, heads: int) -> float:
    """Press et al.: a geometric sequence from 2^(-8/n); for other n the lower power of two, then every second of 2n."""
    power = 2 ** (heads.bit_length() - 1)
    if head < power:
        return (2 ** (-8 / power)) ** (head + 1)
    return (2 ** (-8 / (2 * power))) ** (2 * (head - power) + 1)


# The fractional part of the golden ratio times 2^62, made odd.
MULTIPLIER = math.isqrt(5 * 2**122) - 2**61 | 1


def ngram_row(ngram: Sequence[int | None], rows: int) -> int:
    """The row of an n-gram, its last token first; None stands for a token before the beginning."""
    codes = [0 if token is None else token + 1 for token in ngram]
    hashed = codes[0]
    for code in codes[1:]:
        hashed = (hashed * MULTIPLIER + code + 2**63) % 2**64 - 2**63  # as 64 bits with a sign
        hashed ^= hashed >> 29
    return hashed % rows


class SlowNetwork:
    """Logits of one row of tokens; `changes` are applied to what stands at the probes of their names."""

    def __init__(self, model: Transformer, changes: dict[str, Change] | None = None) -> None:
        self.config: ModelConfig = model.config
        self.weights = weights_of(model)
        self.changes = changes or {}
        self.points: dict[str, Array] = {}

    def at(self, name: str, value: Array) -> Array:
        value = self.changes.get(name, lambda same: same)(value)
        self.points[name] = value
        return value

    def logits(self, ids: Sequence[int], documents: Sequence[int] | None = None) -> Array:
        """(T, V); positions begin anew with every document."""
        config = self.config
        documents = [0] * len(ids) if documents is None else documents
        starts = [min(s for s in range(len(ids)) if len({*documents[s : t + 1]}) == 1) for t in range(len(ids))]
        self.positions = [t - start for t, start in enumerate(starts)]
        self.starts = starts
        x = np.array([self.weights["embedding.weight"][token] * config.embedding_scale for token in ids])
        if config.ngrams is not None:
            x = x + self.ngrams(ids)
        if config.embedding_norm:
            x = self.norm(x, "embedding_norm")
        x = self.at("positioned", self.add_positions(self.at("embedded", x)))
        self.given: dict[tuple, tuple[Array, Array]] = {}  # the last keys and values of each kind of layer
        if config.layer_inputs is not None:
            self.vectors = self.layer_inputs(ids, x)
        for layer in range(config.num_layers):
            x = self.block(x, layer)
        if config.final_norm:
            x = self.norm(x, "final_norm")
        x = x * config.logit_scale
        if config.mup_base_d_model is not None:
            x = x * config.mup_base_d_model / config.d_model
        logits = self.linear(self.at("final", x), "lm_head")
        if config.logit_soft_cap is not None:
            logits = config.logit_soft_cap * np.tanh(logits / config.logit_soft_cap)
        return self.at("logits", logits)

    def ngrams(self, ids: Sequence[int]) -> Array:
        orders, rows = self.config.ngrams.orders, self.config.ngrams.rows
        found = np.zeros((len(ids), self.config.d_model))
        for t, start in enumerate(self.starts):
            for table, order in enumerate(orders):
                ngram = [ids[t - back] if t - back >= start else None for back in range(order)]
                found[t] += self.weights["ngrams.table"][table * rows + ngram_row(ngram, rows)]
        return found

    def layer_inputs(self, ids: Sequence[int], x: Array) -> Array:
        """(T, L, P)."""
        width = self.config.layer_inputs.width
        found = np.zeros((len(ids), self.config.num_layers, width))
        for t, layer in np.ndindex(found.shape[:2]):
            part = slice(layer * width, (layer + 1) * width)
            projected = self.weights["layer_inputs.projection.weight"][part] @ x[t] / math.sqrt(x.shape[1])
            looked_up = self.weights["layer_inputs.embedding.weight"][ids[t], part] * math.sqrt(width)
            found[t, layer] = (self.norm(projected, "layer_inputs.norm") + looked_up) / math.sqrt(2)
        return found

    def add_positions(self, x: Array) -> Array:
        x = x.copy()
        for t, position in enumerate(self.positions):
            for c in range(x.shape[1]):
                if self.config.position_encoding == "learned":
                    x[t, c] += self.weights["added_positions.table"][position, c]
                if self.config.position_encoding == "sinusoidal":
                    angle = position / self.config.position_base ** (2 * (c // 2) / x.shape[1])
                    x[t, c] += math.cos(angle) if c % 2 else math.sin(angle)
        return x

    def norm(self, x: Array, name: str, eps: float | None = None) -> Array:
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias", 0.0)
        eps = self.config.norm_eps if eps is None else eps
        if self.config.norm == "layernorm":
            centred = x - x.mean(-1, keepdims=True)
            return weight * centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) + bias
        shift = 1.0 if self.config.norm == "rmsnorm_zero_centered" else 0.0
        return (weight + shift) * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def block(self, x: Array, layer: int) -> Array:
        block, position = f"blocks.{layer}", self.config.norm_position

        def branch(x: Array, sublayer: str, function: Callable[[Array, str], Array]) -> Array:
            norm = "attention" if self.config.shared_norm else sublayer
            seen = self.norm(x, f"{block}.{norm}_norm") if f"{block}.{norm}_norm.weight" in self.weights else x
            seen = x if position == "post" else seen
            found = function(self.at(f"{block}.{sublayer}_input", seen), f"{block}.{sublayer}")
            if position in ("sandwich", "output"):
                found = self.norm(found, f"{block}.{sublayer}_output_norm")
            found = found * self.config.residual_scale
            return self.at(f"{block}.{sublayer}_output", found)

        def after(total: Array, sublayer: str) -> Array:
            return self.norm(total, f"{block}.{sublayer}_norm") if position == "post" else total

        def attention(x: Array, name: str) -> Array:
            mixers = {"gated_convolution": self.gated_convolution, "gated_delta_net": self.gated_delta_net}
            for mixer, function in mixers.items():
                if (section := getattr(self.config, mixer)) is not None and layer in section.layers:
                    return function(x, f"{block}.mixer")
            return self.attention(x, name, layer)

        def end(x: Array) -> Array:
            if self.config.layer_inputs is not None:
                name = f"{block}.layer_input"
                x = self.at(f"{block}.upper_feed_forward", x)
                hidden = self.bent(self.linear(x, f"{name}.gate_proj"), name) * self.vectors[:, layer]
                found = self.norm(self.linear(self.at(f"{name}.hidden", hidden), f"{name}.o_proj"), f"{name}.norm")
                x = x + self.at(f"{name}_output", found * self.config.residual_scale)
            return self.at(f"{block}.output", x * self.weights.get(f"{block}.factor", 1.0))

        experts = self.config.experts
        mixed = experts is not None and (experts.layers is None or layer in experts.layers)
        feed_forward = self.mixture if mixed else self.feed_forward
        attended = branch(x, "attention", attention)
        if self.config.parallel_residual:
            return end(x + attended + branch(x, "feed_forward", feed_forward))
        x = self.at(f"{block}.middle", after(x + attended, "attention"))
        return end(after(x + branch(x, "feed_forward", feed_forward), "feed_forward"))

    def attention(self, x: Array, name: str, layer: int) -> Array:
        config = self.config
        layers = config.sliding_layers
        window = config.sliding_window if layers is None or layer in layers else None
        kv_heads, width, value_width = config.num_kv_heads, config.head_dim, config.value_head_dim
        if window is not None:
            kv_heads = config.sliding_num_kv_heads or kv_heads
            width, value_width = config.sliding_head_dim or width, config.sliding_head_dim or value_width
        rotates = config.rotary_layers is None or layer in config.rotary_layers
        is_last = layer >= config.num_layers - config.shared_kv_layers
        if config.latent_attention is not None:
            q, k, v = self.from_latents(x, name)
        else:
            q = self.heads(x, f"{name}.q", config.num_heads, width)
            if not is_last:
                k = self.heads(x, f"{name}.k", kv_heads, width)
                v = self.heads(x, f"{name}.v", kv_heads, value_width, of_keys=layer in (config.keys_as_values or ()))
        if rotates:
            q = self.rotated(q, window)
        if is_last:
            k, v = self.given[window, rotates]
        elif rotates:
            k = self.rotated(k, window)
        q, k = self.at(f"{name}.rotated_q", q), self.at(f"{name}.rotated_k", k)
        if not is_last:
            self.given[window, rotates] = k, v
        scale = config.attention_scale
        if scale is None and config.mup_base_head_dim is not None:
            scale = config.mup_base_head_dim**0.5 / width
        if scale is None:
            scale = 1 / math.sqrt(width)
        scores = np.full((config.num_heads, len(x), len(x)), -np.inf)
        group = config.num_heads // kv_heads
        for h, t in np.ndindex(scores.shape[:2]):
            for s in range(self.starts[t], t + 1):
                if window is None or t - s < window:
                    score = sum(q[h, t, c] * k[h // group, s, c] for c in range(width)) * scale
                    if config.attention_soft_cap is not None:
                        score = config.attention_soft_cap * math.tanh(score / config.attention_soft_cap)
                    if config.position_encoding == "alibi":
                        score -= alibi_slope(h, config.num_heads) * (t - s)
                    scores[h, t, s] = score
        scores = self.at(f"{name}.scores", scores)
        weights = np.exp(scores)
        totals = weights.sum(-1)
        if config.attention_sinks:
            totals = totals + np.exp(self.weights[f"{name}.sinks"])[:, None]
        weights = self.at(f"{name}.weights", weights / totals[..., None])
        out = np.zeros((config.num_heads, len(x), value_width))
        for h, t, s in np.ndindex(weights.shape):
            out[h, t] += weights[h, t, s] * v[h // group, s]
        if config.attention_output_gate:
            gates = self.linear(x, f"{name}.gate_proj").reshape(len(x), config.num_heads, value_width)
            out = out / (1 + np.exp(-gates.transpose(1, 0, 2)))
        out = self.at(f"{name}.head_outputs", out)
        return self.linear(np.concatenate(list(out), axis=-1), f"{name}.o_proj")

    def from_latents(self, x: Array, name: str) -> tuple[Array, Array, Array]:
        """Queries, keys and values; the first columns of a key are the same in all heads."""
        latent, heads, width = self.config.latent_attention, self.config.num_heads, self.config.head_dim
        shared = latent.rope_head_dim
        into = x
        if latent.q_rank is not None:
            into = self.norm(self.linear(x, f"{name}.q_latent_proj"), f"{name}.q_latent_norm", latent.norm_eps)
            into = self.at(f"{name}.q_latent", into)
        q = self.linear(into, f"{name}.q_proj").reshape(len(x), heads, width).transpose(1, 0, 2)
        both = self.linear(x, f"{name}.kv_latent_proj")
        kv = self.at(f"{name}.kv_latent", self.norm(both[:, shared:], f"{name}.kv_latent_norm", latent.norm_eps))
        k, v = np.zeros((heads, len(x), width)), np.zeros((heads, len(x), self.config.value_head_dim))
        keys, values = self.linear(kv, f"{name}.k_proj"), self.linear(kv, f"{name}.v_proj")
        for h, t in np.ndindex(k.shape[:2]):
            own = width - shared
            k[h, t] = [*both[t, :shared], *keys[t, h * own : (h + 1) * own]]
            v[h, t] = values[t, h * v.shape[2] : (h + 1) * v.shape[2]]
        return self.at(f"{name}.q", q), self.at(f"{name}.k", k), self.at(f"{name}.v", v)

    def gated_convolution(self, x: Array, name: str) -> Array:
        width = x.shape[1]
        parts = self.linear(x, f"{name}.in_proj")
        b, c, x = (parts[:, first * width : (first + 1) * width] for first in range(3))
        convolved = self.at(f"{name}.convolved", self.convolved(b * x, f"{name}.convolution", own_tap=True))
        return self.linear(self.at(f"{name}.gated", c * convolved), f"{name}.o_proj")

    def gated_delta_net(self, x: Array, name: str) -> Array:
        section = self.config.gated_delta_net
        counts = {"q": section.num_key_heads, "k": section.num_key_heads, "v": section.num_value_heads}
        found = {}
        for part, count in counts.items():
            mixed = self.convolved(self.linear(x, f"{name}.{part}_proj"), f"{name}.convolutions.{part}", own_tap=True)
            heads = (mixed / (1 + np.exp(-mixed))).reshape(len(x), count, -1)
            if part != "v":
                heads = heads / np.sqrt((heads**2).sum(-1, keepdims=True) + 1e-6)
            found[part] = self.at(f"{name}.{part}", heads)
        beta = self.at(f"{name}.beta", 1 / (1 + np.exp(-self.linear(x, f"{name}.beta_proj"))))
        steps = np.log1p(np.exp(self.linear(x, f"{name}.decay_proj") + self.weights[f"{name}.decay_bias"]))
        log_alpha = self.at(f"{name}.log_alpha", -np.exp(self.weights[f"{name}.decay"]) * steps)
        out = np.zeros_like(found["v"])
        group = section.num_value_heads // section.num_key_heads
        for head in range(section.num_value_heads):
            state = np.zeros((section.key_head_dim, section.value_head_dim))
            for t, start in enumerate(self.starts):
                state = 0 * state if t == start else state
                key, query = found["k"][t, head // group], found["q"][t, head // group]
                state = state * math.exp(log_alpha[t, head])
                state = state + np.outer(key, beta[t, head] * (found["v"][t, head] - key @ state))
                out[t, head] = query @ state / math.sqrt(section.key_head_dim)
        out = out / np.sqrt((out**2).mean(-1, keepdims=True) + self.config.norm_eps)
        gates = self.linear(x, f"{name}.gate_proj").reshape(out.shape)
        out = out * self.weights[f"{name}.norm.weight"] * gates / (1 + np.exp(-gates))
        return self.linear(self.at(f"{name}.head_outputs", out).reshape(len(x), -1), f"{name}.o_proj")

    def heads(self, x: Array, name: str, count: int, width: int, of_keys: bool = False) -> Array:
        """(count, T, width): the projection, normalised over the whole width or head by head, cut into heads."""
        x = self.linear(x, f"{name[:-1]}k_proj" if of_keys else f"{name}_proj")
        if self.config.short_convolution is not None:
            x = self.convolved(x, "{}.convolutions.{}".format(*name.rsplit(".", 1)))
        normed = None if name.endswith(".v") else self.config.qk_norm
        if normed == "width":
            x = self.norm(x, f"{name}_norm")
        parts = [x[:, head * width : (head + 1) * width] for head in range(count)]
        if name.endswith(".v") and self.config.value_norm:
            parts = [p / np.sqrt((p**2).mean(-1, keepdims=True) + self.config.norm_eps) for p in parts]
        if normed == "head":
            parts = [self.norm(part, f"{name}_norm") for part in parts]
        if normed == "own_head":
            shared, weights = self.weights, self.weights[f"{name}_norm.weight"]
            for head in range(count):
                self.weights = {**shared, "own.weight": weights[head]}
                parts[head] = self.norm(parts[head], "own")
            self.weights = shared
        return self.at(name, np.stack(parts))

    def convolved(self, x: Array, name: str, own_tap: bool = False) -> Array:
        taps, out = self.weights[f"{name}.taps"], 0 * x if own_tap else x.copy()
        for t, start in enumerate(self.starts):
            for number, tap in enumerate(taps):
                back = number if own_tap else number + 1
                if t - back >= start:
                    out[t] += tap * x[t - back]
        return out + self.weights.get(f"{name}.bias", 0.0)

    def rotated(self, x: Array, window: int | None) -> Array:
        """Pairs of columns as complex numbers, multiplied by exp(i position angle)."""
        config = self.config
        if config.position_encoding != "rope":
            return x
        base, scaling = config.position_base, config.rotary_scaling
        if window is not None and config.sliding_position_base is not None:
            base, scaling = config.sliding_position_base, None
        latent = config.latent_attention
        width = int(x.shape[2] * config.rotary_fraction) if latent is None else latent.rope_head_dim
        factor = scaling.attention_factor if scaling is not None and scaling.kind in ("yarn", "longrope") else 1.0
        out = x.copy()
        for pair in range(width // 2):
            angle = rotary_angle(pair, width, base, scaling)
            for t, position in enumerate(self.positions):
                turned = (x[:, t, pair] + 1j * x[:, t, pair + width // 2]) * np.exp(1j * position * angle) * factor
                out[:, t, pair], out[:, t, pair + width // 2] = turned.real, turned.imag
        return out

    def feed_forward(self, x: Array, name: str) -> Array:
        up = self.linear(x, f"{name}.up_proj")
        gated = f"{name}.gate_proj.weight" in self.weights
        if gated:
            up = self.at(f"{name}.up", up)
        hidden = self.bent(self.linear(x, f"{name}.gate_proj") if gated else up, name)
        up = self.lifted(up)
        return self.linear(self.at(f"{name}.hidden", hidden * up if gated else hidden), f"{name}.down_proj")

    def lifted(self, up: Array) -> Array:
        return np.minimum(np.maximum(up, -7.0), 7.0) + 1.0 if self.config.activation == "swiglu_clamped" else up

    def bent(self, x: Array, name: str) -> Array:
        return np.vectorize(ACTIVATIONS[self.config.activation])(self.at(f"{name}.pre_activation", x))

    def route(self, x: Array, name: str) -> tuple[Array, Array]:
        """For every token the experts that it goes to, and their weights."""
        experts = self.config.experts
        x = self.norm(x, f"{name}.router_norm") if experts.own_norms else x
        logits = self.linear(x, f"{name}.router")
        if experts.router_scale != 1.0:
            bias = self.weights.get(f"{name}.router.bias", 0.0)
            logits = (logits - bias) * experts.router_scale + bias
        logits = self.at(f"{name}.router.logits", logits)
        all_scores, choices = [], []
        for row in logits:
            total = sum(math.exp(z) for z in row)
            softmax = experts.scores == "softmax"
            scores = [math.exp(z) / total if softmax else 1 / (1 + math.exp(-z)) for z in row]
            balanced = [
                score + bias for score, bias in zip(scores, self.weights[f"{name}.router.balance"], strict=True)
            ]
            size = len(scores) // experts.groups
            groups = [sorted(balanced[g * size : (g + 1) * size])[-experts.group_top :] for g in range(experts.groups)]
            best = sorted(range(experts.groups), key=lambda g: -sum(groups[g]))[: experts.groups_per_token]
            eligible = [e for e in range(len(scores)) if e // size in best]
            choices.append(sorted(eligible, key=lambda e: -balanced[e])[: experts.per_token])
            all_scores.append(scores)
        chosen = self.at(f"{name}.router.chosen", np.array(choices))
        weights = []
        for scores, best in zip(all_scores, chosen, strict=True):
            divisor = sum(scores[e] for e in best) if experts.normalize else 1.0
            own = self.weights.get(f"{name}.router.expert_scale", np.ones(experts.count))
            weights.append([experts.scale * own[e] * scores[e] / divisor for e in best])
        return chosen, self.at(f"{name}.router.weights", np.array(weights))

    def mixture(self, x: Array, name: str) -> Array:
        chosen, weights = self.route(x, name)
        per_token = chosen.shape[1]
        places = [(e, t * per_token + j) for t, best in enumerate(chosen.tolist()) for j, e in enumerate(best)]
        order = self.at(f"{name}.order", np.array([place for _, place in sorted(places)]))
        # Of each row its expert; its token, and which of the token's choices it is.
        experts = sorted(chosen.flatten())
        rows = [divmod(place, per_token) for place in order.tolist()]

        def apply(inputs: Array, part: str) -> Array:
            weight, bias = self.weights[f"{name}.experts.{part}_proj"], self.weights.get(f"{name}.experts.{part}_bias")
            biases = np.zeros(weight.shape[:2]) if bias is None else bias
            return np.array([weight[e] @ row + biases[e] for e, row in zip(experts, inputs, strict=True)])

        own_norms = self.config.experts.own_norms
        seen = self.norm(x, f"{name}.routed_norm") if own_norms else x
        inputs = np.array([seen[t] for t, _ in rows])
        up = apply(inputs, "up")
        gated = f"{name}.experts.gate_proj" in self.weights
        if gated:
            up = self.at(f"{name}.experts.up", up)
        hidden = self.bent(apply(inputs, "gate") if gated else up, f"{name}.experts")
        up = self.lifted(up)
        found = apply(self.at(f"{name}.experts.hidden", hidden * up if gated else hidden), "down")
        out = np.zeros_like(x)
        for (t, j), row in zip(rows, found, strict=True):
            out[t] += weights[t, j] * row
        out = self.norm(out, f"{name}.routed_output_norm") if own_norms else out
        out = self.at(f"{name}.routed_output", out)
        if not self.config.experts.shared:
            return out
        seen = self.norm(x, f"{name}.shared_norm") if own_norms else x
        shared = self.feed_forward(seen, f"{name}.shared")
        shared = self.norm(shared, f"{name}.shared_output_norm") if own_norms else shared
        if self.config.experts.shared_gate:
            shared = shared / (1 + np.exp(-seen @ self.weights[f"{name}.shared_gate"].T))
        return out + self.at(f"{name}.shared_output", shared)
