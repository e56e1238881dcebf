// The analysis room: a model at a prompt, and the training of a run, as control systems. Its numbers are those of `lm.analyze` and of a run's metrics.

import { events, get } from "./api.js";
import { bars, choice, compact, element, explain, hueOf, map, picture, shade, share, table, visible } from "./draw.js";
import { column, TOPICS } from "./explain.js";

Object.assign(TOPICS, {
  gains: ["Gain", "A small change of the stream leaves a block longer or shorter. The largest gain belongs to one direction, the typical gain to a random one.",
    "A block with a very large gain turns small errors into large ones, in a pass and in training.", "[residual|h]ₗ₊₁ ≈ J · [residual|h]ₗ,  largest = σ₁(J),  typical = |J| / √N"],
  influence: ["Influence", "How far a token reaches the last state of another one, through all that the network does. Beside it are two readings of the attention weights alone.",
    "Attention weights are often read as influence. Where the three pictures disagree, they are not.", "[residual|I]ᵢⱼ = |∂hᵢ / ∂hⱼ| / √D"],
  loop: ["The loop of writing", "Each written token is read again, so writing is a loop. One token of the prompt is replaced by another, and both texts are drawn with the same random numbers.",
    "If the divergence fades, the text forgets the change. If each repeat of a phrase makes the next one likelier, the text is caught in it.", "KL(p ‖ q),  P(equal) = ∏ P(both draw t | t),  gain = odds of a repeat / odds before"],
  decode: ["The whole loop", "The loop is measured over many texts, with other settings of the sampler, and with means of tokens instead of one.",
    "It says how fast a change fades, and which temperature or penalty ends a repetition.", "λ = mean of log |δₜ₊₁| / |δₜ|,  dH/dT = Var(z) / T³"],
  blocks: ["Block diagram", "The network as boxes with their gains. Each step joins some of them, until one map is left, and then the loop of writing.",
    "Inside a pass no arrow leads back. The only loop is the token that is written and read again.", "y = (I + G H)⁻¹ G r"],
  compare: ["What changed", "Both models read the same prompt and are asked with the same random directions, so that a difference comes from their weights.",
    "Tuning or quantisation may change few gains much, or many a little.", "gain of the first model : gain of the second"],
  training: ["Stability of training", "The sharpest direction of the loss, as a share of what steps of this size bear. Above 1 a step overshoots, and the distance to the minimum grows.",
    "It shows that a rate is too high before the loss does.", "share = λ₁(D^½ H D^½) / limit"],
});
const VIEWS = {
  gains: ["Gains", gains], influence: ["Influence", influence], loop: ["Loop of writing", loop], decode: ["The whole loop", decode], blocks: ["Block diagram", blocks],
  compare: ["Compare", compare], training: ["Training", training],
};
const USUAL = "The sheep jumped over the";
const STEPS = { a: "as it is", b: "the input joined", c: "the blocks joined", d: "one map", e: "the loop of writing" };
const brief = (x) => (x == null ? "–" : x.toPrecision(3)), words = (found) => [...found.sentences, ...found.notes].map((each) => element("p", {}, ...explain(each)));

