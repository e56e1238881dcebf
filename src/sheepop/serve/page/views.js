// One view per stage. Each gets the choices and returns the elements to show.
import { ask, logits, once, tensor, vector } from "./api.js";
import { bars, button, choice, compact, element, heading, knobs, largestOf, map, matrix, nearest, number, picture } from "./draw.js";
import { share, strongest, table, together, told, visible } from "./draw.js";
import { show as journey } from "./journey_view.js";

const SHOWN = 12, SHOWN_TOKENS = 24, NEAR = 8; // numbers of a vector, likeliest tokens, and tokens on either side
// Weights are scaled by row, since the first token can only attend to itself, with a weight of 1.
const WEIGHTS = { hue: "query", byRow: true };
const names = (tokens) => tokens.map((token) => token.text);

// The blocks of an encoder, if there is one, and of the decoder, in the order in which they run.
function blocks(trace) {
  const { encoder_layers: before, layers } = trace.sizes;
  const stack = (count, path, label, stream) => Array.from({ length: count }, (_, layer) =>
    ({ layer, path: `${path}.${layer}`, label: `${label} ${layer}`, ...stream }));
  return [...stack(before, "encoder_blocks", "Encoder block", { tokens: trace.source_tokens, isEncoder: true, begins: "source_positioned" }),
    ...stack(layers, "blocks", before ? "Decoder block" : "Block", { tokens: trace.tokens, isEncoder: false, begins: "positioned" })];
}

// The chosen block, with the chosen position in its stream.
function blockOf(trace, chosen) {
  const found = blocks(trace)[chosen.layer];
  return { ...found, place: found.isEncoder ? chosen.source : chosen.position };
}

// Some tokens on either side of the chosen one, by their positions.
function near({ tokens, place }) {
  const from = Math.max(0, Math.min(place - NEAR, tokens.length - 2 * NEAR));
  return tokens.slice(from, from + 2 * NEAR);
}

const numbered = (count) => [...Array(count).keys()].map(String);

// A vector for each token, as colours that tell their numbers, or as a table of numbers.
function vectors(tokens, found, chosen, hue = "residual") {
  const [height, width] = found.shape, rows = names(tokens);
  if (!chosen.numbers) {
    const read = told(`(${found.shape.join(" × ")}) The largest magnitude is ${number(largestOf(found.values))}.`);
    return [read, map(found.values, height, width, rows, [], { hue }, (row, column) => {
      read.textContent = `${visible(rows[row])}, ${column}: ${number(found.values[row * width + column])}`;
    })];
  }
  const head = ["", ...numbered(Math.min(SHOWN, width))];
  const body = rows.map((row, place) => [visible(row), ...found.values.slice(place * width, place * width + Math.min(SHOWN, width))]);
  const more = width > SHOWN ? ` The first ${SHOWN} of ${width} numbers are shown.` : "";
  return [element("p", { className: "shape" }, `(${found.shape.join(" × ")})${more}`), table(head, body)];
}

function layerChoice(trace, chosen, change, numbers = [...blocks(trace).keys()]) {
  const all = blocks(trace);
  return choice("Block", numbers, chosen.layer, (layer) => change({ layer: Number(layer), head: 0 }), (number) => all[number].label);
}

async function text(trace) {
  const columns = ["position", "token", "bytes", "id"], start = (token) => [String(token.position), visible(token.text), token.bytes, String(token.id)];
  const predictions = await once(trace, "predictions"), rows = trace.tokens.map((token) => {
    const before = predictions[token.position - 1];
    return [...start(token), before ? share(Math.exp(before.logprob)) : "–", before ? String(before.rank) : "–"];
  });
  const target = heading("The target", "The target so far. It begins with a special token.");
  const source = trace.source_tokens.length ? [table(columns, trace.source_tokens.map(start)), ...target] : [];
  return [...heading("Text and tokens", "The tokenizer cuts the text into pieces of its vocabulary, each with an id. Next to each piece are "
    + "its probability under the model, and the number of tokens that are at least as likely."), ...source, table([...columns, "probability", "rank"], rows)];
}

