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

export function heading(title, words, formula) {
  const parts = [element("h2", {}, title), element("p", {}, words)];
  if (formula) parts.push(element("p", { className: "formula" }, formula));
  return parts;
}

// `rows` are lists of cells: text, numbers or elements; the first of a row is its name.
export function table(head, rows, kind = "") {
  const cell = (name, value) => {
    const made = element(name, {}, value instanceof Node ? value : typeof value === "number" ? number(value) : value);
    if (typeof value === "string") made.className = "word";
    return made;
  };
  const top = element("tr", {}, ...head.map((value) => cell("th", value)));
  const body = rows.map((row) => element("tr", {}, ...row.map((value) => cell("td", value))));
  const made = element("table", { className: kind }, element("thead", {}, top), element("tbody", {}, ...body));
  return element("div", { className: "scroll", tabIndex: 0 }, made);
}

// Rows { word, values, text, kind }: a bar for each value, as long as it is beside the largest of all.
export function bars(rows) {
  const most = Math.max(...rows.flatMap((row) => row.values.map(Math.abs)), 1e-12);
  const made = element("div", { className: "bars" });
  for (const row of rows) {
    const lengths = row.values.map((value, place) => {
      const bar = element("div", { className: `bar ${value < 0 || place ? "other" : ""}` });
      bar.style.width = `${(100 * Math.abs(value)) / most}%`;
      return bar;
    });
    const word = row.word instanceof Node ? row.word : element("span", { className: "word" }, row.word);
    made.append(word, element("div", { className: lengths.length > 1 ? "pair" : "" }, ...lengths), element("span", {}, row.text));
  }
  return made;
}

const mix = (low, high, at) => low.map((part, place) => Math.round(part + (high[place] - part) * at));

function colours() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return dark ? { none: [30, 35, 41], plus: [86, 180, 233], minus: [240, 162, 78] }
    : { none: [247, 248, 246], plus: [0, 84, 148], minus: [194, 100, 10] };
}

// A pixel for every number of a matrix: blue above 0, orange below, stronger towards the largest.
export function matrix(values, rows, columns, most) {
  const canvas = element("canvas", { width: columns, height: rows });
  const context = canvas.getContext("2d");
  const picture = context.createImageData(columns, rows);
  const { none, plus, minus } = colours();
  let largest = most ?? 0;
  if (!largest) for (const value of values) if (Number.isFinite(value)) largest = Math.max(largest, Math.abs(value));
  for (let place = 0; place < rows * columns; place++) {
    const value = values[place];
    const at = Number.isFinite(value) ? Math.min(1, Math.abs(value) / (largest || 1)) : 0;
    const colour = Number.isFinite(value) ? mix(none, value < 0 ? minus : plus, at) : mix(none, [128, 128, 128], 0.25);
    picture.data.set([...colour, 255], 4 * place);
  }
  context.putImageData(picture, 0, 0);
  return canvas;
}

// A matrix with names at its sides; `onCell(row, column)` hears of the cell under the pointer or the arrow keys.
export function map(values, rows, columns, rowNames, columnNames, most, onCell) {
  const canvas = matrix(values, rows, columns, most);
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

export function picture(width, height) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  made.setAttribute("viewBox", `0 0 ${width} ${height}`);
  made.setAttribute("role", "img");
  made.draw = (name, settings, text) => {
    const part = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(settings)) part.setAttribute(key, value);
    if (text != null) part.textContent = text;
    made.append(part);
    return part;
  };
  return made;
}