export async function open(page) {
  const names = page.models.map((each) => each.name), given = page.chosen, whole = (value) => (/^\d+$/.test(value ?? "") ? Number(value) : null);
  let chosen = { view: given.view in VIEWS ? given.view : names.length ? "gains" : "training", what: given.what === "typical" ? "typical" : "largest",
    token: whole(given.token), layer: whole(given.layer) ?? 0, step: "abcde".includes(given.step ?? " ") ? given.step : "a" };
  const run = page.runs.includes(given.run ?? given.model) ? given.run ?? given.model : page.runs[0];
  const suggested = page.runs.includes(names[0]) && given.prompt == null ? await get(`runs/${encodeURIComponent(names[0])}/prompt`).catch(() => USUAL) : USUAL;
  const model = choice("Model", names, given.model), beside = choice("Compare with", names, given.beside ?? names[1]), runs = choice("Run", page.runs, run);
  const prompt = element("textarea", { rows: 1, autocomplete: "off", spellcheck: false, value: given.prompt ?? suggested });
  const temperature = element("input", { type: "number", min: 0, max: 10, step: "any", value: given.temperature ?? 0.8 });
  const stop = element("button", { type: "button", hidden: true }, "Stop"), kept = new Map();
  const [besideLabel, promptLabel, warmth] = [beside, element("label", { className: "wide" }, "Prompt", prompt), element("label", {}, "Temperature", temperature)];
  const form = element("form", {}, model, besideLabel, promptLabel, warmth, runs, element("button", {}, "Analyse"), stop);
  let asking = new AbortController();
  page.controls.append(form);
  page.until(() => asking.abort());
  stop.addEventListener("click", () => asking.abort());

  // The result of an analysis, kept for the next look; `onRow` gets every event as it arrives.
  async function ask(body, onRow = () => {}) {
    const asked = { model: model.select.value, prompt: prompt.value, ...body }, name = JSON.stringify(asked), rows = kept.get(name) ?? [];
    if (kept.has(name)) rows.forEach(onRow);
    else {
      for await (const { result } of events("/ui/analyses", asked, asking.signal)) {
        rows.push(result);
        onRow(result);
      }
      kept.set(name, rows);
    }
    return rows.at(-1);
  }

  const change = (settings) => { chosen = { ...chosen, ...settings }; return show(); };
  const remember = (settings = {}) => {
    chosen = { ...chosen, ...settings };
    page.remember({ ...chosen, model: model.select.value, prompt: prompt.value, beside: beside.select.value, temperature: temperature.value, run: runs.select.value });
  };

  async function show() {
    asking.abort();
    const mine = asking = new AbortController(), isRun = chosen.view === "training";
    for (const [part, isNeeded] of [[model, !isRun], [promptLabel, !isRun], [besideLabel, chosen.view === "compare"], [warmth, ["loop", "decode"].includes(chosen.view)], [runs, isRun]]) part.hidden = !isNeeded;
    page.called(`${VIEWS[chosen.view][0]} of ${isRun ? runs.select.value : model.select.value}`);
    remember();
    const side = column(chosen.view, null, () => {}), left = element("div", { className: "picture-side" });
    side.querySelector(".steps").remove();
    page.view.replaceChildren(switches(Object.entries(VIEWS).map(([name, [label]]) => [name, label]), chosen.view, (view) => change({ view })), element("div", { className: "journey" }, left, side));
    page.say("Measuring …");
    stop.hidden = false;
    try {
      if (isRun ? !page.runs.length : !names.length) throw new Error(isRun ? "No run here. Start the page with one: sheepop ui runs/quickstart" : "There is no model yet: the run has no checkpoint so far.");
      const body = { model: model.select.value, temperature: Number(temperature.value), other: beside.select.value, run: runs.select.value };
      const parts = await VIEWS[chosen.view][1]({ ...body, chosen, ask, change, remember, left, say: page.say });
      if (mine !== asking) return;
      left.replaceChildren(...parts);
      page.say(`${isRun ? runs.select.value : model.select.value}: measured.`);
    } catch (error) {
      if (mine === asking) page.say(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
    }
    if (mine === asking) stop.hidden = true;
    document.body.dataset.ready = chosen.view;
  }

  form.addEventListener("submit", (event) => { event.preventDefault(); show(); });
  prompt.addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); show(); } });
  for (const each of [model, beside, runs]) each.select.addEventListener("change", () => change({ token: null, layer: 0 }));
  await show();
}

// Buttons for [name, label], of which one is chosen.
function switches(names, chosen, pick) {
  return element("div", { className: "steps" }, ...names.map(([name, label]) => {
    const button = element("button", { type: "button", ariaPressed: String(name === chosen) }, label);
    button.addEventListener("click", () => pick(name));
    return button;
  }));
}

// A table of gains whose cells are coloured by their logarithm: violet above 1, grey below.
function heat(head, rows) {
  const hue = hueOf("residual"), most = Math.max(...rows.flat().filter((each) => each > 0).map((each) => Math.abs(Math.log(each))), 1e-9);
  const made = table(head, rows.map((row) => row.map((value, place) => (place && value != null ? brief(value) : value ?? "–"))), "heat");
  made.querySelectorAll("tbody tr").forEach((tr, at) => [...tr.children].slice(1).forEach((td, place) => {
    const value = rows[at][place + 1];
    if (value > 0) td.style.background = shade(0.5 * Math.log(value) / most, hue);
  }));
  return made;
}

