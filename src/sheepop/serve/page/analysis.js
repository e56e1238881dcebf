// The analysis room: a model at a prompt, and the training of a run, as control systems. Its numbers are those of `lm.analyze` and of a run's metrics.
import { events, ofRun, suggested } from "./api.js";
import { colour, curves } from "./curves.js";
import { bars, button, choice, compact, element, entered, explain, hueOf, knobs, map, picture, shade, share, submitted, table, told, visible, whole } from "./draw.js";
import { column, TOPICS } from "./explain.js";

Object.assign(TOPICS, {
  gains: ["Gain", "A small change of the stream leaves a block longer or shorter. The largest gain belongs to one direction, the typical gain to a random one.",
    "A block with a very large gain turns small errors into large ones, in a pass and in training.",
    "[residual|h]ₗ₊₁ ≈ J · [residual|h]ₗ,  largest = σ₁(J),  typical = |J| / √N"],
  influence: ["Influence", "How far a token reaches the last state of another one, through all that the network does. Beside it are two readings of the attention weights alone.",
    "Attention weights are often read as influence. Where the three pictures disagree, they are not.", "[residual|I]ᵢⱼ = |∂hᵢ / ∂hⱼ| / √D"],
  loop: ["The loop of writing", "Each written token is read again, so writing is a loop. One token of the prompt is replaced by another, "
    + "and both texts are drawn with the same random numbers.",
    "If the divergence fades, the text forgets the change. If each repeat of a phrase makes the next one likelier, the text is caught in it.",
  "KL(p ‖ q),  P(equal) = ∏ P(both draw t | t),  gain = odds of a repeat / odds before"],
  decode: ["The whole loop", "The loop is measured over many texts, with other settings of the sampler, and with means of tokens instead of one.",
    "It says how fast a change fades, and which temperature or penalty ends a repetition.", "λ = mean of log |δₜ₊₁| / |δₜ|,  dH/dT = Var(z) / T³"],
  blocks: ["Block diagram", "The network as boxes with their gains. Each step joins some of them, until one map is left, and then the loop of writing.",
    "Inside a pass no arrow leads back. The only loop is the token that is written and read again.", "y = (I + G H)⁻¹ G r"],
  compare: ["What changed", "Both models read the same prompt and are asked with the same random directions, so that a difference comes from their weights.",
    "Tuning or quantisation may change few gains much, or many a little.", "gain of the first model : gain of the second"],
  training: ["Stability of training", "The sharpest direction of the loss, as a share of what steps of this size bear. Above 1 a step overshoots, "
    + "and the distance to the minimum grows.",
    "It shows that a rate is too high before the loss does.", "share = λ₁(D^½ H D^½) / limit"],
});
const VIEWS = {
  gains: ["Gains", gains], influence: ["Influence", influence], loop: ["Loop of writing", loop], decode: ["The whole loop", decode],
  blocks: ["Block diagram", blocks], compare: ["Compare", compare], training: ["Training", training],
};
const STEPS = { a: "as it is", b: "the input joined", c: "the blocks joined", d: "one map", e: "the loop of writing" };
const brief = (x) => (x == null ? "–" : x.toPrecision(3)), words = (found) => [...found.sentences, ...found.notes].map((each) => element("p", {}, ...explain(each)));