async function embedding(trace, chosen) {
  const parts = heading("Tokens become vectors", "Each id selects a row of a table: the token's vector.", "x₀ = E[id]");
  const streams = [...(trace.source_tokens.length ? [["source_", trace.source_tokens]] : []), ["", trace.tokens]];
  for (const [prefix, tokens] of streams) {
    if (streams.length > 1) parts.push(element("h2", {}, prefix ? "The source" : "The target"));
    parts.push(...vectors(tokens, await tensor(trace.number, `${prefix}embedded`), chosen));
    if (["sinusoidal", "learned"].includes(trace.sizes.positions)) {
      parts.push(...heading("And get their position", "A vector for each position is added.", "x = x₀ + p"),
        ...vectors(tokens, await tensor(trace.number, `${prefix}positioned`), chosen));
    }
  }
  return parts;
}

// The numbers of the blocks with attention, and of these the nearest to a block: some have something else instead.
const attending = (trace, from = 0) => blocks(trace).flatMap(({ path }, number) => (number >= from && trace.tensors.includes(`${path}.attention.q`) ? [number] : []));

// The chosen attention layer, self-attention or cross-attention of a block, with the tokens of its keys.
function lookOf(trace, chosen, change) {
  const numbers = attending(trace), layer = nearest(numbers, chosen.layer);
  const block = blockOf(trace, { ...chosen, layer }), hasCross = Boolean(trace.source_tokens.length) && !block.isEncoder;
  const isCross = hasCross && chosen.cross, { heads, kv_heads: groups } = trace.sizes;
  const sides = choice("Look at", ["source", "target"], isCross ? "source" : "target", (side) => change({ cross: side === "source" }), (side) => `The ${side}`);
  return { block, isCross, prefix: `${block.path}.${isCross ? "cross_attention" : "attention"}`, keys: isCross ? trace.source_tokens : block.tokens,
    group: Math.floor((chosen.head * groups) / heads), fields: [layerChoice(trace, { ...chosen, layer }, change, numbers), ...(hasCross ? [sides] : [])],
    called: `${isCross ? "cross-attention" : "attention"} of ${block.label.toLowerCase()}` };
}

// Queries, keys and values of a head, and one score as a product.
async function projections(trace, chosen, change) {
  const look = lookOf(trace, chosen, change), { block, prefix, keys, isCross, group } = look, { head } = chosen;
  const { positions, convolution, normalises_queries: isNormed } = trace.sizes, isTurned = positions === "rope" && !isCross;
  const also = `${convolution ? `, mixed with the ${convolution - 1} before it` : ""}${isNormed ? "; queries and keys are normalised once more" : ""}`;
  const [q, k, v, turnedQ, turnedK, scores] = await Promise.all([["q", head], ["k", group], ["v", group], ["rotated_q", head],
    ["rotated_k", group], ["unmasked", head]].map(([name, each]) => tensor(trace.number, `${prefix}.${name}`, each)));
  const heads = choice("Head", numbered(trace.sizes.heads), head, (each) => change({ head: Number(each) }));
  const parts = [...heading(`Queries, keys and values of ${look.called}`, "Each token searches with its query, is found by its key, and passes on its value. "
    + `All three are products of its normalised vector with a matrix${also}.`, "q = W_Q · x,  k = W_K · x,  v = W_V · x"), knobs(...look.fields, heads)];
  for (const [name, found, tokens, hue] of [["Queries", q, block.tokens, "query"], ["Keys", k, keys, "key"], ["Values", v, keys, "value"]])
    parts.push(element("h3", {}, `${name} of head ${block.layer}.${head}`), ...vectors(tokens, found, chosen, hue));
  if (isTurned) {
    parts.push(...heading("Turned by their position", "Positions rotate queries and keys, two numbers at a time, by these angles in radians, "
      + "so that a score depends on the distance of two tokens.", "angle = position · frequency"),
      ...vectors(block.tokens, await tensor(trace.number, `${prefix}.angles`), chosen));
    for (const [name, found, hue] of [["Queries", turnedQ, "query"], ["Keys", turnedK, "key"]])
      parts.push(element("h3", {}, `${name}, turned`), ...vectors(block.tokens, found, chosen, hue));
  }
  const width = q.shape[1], made = element("div");
  const key = choice("looks at", keys.map((token) => token.position), 0, () => show(), (place) => `${place}: ${visible(keys[place].text)}`);
  const show = () => {
    const s = Number(key.select.value), t = block.place;
    const rows = Array.from({ length: width }, (_, c) => {
      const [a, b] = [turnedQ.values[t * width + c], turnedK.values[s * width + c]];
      return [String(c), a, b, a * b];
    });
    made.replaceChildren(table(["dimension", "query", "key", "product"], [...rows, ["sum", "", "", rows.reduce((sum, row) => sum + row[3], 0)],
      ["score", "", "", scores.values[t * keys.length + s]]]));
  };
  show();
  return [...parts, ...heading("One score by hand", `How well the query of token ${block.place}, ${visible(block.tokens[block.place].text)}, `
    + "fits a key: the sum of the products, scaled.", "s = q · k / √C"), knobs(key), made];
}