// A map whose rows are as high as a line of text; `onCell` tells of the cell under the pointer.
function lines(values, rowNames, columnNames, scale, onCell) {
  const made = map(Float32Array.from(values.flat()), rowNames.length, columnNames.length, rowNames, columnNames, scale, onCell);
  made.querySelector("canvas").style.height = `${Math.max(7, 1.3 * rowNames.length)}rem`;
  return made;
}

// A line through [x, y] points in one of the hues; the pointer and the arrow keys read it.
function curve(name, points, along, hue) {
  const svg = picture(480, 180), all = points.filter(([, y]) => Number.isFinite(y)), read = element("span", { className: "shape", ariaLive: "polite" }, all.length ? brief(all.at(-1)[1]) : "nothing yet");
  const made = element("figure", { className: "chart" }, element("figcaption", {}, ...explain(name)), read, svg), ends = (axis) => [Math.min, Math.max].map((of) => of(...all.map((point) => point[axis])));
  if (!all.length) return made;
  const [[x0, x1], [y0, y1]] = [ends(0), ends(1)], x = (value) => 56 + (410 * (value - x0)) / (x1 - x0 || 1), y = (value) => 145 - (130 * (value - y0)) / (y1 - y0 || 1);
  let place = all.length - 1;
  const tell = (to) => { place = Math.max(0, Math.min(all.length - 1, to)); read.textContent = `${along} ${all[place][0]}: ${brief(all[place][1])}`; };
  for (const [key, value] of Object.entries({ tabindex: 0, class: `is-${hue}`, "aria-label": `${name}: from ${brief(y0)} to ${brief(y1)}. Arrow keys read it.` })) svg.setAttribute(key, value);
  for (const at of [y0, y1]) svg.draw("text", { x: 50, y: y(at) + 4, "text-anchor": "end" }, brief(at));
  for (const at of [x0, x1]) svg.draw("text", { x: x(at), y: 168, "text-anchor": at === x0 ? "start" : "end" }, at);
  svg.draw("polyline", { points: all.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" "), fill: "none", stroke: "currentColor", "stroke-width": 1.6 });
  svg.addEventListener("pointermove", (event) => tell(Math.round((((event.offsetX / svg.clientWidth) * 480 - 56) / 410) * (all.length - 1))));
  svg.addEventListener("keydown", (event) => tell(place + ({ ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0)));
  return made;
}

const title = (text, ...more) => [element("h2", {}, text), ...more];
const told = () => element("p", { className: "shape", ariaLive: "polite" }, "\u00a0");

async function gains({ chosen, ask, change }) {
  const found = await ask({ analysis: "gains" }), of = (gain) => (gain == null ? null : chosen.what === "largest" ? gain.spectrum.largest[0].value : gain.typical.value);
  const what = choice("Show", ["largest", "typical"], chosen.what, (name) => `the ${name} gain`), read = told();
  what.select.addEventListener("change", () => change({ what: what.select.value }));
  const parts = [...new Set(found.blocks.flatMap((block) => block.parts.map((part) => part.name)))];
  const rows = found.blocks.map((block, layer) => [`Block ${layer}`, of(block.block), ...parts.map((name) => of(block.parts.find((part) => part.name === name)))]);
  const nats = lines(found.nats, found.nats.map((_, layer) => (layer < found.blocks.length ? `before ${layer}` : "after the last")), found.tokens, { hue: "gold" }, (row, token) => {
    read.textContent = `A change at ${visible(found.tokens[token])} ${row < found.blocks.length ? `before block ${row}` : "after the last block"}: ${brief(found.nats[row][token])} root nats`;
  });
  return [...words(found), ...title("Gains by layer", element("div", { className: "knobs" }, what), heat(["", "whole block", ...parts], rows)),
    ...title("Blocks beside each other", element("p", {}, "Blue is the largest gain, orange the typical one. The length of a bar is the logarithm of 1 + the gain."),
      bars(found.blocks.map(({ block }, layer) => ({ word: `Block ${layer}`, values: [block.spectrum.largest[0].value, block.typical.value].map(Math.log1p),
        text: `${brief(block.spectrum.largest[0].value)}, ${brief(block.typical.value)}` })))),
    ...title("What a change does to the next token", element("p", {}, "A change of length e at a token, before a block, moves the prediction by g²e²/2 nats; the picture shows g."), nats, read)];
}

