// Elements, tables, bars and maps. Text goes in as text only, never as markup.

export function element(name, settings = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(settings)) {
    if (key in made && key !== "list") made[key] = value; else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
export const number = (x) => (Number.isFinite(x) ? x.toFixed(4) : x > 0 ? "∞" : x < 0 ? "−∞" : "–");
export const share = (x) => `${(100 * x).toFixed(x < 0.1 ? 2 : 1)} %`;
export const button = (label, onclick, settings = {}) => element("button", { type: "button", onclick, ...settings }, label);

// What of `all` has a number that is nearest to a wanted one.
export const nearest = (all, wanted, of = (each) => each) =>
  all.reduce((best, each) => (Math.abs(of(each) - wanted) < Math.abs(of(best) - wanted) ? each : best), all[0]);
// A number in the address, if it is a whole one.
export const whole = (text) => (/^\d+$/.test(text ?? "") ? Number(text) : null);

// A field that offers `names`; the element is its label, and has the field as `select`. `pick` gets the name that is chosen.
export function choice(label, names, chosen, pick = null, words = (name) => name) {
  const options = names.map((name) => element("option", { value: name, selected: String(name) === String(chosen) }, words(name)));
  const select = element("select", { onchange: pick && (() => pick(select.value)) }, ...options);
  return Object.assign(element("label", {}, label, select), { select });
}

// What a form does on submission, and a field of lines on Enter; Shift and Enter begin a new line.
export const submitted = (act) => (event) => { event.preventDefault(); act(); };
export const entered = (act) => (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submitted(act)(event);
};

let terms = new Map(), pattern = null;

// Stores the definitions of terms; `explain` then marks the terms wherever they occur.
export function learn(glossary) {
  terms = new Map(Object.entries(glossary).map(([term, meaning]) => [term.replace(/ \(.*/, "").toLowerCase(), meaning]));
  const names = [...terms.keys()].sort((a, b) => b.length - a.length).map((term) => term.replace(/[-]/g, "[- ]"));
  pattern = new RegExp(`\\b(${names.join("|")})(s)?\\b`, "gi");
}

// A text whose terms show their definitions on hover or focus, each at its first occurrence.
export function explain(text) {
  if (!pattern) return [text];
  const parts = [], told = new Set();
  let begin = 0;
  for (const found of text.matchAll(pattern)) {
    const term = found[1].toLowerCase(), meaning = terms.get(term) ?? terms.get(term.replace(" ", "-"));
    if (!meaning || told.has(term)) continue;
    told.add(term);
    parts.push(text.slice(begin, found.index),
      element("dfn", { tabIndex: 0, role: "note", ariaLabel: `${found[0]}: ${meaning}` }, found[0], element("span", { className: "tip", ariaHidden: "true" }, meaning)));
    begin = found.index + found[0].length;
  }
  return [...parts, text.slice(begin)];
}

export const heading = (title, words, formula) => [element("h2", {}, title), element("p", {}, ...explain(words)),
  ...(formula ? [element("p", { className: "formula" }, formula)] : [])];
export const folded = (title, ...parts) => element("details", {}, element("summary", {}, title), ...parts);
export const knobs = (...fields) => element("div", { className: "knobs" }, ...fields);
// A line that says what the pointer or the arrow keys read.
export const told = (text = "\u00a0") => element("p", { className: "shape", ariaLive: "polite" }, text);

// Makes many buttons one tab stop: arrow keys move to the next button, or to the nearest one of the row above or below.
export function together(made) {
  const all = [...made.querySelectorAll("button")], place = (each) => each.getBoundingClientRect();
  const choose = (chosen) => all.forEach((each) => { each.tabIndex = each === chosen ? 0 : -1; });
  choose(all.find((each) => each.ariaPressed === "true") ?? all[0]);
  made.addEventListener("keydown", (event) => {
    const here = document.activeElement, side = { ArrowRight: 1, ArrowLeft: -1 }[event.key], down = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!all.includes(here) || !(side || down)) return;
    event.preventDefault();
    const from = place(here), away = (each) => 1000 * Math.abs(place(each).top - from.top) + Math.abs(place(each).left - from.left);
    const next = side ? all[all.indexOf(here) + side]
      : all.filter((each) => down * (place(each).top - from.top) > from.height / 2).reduce((best, each) => (best && away(best) <= away(each) ? best : each), null);
    if (!next) return;
    choose(next);
    next.focus();
  });
  return made;
}

// `rows` are lists of cells: text, numbers or elements; the first of a row is its name.
export function table(head, rows, kind = "") {
  const cell = (name, value) => {
    const made = element(name, {}, value instanceof Node ? value : typeof value === "number" ? number(value) : value);
    if (typeof value === "string") made.className = "word";
    return made;
  };
  const top = element("tr", {}, ...head.map((value) => cell(value === "" ? "td" : "th", value)));
  const body = rows.map((row) => element("tr", {}, ...row.map((value) => cell("td", value))));
  const made = together(element("table", { className: kind }, element("thead", {}, top), element("tbody", {}, ...body)));
  return element("div", { className: "scroll", tabIndex: 0 }, made);
}

// Rows { word, values, text, kind }: a bar for each value, as long as its share of the largest value.
export function bars(rows) {
  const most = Math.max(...rows.flatMap((row) => row.values.map(Math.abs)), 1e-12);
  const made = element("div", { className: "bars" });
  for (const row of rows) {
    const lengths = row.values.map((value, place) =>
      element("div", { className: `bar ${value < 0 || place ? "other" : ""}`, style: `width: ${(100 * Math.abs(value)) / most}%` }));
    const word = row.word instanceof Node ? row.word : element("span", { className: "word" }, row.word);
    made.append(word, element("div", { className: lengths.length > 1 ? "pair" : "" }, ...lengths), element("span", {}, row.text));
  }
  return made;
}

// The hues have meanings, which the style sheet names: query, key, value, residual, forward, gold.
export function hueOf(name) {
  const style = getComputedStyle(document.documentElement), read = (each) => {
    const hex = style.getPropertyValue(each).trim().slice(1);
    return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
  };
  return { none: read("--canvas"), plus: read(`--${name}`), minus: read("--minus") };
}

const mix = (low, high, at) => low.map((part, place) => Math.round(part + (high[place] - part) * at));
// A colour for a number between -1 and 1: the hue above 0, grey below.
export const shade = (at, { none, plus, minus }) => `rgb(${mix(none, at < 0 ? minus : plus, Number.isFinite(at) ? Math.abs(at) : 0.12).join(" ")})`;
// The square root keeps small numbers visible.
export const signed = (x) => Math.sign(x) * Math.sqrt(Math.min(1, Math.abs(x)));
const segments = new Intl.Segmenter(), isWide = /[^\u0000-\u04ff\u2000-\u2bff]/u;
// At most so many characters, as a reader counts them, apart from what stands beside them in other directions of writing. One that the
// fonts of the page lack comes from another font, in which it may be three times as wide.
export function shortened(text, most) {
  const parts = [...segments.segment(text)].map(({ segment }) => [segment, isWide.test(segment) ? 3 : 1]), isLong = parts.reduce((sum, [, wide]) => sum + wide, 0) > most;
  let room = most - isLong;
  return `\u2068${parts.filter(([, wide]) => (room -= wide) >= 0).map(([segment]) => segment).join("")}${isLong ? "…" : ""}\u2069`;
}

const SHADES = 255;
// Pixels for values from -SHADES to SHADES, and one for values that are not finite.
function colours(hue) {
  const { none, plus, minus } = hueOf(hue);
  const shades = Array.from({ length: 2 * SHADES + 1 }, (_, place) => mix(none, place < SHADES ? minus : plus, Math.abs(place - SHADES) / SHADES));
  return new Uint32Array(new Uint8Array([...shades, mix(none, [128, 128, 128], 0.25)].flatMap((shade) => [...shade, 255])).buffer);
}

export const largestOf = (values) => values.reduce((most, value) => (Number.isFinite(value) ? Math.max(most, Math.abs(value)) : most), 0);
// The places of the numbers of the largest magnitude, the largest first.
export const strongest = (values, count) => [...values.keys()].sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, count);