async function attention(trace, chosen, change) {
  const { head } = chosen, look = lookOf(trace, chosen, change), { block, prefix, keys, isCross } = look, { layer } = block;
  const labels = names(block.tokens);
  const shown = { weights: "Weights", scores: "Scores", unmasked: "Scores before the mask" };
  const [all, large, values, outputs] = await Promise.all([
    Promise.all(Array.from({ length: trace.sizes.heads }, (_, each) => tensor(trace.number, `${prefix}.weights`, each))),
    ...[[chosen.what, head], ["v", look.group], ["head_outputs", head]].map(([name, each]) => tensor(trace.number, `${prefix}.${name}`, each)),
  ]);
  const small = all.map((found, each) => {
    const made = button(matrix(found.values, ...found.shape, WEIGHTS), () => change({ head: each }), { ariaPressed: String(each === head) });
    made.append(`Head ${layer}.${each}`);
    return element("figure", {}, made);
  });
  const kind = choice("Show", Object.keys(shown), chosen.what, (what) => change({ what }), (name) => shown[name]);
  const read = told(), [size, width] = large.shape;
  const tell = (row, column) => {
    read.textContent = `${visible(labels[row])} → ${visible(keys[column].text)}: ${number(large.values[row * width + column])}`;
  };
  tell(size - 1, 0);
  const big = map(large.values, size, width, labels, names(keys), chosen.what === "weights" ? WEIGHTS : { hue: "query" }, tell);
  const seen = isCross ? "all tokens of the source" : block.isEncoder ? "all tokens" : "those up to itself";
  return [...heading(look.called[0].toUpperCase() + look.called.slice(1), `Each token (row) attends to ${seen} (columns); each head has its own pattern. `
    + "A score is the fit of a query and a key; the softmax turns scores into weights.", "w = softmax(q · kᵀ / √C),  out = w · v"), knobs(...look.fields, kind),
  together(element("div", { className: "grid" }, ...small)), element("h2", {}, `Head ${layer}.${head}: ${shown[chosen.what]}`), read, big,
  ...terms(block, isCross || block.isEncoder ? keys : keys.slice(0, block.place + 1), all[head], values, outputs, change)];
}