async function influence({ chosen, ask, remember }) {
  const found = await ask({ analysis: "influence" }), { tokens } = found, read = told(), row = element("div", { className: "three" });
  const shares = { Influence: [found.influence.map((each) => each.map((value) => value / each.reduce((sum, one) => sum + one, 0))), "residual"],
    "Attention rollout": [found.rollout, "key"], "Attention weights": [found.attention, "query"] };
  const pick = (to) => {
    const last = Math.min(to ?? Infinity, tokens.length - 1), all = Object.values(shares).map(([values]) => values[last]);
    row.replaceChildren(...title(`What reaches ${visible(tokens[last])}`), bars(tokens.slice(0, last + 1).map((token, at) => ({ word: visible(token), values: all.map((values) => values[at]),
      text: `${all.map((values) => share(values[at])).join(", ")}; error of the first ${share(found.error[last][at])}` }))));
  };
  const maps = Object.entries(shares).map(([name, [values, hue]]) => {
    const made = lines(values, tokens, tokens, { hue, byRow: true }, (to, from) => {
      pick(to);
      read.textContent = `${visible(tokens[from])} reaches ${visible(tokens[to])}: ${Object.entries(shares).map(([each, [one]]) => `${each.toLowerCase()} ${share(one[to][from])}`).join(", ")}`;
      made.dataset.row = to;
    });
    made.addEventListener("click", () => remember({ token: Number(made.dataset.row) }));
    return element("div", {}, element("h2", { className: `is-${hue}` }, name), made);
  });
  pick(chosen.token);
  return [...words(found), element("p", {}, "A row is the token that is reached, a column the one that reaches it. Point at a row to see it below; a click keeps it in the address."), element("div", { className: "beside thirds" }, ...maps), read, row];
}

async function loop({ ask, left, temperature }) {
  const rows = [], text = element("pre", { ariaLabel: "The written text" }), charts = element("div", { className: "charts" }), parts = [...title("While it writes"), text, charts];
  const line = (name, key, hue) => curve(name, rows.map((row, at) => [at + 1, row[key]]), "token", hue);
  left.replaceChildren(...parts);
  await ask({ analysis: "writing", temperature }, (row) => {
    rows.push(row);
    text.append(row.text);
    charts.replaceChildren(line("Probability that it is still equal after a change of the prompt", "equal", "gold"), line("Divergence after the change, nats", "divergence", "key"), line("Entropy of the next token, nats", "entropy", "query"),
      line(`Probability of one more repeat of ${JSON.stringify(row.phrase)}`, "again", "residual"), line("Gain of a repeat", "gain", "forward"));
  });
  return parts;
}

async function decode({ ask, temperature }) {
  const found = await ask({ analysis: "decode", temperature }), line = (name, values, hue) => curve(name, values.map((value, at) => [at + 1, value]), "token", hue);
  return [element("pre", {}, found.text), ...words(found), element("div", { className: "charts" }, line("Probability that it is still equal, the mean over texts", found.survival.equal, "gold"), line("Divergence in the same text, nats", found.forced.divergences, "key")),
    ...title("Settings of the sampler", table(["Temperature", "Penalty", "Next repeat", "Gain of a repeat"], found.chances.map((each) => [each.temperature, each.repetition_penalty, each.by_repeats.at(-1), each.gain].map(brief)))),
    table(["Temperature", "Entropy, nats", "Slope"], found.entropies.map((each) => Object.values(each).map(brief)))];
}

const WIDE = 250, HIGH = 44, GAP = 24, MOST_BOXES = 14;