// A pixel for every number of a matrix: `hue` above 0, grey below, stronger for larger numbers. With `byRow` each row has its own
// scale, on which the square root of a number counts: that is for attention, where the first row would else set the scale.
export function matrix(values, rows, columns, { most, hue = "residual", byRow = false } = {}) {
  const canvas = element("canvas", { width: columns, height: rows });
  const context = canvas.getContext("2d");
  const picture = context.createImageData(columns, rows);
  const pixels = new Uint32Array(picture.data.buffer), shades = colours(hue), all = byRow ? 1 : most ?? (largestOf(values) || 1);
  for (let row = 0; row < rows; row++) {
    const scale = byRow ? largestOf(values.subarray(row * columns, (row + 1) * columns)) || 1 : all;
    for (let place = row * columns; place < (row + 1) * columns; place++) {
      const at = byRow ? signed(values[place] / scale) : values[place] / scale;
      pixels[place] = shades[Number.isFinite(at) ? SHADES + Math.round(SHADES * Math.max(-1, Math.min(1, at))) : 2 * SHADES + 1];
    }
  }
  context.putImageData(picture, 0, 0);
  return canvas;
}

// A vector as one row of colours, which tells its numbers to the pointer and the arrow keys; "numbers" writes the first ones below.
export function strip(values, hue, { most, numbers = false, name = "A vector" } = {}) {
  const told = element("output", { className: "shape" });
  const made = map(values, 1, values.length, [], [], { most, hue }, (_, column) => { told.textContent = `${column}: ${number(values[column])}`; });
  made.querySelector("canvas").setAttribute("aria-label", `${name}: ${values.length} numbers as colours; arrow keys read them.`);
  const written = numbers ? [element("span", { className: "shape numbers" }, [...values.subarray(0, 12)].map(number).join("  "))] : [];
  return element("div", { className: "strip" }, made, told, ...written);
}