// One number of a head's output as a sum over the `seen` tokens; a click on another number chooses that one.
function terms(block, seen, weights, values, outputs, change) {
  const width = values.shape[1], { place } = block, size = weights.shape[1];
  const made = element("div"), shown = Math.min(SHOWN, width);
  const choose = (position, c) => {
    dimension.value = c;
    if (position === place) show(); else change({ [block.isEncoder ? "source" : "position"]: position });
  };
  const rows = near(block).map(({ position, text: word }) => [visible(word), ...numbered(shown).map((c) =>
    button(number(outputs.values[position * width + Number(c)]), () => choose(position, c), { title: "Show the terms of its sum" }))]);
  const dimension = element("input", { type: "number", min: 0, max: width - 1, value: 0, oninput: () => show() });
  const show = () => {
    const c = Math.min(width - 1, Math.max(0, Math.trunc(Number(dimension.value)) || 0));
    const rows = seen.map((token, s) => {
      const [w, v] = [weights.values[place * size + s], values.values[s * width + c]];
      return [visible(token.text), w, v, w * v];
    });
    const total = ["sum", "", "", outputs.values[place * width + c]];
    made.replaceChildren(table(["token", "weight", "value", "product"], [...rows, total]));
  };
  show();
  return [...heading("What the head writes", "A row for each token around the chosen one. A click on a number shows the terms of its sum."),
    table(["", ...numbered(shown)], rows), ...heading("One number by hand", `What the head writes for token ${place}, `
    + `${visible(block.tokens[place].text)}, is a sum of values, each times its weight.`),
  element("label", {}, `Dimension, 0 to ${width - 1}`, dimension), made];
}

async function forward(trace, chosen, change) {
  const block = blockOf(trace, chosen), { place } = block, prefix = `${block.path}.feed_forward`;
  const parts = [...heading(`Feed-forward network of ${block.label.toLowerCase()}`, "Each token by itself: to a wider vector, through the activation, and back.",
    `out = W₂ · ${trace.sizes.activation}(W₁ · x)`), knobs(layerChoice(trace, chosen, change))];
  if (trace.tensors.includes(`${prefix}.hidden`)) {
    const [before, hidden] = await Promise.all(["pre_activation", "hidden"].map((name) => vector(trace.number, `${prefix}.${name}`, place)));
    parts.push(element("p", {}, `The 16 strongest of ${hidden.length} units for ${visible(block.tokens[place].text)}:`),
      bars(strongest(hidden, 16).map((unit) => ({ word: `unit ${unit}`, values: [hidden[unit]], text: `${number(before[unit])} → ${number(hidden[unit])}` }))));
  } else {
    const [experts, weights] = await Promise.all(["chosen", "weights"].map((name) => tensor(trace.number, `${prefix}.router.${name}`)));
    const [, count] = experts.shape;
    const rows = near(block).map((token) => [visible(token.text), ...Array.from({ length: count }, (_, k) =>
      `${experts.values[token.position * count + k]}: ${share(weights.values[token.position * count + k])}`)]);
    parts.push(element("p", {}, "The experts that the router chose, with their weights:"), table(["token", ...numbered(count).map((k) => `${Number(k) + 1}.`)], rows));
  }
  parts.push(element("h2", {}, "What it adds"), ...vectors(block.tokens, await tensor(trace.number, `${block.path}.feed_forward_output`), chosen, "forward"));
  return parts;
}