// A diagram of [kind, x, y, text, more]: boxes of a name and its gains, words, small words, and lines with a tip through [[x, y], …].
function diagram(width, height, label, parts) {
  const svg = picture(width, height), word = (x, y, text, kind = "") => svg.draw("text", { x, y, "text-anchor": "middle", class: kind }, text);
  svg.setAttribute("aria-label", label);
  const kinds = {
    word, circle: (x, y, text) => { svg.draw("circle", { cx: x, cy: y, r: 12, class: "box" }); word(x, y + 5, text); },
    box: (x, y, { name, text, wide = WIDE, kind = "" }) => {
      svg.draw("rect", { x: x - wide / 2, y, width: wide, height: HIGH, rx: 7, class: `box ${kind}` });
      word(x, y + (text ? 18 : 27), name, "strong");
      word(x, y + 34, text, "small");
    },
    line: (points, kind = "") => {
      const [[x0, y0], [x1, y1]] = points.slice(-2), [dx, dy] = [Math.sign(x1 - x0), Math.sign(y1 - y0)];
      svg.draw("polyline", { points: points.join(" "), class: `wire ${kind}` });
      svg.draw("path", { d: `M${x1},${y1} l${-7 * dx - 4 * dy},${-7 * dy - 4 * dx} l${8 * dy},${8 * dx} z`, class: `tip-of ${kind}` });
    },
  };
  for (const [kind, ...settings] of parts) kinds[kind](...settings);
  return element("figure", { className: "diagram" }, svg);
}

function chain(boxes, label) {
  const shown = boxes.length <= MOST_BOXES ? boxes : [...boxes.slice(0, 6), { name: `${boxes.length - 12} more blocks`, text: "" }, ...boxes.slice(-6)];
  const x = WIDE / 2 + 10, y = (at) => 18 + GAP + at * (HIGH + GAP), end = y(shown.length);
  return diagram(WIDE + 20, end + 14, label, [["word", x, 12, "tokens"], ...shown.flatMap((box, at) => [["line", [[x, y(at) - GAP], [x, y(at)]]], ["box", x, y(at), box]]),
    ["line", [[x, end - GAP], [x, end - 6]]], ["word", x, end + 9, "prediction"]]);
}

function closed({ open_loop: open, closed_loop: whole }) {
  const x = 145, text = (gain) => `largest ${brief(gain.spectrum.largest[0].value)}, typical ${brief(gain.typical.value)}`;
  return diagram(420, 250, `The loop of writing: G has the gains ${text(open)}, the closed loop ${text(whole)}`, [["word", x, 14, "r: vectors of the prompt"], ["line", [[x, 20], [x, 46]]], ["circle", x, 58, "+"],
    ["line", [[x, 70], [x, 94]]], ["box", x, 94, { name: "G", text: text(open) }], ["line", [[x, 138], [x, 186]]], ["word", x, 202, "y: expected next vectors"], ["word", x, 226, "y = (I + G H)⁻¹ G r", "strong"], ["word", x, 243, text(whole), "small"],
    ["line", [[x, 162], [350, 162], [350, 138]], "back"], ["box", 350, 94, { name: "H", text: "choose, embed, +1", wide: 120, kind: "back" }], ["line", [[350, 94], [350, 58], [x + 12, 58]], "back"]]);
}

async function blocks({ chosen, ask, change }) {
  const found = await ask({ analysis: "blocks", layer: chosen.layer }), layers = found.blocks.map((_, layer) => layer);
  const layer = choice("Inside block", layers, chosen.layer);
  layer.select.addEventListener("change", () => change({ layer: Number(layer.select.value) }));
  const drawn = chosen.step === "e" ? closed(found) : chain(found.steps[chosen.step], `Step (${chosen.step}): ${found.steps[chosen.step].map((box) => `${box.name} ${box.text}`).join(", then ")}`);
  const inside = table(["Part", "Largest gain", "Typical gain"], found.parts.map((part) => [part.name, brief(part.spectrum.largest[0].value), brief(part.typical.value)]));
  return [...words(found), switches(Object.entries(STEPS).map(([step, name]) => [step, `(${step}) ${name}`]), chosen.step, (step) => change({ step })), drawn,
    ...title(`The parts of block ${found.layer}`, element("div", { className: "knobs" }, layer), element("p", {}, `${found.layout}; positions: ${found.positions}. Each branch leaves the stream, and its result is added to it.`), inside)];
}