// A matrix with names at its sides; calls `onCell(row, column)` for the cell under the pointer or the arrow keys.
export function map(values, rows, columns, rowNames, columnNames, scale, onCell) {
  const canvas = matrix(values, rows, columns, scale);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `A map of ${rows} rows and ${columns} columns; arrow keys move between cells.`);
  let row = rows - 1, column = 0;
  const tell = () => onCell(row, column);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    row = Math.min(rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * rows)));
    column = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * columns)));
    tell();
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    row = Math.min(rows - 1, Math.max(0, row + step[0]));
    column = Math.min(columns - 1, Math.max(0, column + step[1]));
    tell();
  });
  const named = (names, kind) => {
    const every = Math.ceil(names.length / 64);
    const parts = names.map((name, place) => element("span", {}, place % every ? "" : visible(name).slice(0, 12)));
    return element("div", { className: kind, ariaHidden: "true" }, ...parts);
  };
  return element("div", { className: "map" }, named(rowNames, "rows"), canvas, named(columnNames, "columns"));
}

// A part of a picture, as the last one within `parent`.
export function draw(parent, name, settings, text) {
  const part = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(settings)) part.setAttribute(key, value);
  if (text != null) part.textContent = text;
  parent.append(part);
  return part;
}

// A picture of its own, whose method `draw` adds a part.
export function picture(width, height, label) {
  const made = draw(new DocumentFragment(), "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  return Object.assign(made, { draw: (...part) => draw(made, ...part) });
}

// Formats a number with as many digits as help to compare two numbers of its size.
export const precise = (x) => (x !== 0 && Math.abs(x) < 0.01 ? x.toExponential(2)
  : Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : Math.abs(x) >= 100 ? x.toFixed(1) : number(x));
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
export const compact = (x) => (x !== 0 && Math.abs(x) < 0.01 ? x.toExponential(1) : short.format(x));