async function stream(trace, chosen, change) {
  const block = blockOf(trace, chosen), { path, place } = block, isNormed = trace.sizes.norm_position !== "output";
  const cross = trace.tensors.includes(`${path}.cross_attention_output`) ? [["cross-attention adds", `${path}.cross_attention_output`]] : [];
  const rows = await Promise.all([
    ["before", block.layer ? path.replace(/\d+$/, `${block.layer - 1}.output`) : block.begins], ["attention adds", `${path}.attention_output`],
    ...cross, ["feed-forward adds", `${path}.feed_forward_output`], ["after", `${path}.output`],
  ].map(async ([name, from]) => [name, ...(await vector(trace.number, from, place)).subarray(0, SHOWN)]));
  const branches = ["attention", ...(cross.length ? ["cross_attention"] : []), "feed_forward"];
  const measured = isNormed ? await Promise.all(branches.map(async (name) =>
    [name.replace("_", "-"), ...await vector(trace.number, `${path}.${name}_norm`, place)])) : [];
  const norms = (await once(trace, "norms"))[path.replace(/\.\d+$/, "")], curves = element("div");
  const dimension = element("input", { type: "number", min: 0, max: trace.sizes.width - 1, placeholder: "length", oninput: () => draw() });
  const draw = async () => {
    const column = dimension.value === "" ? null : Math.min(trace.sizes.width - 1, Math.max(0, Math.trunc(Number(dimension.value)) || 0));
    const found = column == null ? null : await tensor(trace.number, block.isEncoder ? "source_residuals" : "residuals", null, column);
    curves.replaceChildren(layerLines(found ? norms.map((row, step) => row.map((_, t) => found.values[step * row.length + t])) : norms, place,
      found ? `Dimension ${column} of the residual stream` : "Length of the residual stream"));
  };
  await draw();
  return [...heading("The residual stream", "A block only adds to the stream; nothing is removed. For the chosen token:",
    "x ← x + attention(x),  x ← x + feed-forward(x)"), knobs(layerChoice(trace, chosen, change)), table(["", ...numbered(rows[0].length - 1)], rows),
  ...(measured.length ? heading("What the norms measure", "Each branch reads the stream through a norm, which subtracts the mean and divides by the scale.") : []),
  ...(measured.length ? [table(["norm of", "mean", "scale"], measured)] : []),
  ...heading("From block to block", "A line for each token; the bold one is the chosen token."),
  element("label", {}, `Dimension, 0 to ${trace.sizes.width - 1}; without one, the length`, dimension), curves];
}

// Numbers of every token (columns) by blocks passed (rows), a line for each token.
function layerLines(rows, place, title) {
  const all = rows.flat(), [low, high] = [Math.min(0, ...all), Math.max(0, ...all)];
  const plot = picture(640, 260, `${title} by blocks passed, a line for each token.`);
  const x = (step) => 60 + (550 * step) / Math.max(1, rows.length - 1), y = (value) => 230 - (210 * (value - low)) / (high - low || 1);
  for (const at of [low, (low + high) / 2, high]) {
    plot.draw("line", { x1: 60, x2: 610, y1: y(at), y2: y(at), class: "axis" });
    plot.draw("text", { x: 54, y: y(at) + 4, "text-anchor": "end" }, compact(at));
  }
  for (let step = 0; step < rows.length; step++) plot.draw("text", { x: x(step), y: 250, "text-anchor": "middle" }, step);
  rows[0].forEach((_, t) => plot.draw("polyline", { class: t === place ? "line" : "line quiet",
    points: rows.map((row, step) => `${x(step)},${y(row[t])}`).join(" ") }));
  return plot;
}

async function lens(trace, chosen, change) {
  const found = await once(trace, "lens"), head = ["", ...trace.tokens.map((token) => visible(token.text))];
  const rows = found.ids.map((row, layer) => [layer ? `block ${layer - 1}` : "embedding", ...row.map((ids, t) => {
    const likely = found.probabilities[layer][t][0], go = () => change({ position: t, layer: trace.sizes.encoder_layers + Math.max(0, layer - 1) });
    const style = `background: color-mix(in srgb, var(--first) ${Math.round(70 * likely)}%, transparent)`;
    return button(visible(found.words[ids[0]]), go, { style, title: `${share(likely)}, ${found.divergence[layer][t].toFixed(3)} nats from the end` });
  })]).reverse();
  return [...heading("What each layer would say", "If the network ended there, this token would be the likeliest next one; the stronger the colour, "
    + "the higher its probability. The top row is the prediction."), table(head, rows, "lens")];
}