async function compare({ ask, other, model }) {
  const found = await ask({ analysis: "compare", other }), names = [...found.first.keys()].map((at) => (at < found.first.length - 1 ? `Block ${at}` : "All blocks"));
  const pair = (of) => [found.first, found.second].map((gains) => gains.map(of)), largest = pair((gain) => gain.spectrum.largest[0].value), typical = pair((gain) => gain.typical.value);
  const drawn = ([first, second]) => bars(names.map((word, at) => ({ word, values: [first[at], second[at]].map(Math.log1p), text: `${brief(first[at])}, then ${brief(second[at])}` })));
  const rows = found.tokens.map((token, at) => {
    const [one, two] = found.influence.map((each) => each[at]), margin = found.influence.reduce((sum, each, which) => sum + each[at] * found.error[which][at], 0);
    return [visible(token), `${brief(one)} ± ${share(found.error[0][at])}`, `${brief(two)} ± ${share(found.error[1][at])}`, Math.abs(one - two) > margin ? "yes" : "no"];
  });
  return [element("p", {}, element("b", { className: "is-query" }, model), " beside ", element("b", { className: "is-key" }, other)), ...words(found), ...title("Largest gain", drawn(largest)), ...title("Typical gain", drawn(typical)),
    ...title("Influence on the last state", table(["Token", "First", "Second", "Beyond the error"], rows))];
}

function dial(value, label) {
  const svg = picture(340, 190), most = 1.5, [x, y, r] = [170, 150, 118], at = (part, radius = r) => [x - radius * Math.cos(Math.PI * part), y - radius * Math.sin(Math.PI * part)].map((each) => each.toFixed(1)).join(",");
  for (const [from, to, kind] of [[0, 0.9, "calm"], [0.9, 1, "near"], [1, most, "past"]]) svg.draw("path", { d: `M${at(from / most)} A${r},${r} 0 0 1 ${at(to / most)}`, class: `arc ${kind}` });
  for (const mark of [0, 0.5, 1, most]) svg.draw("text", { x: at(mark / most, r + 24).split(",")[0], y: at(mark / most, r + 24).split(",")[1], "text-anchor": "middle" }, mark === most ? "1.5+" : mark);
  svg.draw("path", { d: `M${x},${y} L${at(Math.min(value, most) / most, r - 18)}`, class: "needle" });
  svg.draw("text", { x, y: y + 30, "text-anchor": "middle", class: "strong" }, label);
  svg.setAttribute("aria-label", label);
  return element("figure", { className: "diagram" }, svg);
}

async function training({ run }) {
  const found = await get(`runs/${encodeURIComponent(run)}/advice`), rows = found.measured, sharp = rows.filter((row) => row.sharpness_share != null), dialed = element("section", {});
  // At its beginning and its end a rate is low, so the dial first shows the last measurement at a high one.
  const highest = Math.max(...sharp.map((row) => row.learning_rate)), from = sharp.findLastIndex((row) => row.learning_rate >= highest / 2);
  const at = element("input", { type: "range", min: 0, max: sharp.length - 1, value: from, ariaLabel: "Measurement" });
  const turn = () => {
    const row = sharp[Number(at.value)];
    dialed.replaceChildren(dial(row.sharpness_share, `${row.sharpness_share.toFixed(2)} of the limit at step ${row.step}`), element("p", {}, `The sharpness is ${brief(row.sharpness)}, and steps at the rate ${compact(row.learning_rate)} bear ${brief(row.sharpness_limit)}. ${share(row.sharpest_share)} of the sharpest direction lie in ${row.sharpest.replace(/^.*blocks\./, "block ")}.`
      + (row.update_ratio == null ? "" : ` The fastest matrix, ${row.update_ratio_at}, moves by ${brief(100 * row.update_ratio)} % of its length in a step, the median matrix by ${brief(100 * row.update_ratio_median)} %.`)));
  };
  at.addEventListener("input", turn);
  if (sharp.length) turn();
  const line = (name, key, hue) => curve(name, rows.filter((row) => row[key] != null).map((row) => [row.step, row[key]]), "step", hue);
  const scale = rows.filter((row) => row.gradient_signal > 0).map((row) => [row.step, row.gradient_noise / row.gradient_signal]);
  return [...title("Advice"), ...(found.advice.length ? found.advice.map((each) => element("article", {}, element("h3", {}, `${each.cause}, since step ${each.step}`), element("p", {}, ...explain(each.words)))) : found.sentences.map((each) => element("p", {}, each))),
    ...(sharp.length ? title("The stability dial", element("div", { className: "knobs" }, element("label", {}, "Measurement", at)), dialed) : []),
    element("div", { className: "charts" }, line("Share of the limit of sharpness", "sharpness_share", "gold"), curve("Noise scale, rows", scale, "step", "key"),
      line("Fastest update, share of the matrix", "update_ratio", "query"), line("Largest score of attention", "attention_logit", "residual"))];
}