export async function open(page) {
  const names = page.models.map((each) => each.name), given = page.chosen;
  let chosen = { view: given.view in VIEWS ? given.view : names.length ? "gains" : "training", what: given.what === "typical" ? "typical" : "largest",
    token: whole(given.token), layer: whole(given.layer) ?? 0, step: "abcde".includes(given.step ?? " ") ? given.step : "a" };
  const anew = () => change({ token: null, layer: 0 }), field = (label, all, name) => choice(label, all, name, anew);
  const model = field("Model", names, given.model), beside = field("Compare with", names, given.beside ?? names[1]);
  const runs = field("Run", page.runs, page.runs.includes(given.run ?? given.model) ? given.run ?? given.model : page.runs[0]);
  const prompt = element("textarea", { rows: 1, autocomplete: "off", spellcheck: false, value: given.prompt ?? await suggested(page.runs, names[0]),
    onkeydown: entered(() => show()) });
  const temperature = element("input", { type: "number", min: 0, max: 10, step: "any", value: given.temperature ?? 0.8 });
  const asked = element("label", { className: "wide" }, "Prompt", prompt), warmth = element("label", {}, "Temperature", temperature);
  const stop = button("Stop", () => asking.abort(), { hidden: true }), kept = new Map();
  let asking = new AbortController();
  page.controls.append(element("form", { onsubmit: submitted(() => show()) }, model, beside, asked, warmth, runs, element("button", {}, "Analyse"), stop));
  page.until(() => asking.abort());

  // The result of an analysis, kept for the next look; `onRow` gets every event as it arrives.
  async function ask(body, onRow = () => {}) {
    const wanted = { model: model.select.value, prompt: prompt.value, ...body }, name = JSON.stringify(wanted), rows = kept.get(name) ?? [];
    if (kept.has(name)) rows.forEach(onRow);
    else {
      for await (const { result } of events("/ui/analyses", wanted, asking.signal)) {
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
    const mine = asking = new AbortController(), { view } = chosen, isRun = view === "training", subject = (isRun ? runs : model).select.value;
    [model.hidden, asked.hidden, runs.hidden] = [isRun, isRun, !isRun];
    [beside.hidden, warmth.hidden] = [view !== "compare", !["loop", "decode"].includes(view)];
    page.called(`${VIEWS[view][0]} of ${subject}`);
    remember();
    const side = column(view, null, () => {}), left = element("div", { className: "picture-side" });
    side.querySelector(".steps").remove();
    page.view.replaceChildren(switches(Object.entries(VIEWS).map(([name, [label]]) => [name, label]), view, (to) => change({ view: to })),
      element("div", { className: "journey" }, left, side));
    page.say("Measuring …");
    stop.hidden = false;
    try {
      if (isRun && !page.runs.length) throw new Error("No run here. Start the page with one: sheepop ui runs/quickstart");
      if (!isRun && !names.length) throw new Error("There is no model yet: the run has no checkpoint so far.");
      const body = { model: model.select.value, temperature: Number(temperature.value), other: beside.select.value, run: runs.select.value };
      const parts = await VIEWS[view][1]({ ...body, chosen, ask, change, remember, left });
      if (mine !== asking) return;
      left.replaceChildren(...parts);
      page.say(`${subject}: measured.`);
    } catch (error) {
      const isStopped = error.name === "AbortError";
      if (mine === asking) page.say(isStopped ? "Stopped." : "There is nothing to show.", !isStopped);
      if (mine === asking && !isStopped) left.replaceChildren(element("p", { role: "alert" }, error.message));
    }
    if (mine === asking) stop.hidden = true;
    document.body.dataset.ready = view;
  }

  await show();
}

// Buttons for [name, label], of which one is chosen.
const switches = (names, chosen, pick) => element("div", { className: "steps" },
  ...names.map(([name, label]) => button(label, () => pick(name), { ariaPressed: String(name === chosen) })));

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

// Draws charts of [name, title, hue, points], a line through [x, y] points in each.
function plot(drawn, axis, lines) {
  const charts = lines.map(([name, title, hue, points]) => {
    const found = points.filter(([, y]) => Number.isFinite(y));
    return { title, lines: [{ name, colour: colour(hue), xs: found.map(([x]) => x), ys: found.map(([, y]) => y) }] };
  });
  return drawn.draw(charts.filter(({ lines: [line] }) => line.xs.length), { axis, weight: 0, isLog: false });
}

const title = (text, ...more) => [element("h2", {}, text), ...more];
// The largest gain of a map, and the typical one.
const gainsOf = (gain) => [gain.spectrum.largest[0].value, gain.typical.value];

async function gains({ chosen, ask, change }) {
  const found = await ask({ analysis: "gains" }), read = told(), of = (gain) => (gain == null ? null : gainsOf(gain)[chosen.what === "largest" ? 0 : 1]);
  const what = choice("Show", ["largest", "typical"], chosen.what, (name) => change({ what: name }), (name) => `the ${name} gain`);
  const parts = [...new Set(found.blocks.flatMap((block) => block.parts.map((part) => part.name)))];
  const rows = found.blocks.map((block, layer) => [`Block ${layer}`, of(block.block), ...parts.map((name) => of(block.parts.find((part) => part.name === name)))]);
  const before = (layer) => (layer < found.blocks.length ? `before block ${layer}` : "after the last block");
  const nats = lines(found.nats, found.nats.map((_, layer) => before(layer).replace(" block", "")), found.tokens, { hue: "gold" }, (row, token) => {
    read.textContent = `A change at ${visible(found.tokens[token])} ${before(row)}: ${brief(found.nats[row][token])} root nats`;
  });
  return [...words(found), ...title("Gains by layer", knobs(what), heat(["", "whole block", ...parts], rows)),
    ...title("Blocks beside each other", element("p", {}, "Blue is the largest gain, orange the typical one. The length of a bar is the logarithm of 1 + the gain."),
      bars(found.blocks.map(({ block }, layer) => ({ word: `Block ${layer}`, values: gainsOf(block).map(Math.log1p), text: gainsOf(block).map(brief).join(", ") })))),
    ...title("What a change does to the next token",
      element("p", {}, "A change of length e at a token, before a block, moves the prediction by g²e²/2 nats; the picture shows g."), nats, read)];
}

async function influence({ chosen, ask, remember }) {
  const found = await ask({ analysis: "influence" }), { tokens } = found, read = told(), row = element("div", { className: "three" });
  const normed = found.influence.map((each) => each.map((value) => value / each.reduce((sum, one) => sum + one, 0)));
  const shares = { Influence: [normed, "residual"], "Attention rollout": [found.rollout, "key"], "Attention weights": [found.attention, "query"] };
  const pick = (to) => {
    const last = Math.min(to ?? Infinity, tokens.length - 1), all = Object.values(shares).map(([values]) => values[last]);
    row.replaceChildren(...title(`What reaches ${visible(tokens[last])}`), bars(tokens.slice(0, last + 1).map((token, at) => {
      const values = all.map((each) => each[at]);
      return { word: visible(token), values, text: `${values.map(share).join(", ")}; error of the first ${share(found.error[last][at])}` };
    })));
  };
  const maps = Object.entries(shares).map(([name, [values, hue]]) => {
    const made = lines(values, tokens, tokens, { hue, byRow: true }, (to, from) => {
      pick(to);
      const each = Object.entries(shares).map(([measure, [one]]) => `${measure.toLowerCase()} ${share(one[to][from])}`);
      read.textContent = `${visible(tokens[from])} reaches ${visible(tokens[to])}: ${each.join(", ")}`;
      made.onclick = () => remember({ token: to });
    });
    return element("div", {}, element("h2", { className: `is-${hue}` }, name), made);
  });
  pick(chosen.token);
  const how = "A row is the token that is reached, a column the one that reaches it. Point at a row to see it below; a click keeps it in the address.";
  return [...words(found), element("p", {}, how), element("div", { className: "beside thirds" }, ...maps), read, row];
}

async function loop({ ask, left, temperature }) {
  const rows = [], text = element("pre", { ariaLabel: "The written text" }), phrase = told(), drawn = curves(), parts = [...title("While it writes"), text, phrase, drawn.made];
  const line = (key, name, hue) => [key, name, hue, rows.map((row, at) => [at + 1, row[key]])];
  left.replaceChildren(...parts);
  await ask({ analysis: "writing", temperature }, (row) => {
    rows.push(row);
    text.append(row.text);
    phrase.textContent = `The last phrase: ${JSON.stringify(row.phrase)}`;
    plot(drawn, "tokens", [line("equal", "Probability that it is still equal after a change of the prompt", "gold"), line("divergence", "Divergence after the change, nats", "key"),
      line("entropy", "Entropy of the next token, nats", "query"), line("again", "Probability of one more repeat of the last phrase", "residual"),
      line("gain", "Gain of a repeat", "forward")]);
  });
  return parts;
}

async function decode({ ask, temperature }) {
  const found = await ask({ analysis: "decode", temperature }), drawn = curves(), points = (values) => values.map((value, at) => [at + 1, value]);
  await plot(drawn, "tokens", [["equal", "Probability that it is still equal, the mean over texts", "gold", points(found.survival.equal)],
    ["divergence", "Divergence in the same text, nats", "key", points(found.forced.divergences)]]);
  const chances = found.chances.map((each) => [each.temperature, each.repetition_penalty, each.by_repeats.at(-1), each.gain].map(brief));
  return [element("pre", {}, found.text), ...words(found), drawn.made,
    ...title("Settings of the sampler", table(["Temperature", "Penalty", "Next repeat", "Gain of a repeat"], chances)),
    table(["Temperature", "Entropy, nats", "Slope"], found.entropies.map((each) => Object.values(each).map(brief)))];
}

const WIDE = 250, HIGH = 44, GAP = 24, MOST_BOXES = 14;

// A diagram of [kind, x, y, text, more]: boxes of a name and its gains, words, small words, and lines with a tip through [[x, y], …].
function diagram(width, height, label, parts) {
  const svg = picture(width, height, label), word = (x, y, text, kind = "") => svg.draw("text", { x, y, "text-anchor": "middle", class: kind }, text);
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
  const drawn = shown.flatMap((box, at) => [["line", [[x, y(at) - GAP], [x, y(at)]]], ["box", x, y(at), box]]);
  return diagram(WIDE + 20, end + 14, label, [["word", x, 12, "tokens"], ...drawn, ["line", [[x, end - GAP], [x, end - 6]]], ["word", x, end + 9, "prediction"]]);
}

function closed({ open_loop: open, closed_loop: all }) {
  const x = 145, [forth, back] = [open, all].map((gain) => gainsOf(gain).map(brief)).map(([largest, typical]) => `largest ${largest}, typical ${typical}`);
  return diagram(420, 250, `The loop of writing: G has the gains ${forth}, the closed loop ${back}`, [
    ["word", x, 14, "r: vectors of the prompt"], ["line", [[x, 20], [x, 46]]], ["circle", x, 58, "+"],
    ["line", [[x, 70], [x, 94]]], ["box", x, 94, { name: "G", text: forth }], ["line", [[x, 138], [x, 186]]], ["word", x, 202, "y: expected next vectors"],
    ["word", x, 226, "y = (I + G H)⁻¹ G r", "strong"], ["word", x, 243, back, "small"], ["line", [[x, 162], [350, 162], [350, 138]], "back"],
    ["box", 350, 94, { name: "H", text: "choose, embed, +1", wide: 120, kind: "back" }], ["line", [[350, 94], [350, 58], [x + 12, 58]], "back"]]);
}

async function blocks({ chosen, ask, change }) {
  const found = await ask({ analysis: "blocks", layer: chosen.layer }), boxes = found.steps[chosen.step];
  const layer = choice("Inside block", [...found.blocks.keys()], chosen.layer, (each) => change({ layer: Number(each) }));
  const drawn = chosen.step === "e" ? closed(found) : chain(boxes, `Step (${chosen.step}): ${boxes.map((box) => `${box.name} ${box.text}`).join(", then ")}`);
  const inside = table(["Part", "Largest gain", "Typical gain"], found.parts.map((part) => [part.name, ...gainsOf(part).map(brief)]));
  const how = `${found.layout}; positions: ${found.positions}. Each branch leaves the stream, and its result is added to it.`;
  return [...words(found), switches(Object.entries(STEPS).map(([step, name]) => [step, `(${step}) ${name}`]), chosen.step, (step) => change({ step })), drawn,
    ...title(`The parts of block ${found.layer}`, knobs(layer), element("p", {}, how), inside)];
}

async function compare({ ask, other, model }) {
  const found = await ask({ analysis: "compare", other }), both = [found.first, found.second];
  const names = found.first.map((_, at) => (at < found.first.length - 1 ? `Block ${at}` : "All blocks"));
  const drawn = (which) => bars(names.map((word, at) => {
    const values = both.map((gains) => gainsOf(gains[at])[which]);
    return { word, values: values.map(Math.log1p), text: values.map(brief).join(", then ") };
  }));
  const rows = found.tokens.map((token, at) => {
    const values = found.influence.map((each) => each[at]), errors = found.error.map((each) => each[at]);
    const isBeyond = Math.abs(values[0] - values[1]) > values[0] * errors[0] + values[1] * errors[1];
    return [visible(token), ...values.map((value, which) => `${brief(value)} ± ${share(errors[which])}`), isBeyond ? "yes" : "no"];
  });
  return [element("p", {}, element("b", { className: "is-query" }, model), " beside ", element("b", { className: "is-key" }, other)), ...words(found),
    ...title("Largest gain", drawn(0)), ...title("Typical gain", drawn(1)),
    ...title("Influence on the last state", table(["Token", "First", "Second", "Beyond the error"], rows))];
}

// A gauge for a share of a limit, up to one and a half of it.
function dial(value, label) {
  const most = 1.5, [x, y, r] = [170, 150, 118], svg = picture(340, 190, label);
  const place = (part, radius = r) => [-Math.cos(Math.PI * (part / most)), -Math.sin(Math.PI * (part / most))].map((side, axis) => ([x, y][axis] + radius * side).toFixed(1));
  for (const [from, to, kind] of [[0, 0.9, "calm"], [0.9, 1, "near"], [1, most, "past"]])
    svg.draw("path", { d: `M${place(from)} A${r},${r} 0 0 1 ${place(to)}`, class: `arc ${kind}` });
  const word = (at, text, kind) => svg.draw("text", { x: at[0], y: at[1], "text-anchor": "middle", class: kind }, text);
  for (const mark of [0, 0.5, 1, most]) word(place(mark, r + 24), mark === most ? "1.5+" : mark, "");
  svg.draw("path", { d: `M${x},${y} L${place(Math.min(value, most), r - 18)}`, class: "needle" });
  word([x, y + 30], label, "strong");
  return element("figure", { className: "diagram" }, svg);
}

async function training({ run }) {
  const found = await ofRun(run, "advice"), rows = found.measured, sharp = rows.filter((row) => row.sharpness_share != null), dialed = element("section", {});
  // At its beginning and its end a rate is low, so the dial first shows the last measurement at a high one.
  const highest = Math.max(...sharp.map((row) => row.learning_rate)), from = sharp.findLastIndex((row) => row.learning_rate >= highest / 2);
  const at = element("input", { type: "range", min: 0, max: sharp.length - 1, value: from, ariaLabel: "Measurement", oninput: () => turn() });
  const turn = () => {
    const row = sharp[Number(at.value)], where = row.sharpest.replace(/^.*blocks\./, "block ");
    const moved = row.update_ratio == null ? "" : ` The fastest matrix, ${row.update_ratio_at}, moves by ${brief(100 * row.update_ratio)} % of its length in a step, `
      + `the median matrix by ${brief(100 * row.update_ratio_median)} %.`;
    dialed.replaceChildren(dial(row.sharpness_share, `${row.sharpness_share.toFixed(2)} of the limit at step ${row.step}`),
      element("p", {}, `The sharpness is ${brief(row.sharpness)}, and steps at the rate ${compact(row.learning_rate)} bear ${brief(row.sharpness_limit)}. `
        + `${share(row.sharpest_share)} of the sharpest direction lie in ${where}.${moved}`));
  };
  if (sharp.length) turn();
  const drawn = curves(), line = (name, key, text, hue) => [name, text, hue, rows.filter((row) => row[key] != null).map((row) => [row.step, row[key]])];
  const scale = rows.filter((row) => row.gradient_signal > 0).map((row) => [row.step, row.gradient_noise / row.gradient_signal]);
  await plot(drawn, "step", [line("share", "sharpness_share", "Share of the limit of sharpness", "gold"), ["noise", "Noise scale, rows", "key", scale],
    line("update", "update_ratio", "Fastest update, share of the matrix", "query"), line("score", "attention_logit", "Largest score of attention", "residual")]);
  const advice = found.advice.map((each) => element("article", {}, element("h3", {}, `${each.cause}, since step ${each.step}`), element("p", {}, ...explain(each.words))));
  return [...title("Advice"), ...(advice.length ? advice : found.sentences.map((each) => element("p", {}, each))),
    ...(sharp.length ? title("The stability dial", knobs(element("label", {}, "Measurement", at)), dialed) : []), drawn.made];
}