async function next(trace, chosen, change) {
  const [found, all] = await Promise.all([
    ask(trace.number, "next", { position: chosen.position, count: SHOWN_TOKENS }), logits(trace.number, chosen.position)]);
  const sorted = all.values.slice().sort().reverse(), most = sorted.length;
  const settings = { temperature: [0.1, 2, 0.05, 1], "top-k": [1, Math.min(100, most), 1, Math.min(100, most)], "top-p": [0.05, 1, 0.05, 1] };
  const inputs = Object.fromEntries(Object.entries(settings).map(([name, [min, max, step, value]]) =>
    [name, element("input", { type: "range", min, max, step, value, ariaLabel: name, oninput: () => show() })]));
  const made = element("div"), read = told();
  const show = () => {
    const [heat, wanted, nucleus] = ["temperature", "top-k", "top-p"].map((name) => Number(inputs[name].value));
    const k = wanted === Math.min(100, most) ? most : wanted;
    // Top-k first, then the likeliest of what is left until their probabilities reach top-p.
    const hot = sorted.slice(0, k).map((logit) => Math.exp((logit - sorted[0]) / heat));
    const sum = hot.reduce((a, b) => a + b, 0);
    let count = 0, left = 0;
    while (count < hot.length && (count === 0 || nucleus === 1 || left < nucleus * sum)) left += hot[count++];
    read.textContent = `temperature ${heat}, top-k ${k === most ? "off" : k}, top-p ${nucleus === 1 ? "off" : nucleus}: `
      + `${count} of ${most} tokens can be drawn`;
    made.replaceChildren(bars(found.tokens.map((token, place) => {
      const add = button(visible(token.text), () => change({ append: token.id }), { className: "word", title: "Append it to the prompt" });
      const [plain, drawn] = [Math.exp(token.logit - found.logsumexp), place < count ? hot[place] / left : 0];
      return { word: add, values: [plain, drawn], text: `${share(plain)} → ${place < count ? share(drawn) : "cut"}` };
    })));
  };
  show();
  const blame = await ask(trace.number, "attribution", { position: chosen.position });
  const ranked = blame.parts.sort((a, b) => Math.abs(b.nats) - Math.abs(a.nats)).slice(0, 16);
  return [...heading("The next token", `The model's prediction after token ${chosen.position}, `
    + `${visible(trace.tokens[chosen.position].text)}: blue is the distribution itself, orange the one with these settings. A click on a `
    + "token appends it to the prompt.", "p = softmax(z / temperature)"),
  knobs(...Object.entries(inputs).map(([name, input]) => element("label", {}, name, input))),
  read, made, ...heading("Who wrote it", `The logit of ${visible(blame.text)}, ${number(blame.total)}, as a sum over the parts of the network:`),
  bars(ranked.map((part) => ({ word: part.name, values: [part.nats], text: number(part.nats) })))];
}

// The text grows by one token at a time, and the cache of every block by one row.
async function growth(trace, chosen, change) {
  const { encoder_layers: before, kv_heads: groups, head_dim: width, heads } = trace.sizes;
  const numbers = attending(trace, before), layers = numbers.length, layer = nearest(numbers, chosen.layer), { path } = blocks(trace)[layer];
  const group = Math.min(groups - 1, Math.floor((chosen.head * groups) / heads)), labels = names(trace.tokens), count = labels.length;
  const [keys, values, all] = await Promise.all([tensor(trace.number, `${path}.attention.k`, group),
    tensor(trace.number, `${path}.attention.v`, group), logits(trace.number, count - 1)]);
  const each = 2 * layers * groups * width, read = told();
  const grown = (found, what) => element("div", {}, element("h3", {}, what), map(found.values, count, found.shape[1], labels,
    Array.from({ length: found.shape[1] }, () => ""), { hue: what === "Keys" ? "key" : "value" }, (row, column) => {
      read.textContent = `${what} of ${visible(labels[row])}, dimension ${column}: ${number(found.values[row * found.shape[1] + column])}`;
    }));
  const best = all.values.reduce((best, value, place) => (value > all.values[best] ? place : best), 0);
  const write = (label, title, pick) => button(label, () => change({ append: pick() }), { title });
  const drawn = () => {
    const odds = all.values.map((logit) => Math.exp(logit - all.values[best]));
    let left = Math.random() * odds.reduce((a, b) => a + b, 0);
    return Math.max(0, odds.findIndex((odd) => (left -= odd) <= 0));
  };
  const head = choice("Keys and values of head", numbered(groups), group, (each) => change({ head: Math.floor((Number(each) * heads) / groups) }));
  return [...heading("Token by token", `The text has ${count} tokens. Each new one adds a row to the KV cache of every block, so that only `
    + "its own query, key and value need computing.", "cache = 2 · L · K · C numbers a token"),
  knobs(write("Write the likeliest", "Greedy decoding", () => best), write("Draw one", "At temperature 1", drawn),
    layerChoice(trace, { ...chosen, layer }, change, numbers), head),
  element("p", {}, `2 · ${layers} · ${groups} · ${width} = ${each.toLocaleString("en")} numbers a token, ${(each * count).toLocaleString("en")} in all: `
    + `${((4 * each * count) / 1024).toLocaleString("en", { maximumFractionDigits: 1 })} KiB in float32.`),
  read, element("div", { className: "beside" }, grown(keys, "Keys"), grown(values, "Values"))];
}

