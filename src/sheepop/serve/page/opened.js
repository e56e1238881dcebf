// A station, opened: its equation with the numbers of the chosen token. The exact tables are one step further.
import { ask, tensor, vector } from "./api.js";
import { katex } from "./libraries.js";
import { bars, button, element, largestOf, matrix, number, share, strip, strongest, together, visible } from "./draw.js";

const STRONGEST = 6, MAPS = 16, MAPPED = 512; // rows shown, and the most heads and tokens that have small maps
const row = (found, place) => found.values.subarray(place * found.shape.at(-1), (place + 1) * found.shape.at(-1));
const line = (name, hue, ...parts) => element("div", { className: "term" }, element("b", { className: `is-${hue}` }, name), ...parts);

async function embedding(trace, chosen) {
  const token = trace.tokens[chosen.position], isAdded = ["sinusoidal", "learned"].includes(trace.sizes.positions);
  const [embedded, positioned] = await Promise.all(["embedded", "positioned"].map((name) => vector(trace.number, name, chosen.position)));
  const name = visible(token.text);
  return [element("p", {}, `Token ${token.position}, ${name}, has the id ${token.id}. Row ${token.id} of the table has ${trace.sizes.width} numbers:`),
    line(`E[${token.id}]`, "residual", strip(embedded, "residual", { numbers: chosen.numbers, name })),
    ...(isAdded ? [element("p", {}, `With the vector of position ${token.position} added:`),
      line("x₀", "residual", strip(positioned, "residual", { numbers: chosen.numbers, name: `${name} with its position` }))] : [])];
}

async function attention(trace, chosen, change, layer) {
  const prefix = `blocks.${layer}.attention`, { heads, kv_heads: groups } = trace.sizes, group = Math.floor((chosen.head * groups) / heads);
  const t = chosen.position, name = visible(trace.tokens[t].text), settings = { numbers: chosen.numbers };
  const whole = (part, head) => tensor(trace.number, `${prefix}.${part}`, head), of = (part) => vector(trace.number, `${prefix}.${part}`, t, chosen.head);
  const [q, k, v, scores, own, out] = await Promise.all(
    [of("rotated_q"), whole("rotated_k", group), whole("v", group), of("unmasked"), of("weights"), of("head_outputs")]);
  const isMapped = heads <= MAPS && trace.tokens.length <= MAPPED, seen = strongest(own, STRONGEST).filter((s) => own[s] > 0);
  const all = await Promise.all(Array.from({ length: heads }, (_, each) => (isMapped ? whole("weights", each) : null)));
  const maps = all.map((found, each) => {
    const made = button(String(each), () => change({ head: each }), { ariaPressed: String(each === chosen.head), title: `Head ${each}`, "data-key": `head.${each}` });
    if (found) made.prepend(matrix(found.values, ...found.shape, { hue: "query", byRow: true }));
    return made;
  });
  const scaled = isMapped ? " Each row of a map is scaled by its largest weight, as a square root; "
    + `the largest weight of this head is ${share(largestOf(all[chosen.head].values))}.` : "";
  return [together(element("div", { className: "heads", ariaLabel: "Heads" }, ...maps)),
    element("p", { className: "shape" }, `Head ${chosen.head} of ${heads}.${scaled}`),
    line("q", "query", strip(q, "query", { ...settings, name: `The query of ${name}` })),
    ...seen.map((s) => element("div", { className: "term look" }, element("span", { className: "word" }, visible(trace.tokens[s].text)),
      element("b", { className: "is-key" }, "k"), strip(row(k, s), "key", { ...settings, name: "Its key" }),
      element("span", { className: "sum" }, `q·k/√C = ${number(scores[s])} →`), element("span", { className: "weight" }, weightBar(own[s]), share(own[s])),
      element("b", { className: "is-value" }, "× v"), strip(row(v, s), "value", { ...settings, name: "Its value" }))),
    line("Σ w·v", "value", strip(out, "value", { ...settings, name: "What the head writes" })),
    element("p", { className: "shape" }, `The ${seen.length} largest of ${t + 1} weights are shown; they have ${share(seen.reduce((sum, s) => sum + own[s], 0))} of the sum.`)];
}

const weightBar = (weight) => element("span", { className: "track" }, element("i", { style: `width: ${(100 * weight).toFixed(1)}%` }));

async function added(trace, chosen, layer, name, label, hue) {
  const found = await vector(trace.number, `blocks.${layer}.${name}`, chosen.position);
  return line(label, hue, strip(found, hue, { numbers: chosen.numbers, name: "What it adds" }));
}