async function space(trace) {
  const found = await once(trace, "map"), neighbours = element("div");
  const plot = picture(640, 420, "Embeddings of the prompt's tokens on their two axes of largest variance.");
  const [xs, ys] = [0, 1].map((axis) => found.points.map((point) => point.at[axis]));
  const at = (value, all, from, to) => from + ((value - Math.min(...all)) / (Math.max(...all) - Math.min(...all) || 1)) * (to - from);
  found.points.forEach((point) => {
    const [x, y] = [at(point.at[0], xs, 30, 560), at(point.at[1], ys, 390, 20)];
    const dot = plot.draw("circle", { cx: x, cy: y, r: 5, tabindex: 0 });
    plot.draw("text", { x: x + 8, y: y + 4 }, visible(point.text));
    const show = async () => {
      const rows = await ask(trace.number, "neighbours", { token: point.id });
      neighbours.replaceChildren(element("h2", {}, `Nearest to ${visible(point.text)}`),
        table(["token", "cosine", "distance"], rows.map((row) => [visible(row.text), row.cosine, row.distance])));
    };
    dot.addEventListener("click", show);
    dot.addEventListener("keydown", (event) => event.key === "Enter" && show());
  });
  return [...heading("The space of embeddings", `A 2-D map that keeps ${share(found.explained[0] + found.explained[1])} of the spread. `
    + `A click on a token shows its nearest neighbours.`), plot, neighbours];
}

async function checks(trace) {
  const rows = (await once(trace, "checks")).map((check) => [check.name, check.error.toExponential(1),
    element("span", { className: check.holds ? "good" : "bad" }, check.holds ? "holds" : "broken")]);
  return [...heading("Self-checks", "These checks run on every trace. If a shown number were not the network's own, one of them would fail."),
    table(["invariant", "error", ""], rows)];
}

// Title, view, and description.
export const VIEWS = {
  journey: ["Journey", journey, "One picture of the whole network"], text: ["Text", text, "The pieces that the text is cut into"],
  embedding: ["Vectors", embedding, "The list of numbers that stands for each token"],
  projections: ["Queries", projections, "What each token searches for, is found by, and passes on"],
  attention: ["Attention", attention, "Which tokens each token attends to"], forward: ["Feed-forward", forward, "The change of each token by itself"],
  stream: ["Residual", stream, "The sum that all blocks add to"], lens: ["Lens", lens, "What the network would predict if it ended earlier"],
  next: ["Next token", next, "How likely each token is to come next"], growth: ["Writing", growth, "The text grows token by token, and so does its cache"],
  space: ["Map", space, "Which tokens have similar vectors"], checks: ["Checks", checks, "Invariants that hold if every number is the network's own"],
};