async function forward(trace, chosen, change, layer) {
  const prefix = `blocks.${layer}.feed_forward`, parts = [];
  if (trace.tensors.includes(`${prefix}_input`)) parts.push(await added(trace, chosen, layer, "feed_forward_input", "x", "residual"));
  if (trace.tensors.includes(`${prefix}.hidden`)) {
    const values = await vector(trace.number, `${prefix}.hidden`, chosen.position), units = strongest(values, STRONGEST);
    parts.push(line("hidden", "forward", strip(values, "forward", { numbers: chosen.numbers, name: "The units" })),
      element("p", {}, `The ${units.length} strongest of ${values.length} units:`),
      bars(units.map((unit) => ({ word: `unit ${unit}`, values: [values[unit]], text: number(values[unit]) }))));
  }
  return [...parts, await added(trace, chosen, layer, "feed_forward_output", "out", "forward")];
}

async function prediction(trace, chosen, change, layer, data) {
  const found = await ask(trace.number, "next", { position: chosen.position, count: STRONGEST });
  return [element("p", {}, `Logits z of the likeliest tokens; p = exp(z) divided by the sum over all ${found.vocabulary.toLocaleString("en")} tokens, `
    + `exp(${number(found.logsumexp)}):`),
    bars(found.tokens.map(({ text, logit }) => {
      const p = Math.exp(logit - found.logsumexp);
      return { word: visible(text), values: [p], text: `z = ${number(logit)}, p = ${share(p)}` };
    })),
    element("p", {}, `The logit of ${visible(data.next[0].text)} is ${number(data.total)}, the sum of what every part adds to it. The largest parts:`),
    bars(data.parts.slice(0, STRONGEST).map((part) => ({ word: part.name, values: [part.nats], text: number(part.nats) })))];
}

// Kind of a station: its equations. The letters of vectors have the colours of the picture.
const EQUATIONS = {
  embedding: [String.raw`\residual{x_0} = E[\mathrm{id}]`], mixer: [String.raw`\mathrm{state} \leftarrow f(\mathrm{state}, \residual{x})`],
  attention: [String.raw`w = \operatorname{softmax}\left(\frac{\query{q}\,\key{k}^\top}{\sqrt{C}}\right)`, String.raw`\mathrm{out} = W_O\,(w\,\value{v})`],
  forward: [String.raw`\forward{\mathrm{out}} = W_2\, f(W_1\, \residual{x})`], prediction: [String.raw`\gold{p} = \operatorname{softmax}(W \operatorname{norm}(\residual{x}))`],
};
const MACROS = Object.fromEntries(["query", "key", "value", "residual", "forward", "gold"].map((hue) => [`\\${hue}`, `\\htmlClass{is-${hue}}{#1}`]));

async function equations(kind) {
  const tex = await katex(), settings = { strict: false, trust: ({ command }) => command === "\\htmlClass" };
  return element("p", { className: "equations" }, ...EQUATIONS[kind].map((each) => {
    const made = element("span", {});
    tex.render(each, made, { ...settings, macros: { ...MACROS } });
    return made;
  }));
}

// Kind of a station: what shows it opened, and the view with its exact numbers.
const OPEN = {
  embedding: [embedding, "embedding"], attention: [attention, "attention"], forward: [forward, "forward"], prediction: [prediction, "next"],
  mixer: [async (trace, chosen, change, layer) => [await added(trace, chosen, layer, "attention_output", "out", "value")], "stream"],
};

// The panel below a station of the picture.
export async function opened(station, trace, chosen, change, data) {
  const [show, view] = OPEN[station.kind], { layer } = station;
  const close = button("Close", () => change({ open: null }), { title: "Esc", "data-key": "close" });
  const exact = button("The exact numbers", () => change({ view, layer: trace.sizes.encoder_layers + (layer ?? 0) }), { "data-key": "exact" });
  const parts = await Promise.all([equations(station.kind), show(trace, chosen, change, layer, data)]);
  const made = element("section", { className: `opened of-${station.kind}`, ariaLabel: station.name }, element("i", { className: "notch", ariaHidden: "true" }),
    element("div", { className: "bar-of-title" }, element("h2", {}, station.name), exact, close), ...parts.flat());
  // Points at the station, wherever it is drawn.
  return Object.assign(made, { point: ({ x, width }) => made.style.setProperty("--at", `${Math.round(x + width / 2)}px`) });
}
