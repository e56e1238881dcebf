// The curves of runs as uPlot draws them: one colour for each run, and one crosshair, smoothing and scale for all charts.
import { button, compact, element, explain, precise, table } from "./draw.js";
import { uPlot } from "./libraries.js";

// The parts of a chart are rows of a split with a factor; `isNoisy` charts can be smoothed.
const CHARTS = [
  ["Loss", [["train", "loss"], ["validation", "loss"]], true], ["Bits per byte", [["validation", "bits_per_byte"]]],
  ["Learning rate", [["train", "learning_rate"]]], ["Gradient norm", [["train", "grad_norm"]], true],
  ["Tokens per second", [["train", "tokens_per_second"]], true], ["Memory, MB", [["train", "memory_bytes", 1e-6]]],
  ["Busy processor cores", [["train", "busy_cores"]], true],
  // Of runs that learn from rewards or from pairs.
  ["Reward", [["train", "reward"], ["validation", "reward"]], true], ["Margin of rewards", [["train", "margin"], ["validation", "margin"]], true],
  ["Tokens of an answer", [["train", "length"], ["validation", "length"]], true], ["Divergence from the reference", [["train", "divergence"]], true],
];
export const AXES = { step: "Steps", tokens: "Tokens", seconds: "Time" };
const NAMES = { train: "training", validation: "held-out" }, TIMES = [1, 5, 15, 30, 60, 300, 900, 1800, 3600, 7200, 21600, 43200, 86400];
const MOST_ROWS = 200, COLOURS = 6;
const duration = (s) => (s < 120 ? `${compact(s)} s` : s < 7200 ? `${compact(s / 60)} min` : `${compact(s / 3600)} h`);
export const placed = (axis, value) => (axis === "seconds" ? duration(value) : axis === "step" ? `step ${value.toLocaleString("en")}` : `${compact(value)} tokens`);
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// An exponential mean of the last values, in which each one counts `weight` times as much as the next. Division by 1 - weight^n
// makes up for the missing past of the first values (Kingma and Ba 2015, section 3).
export function smoothed(values, weight) {
  let mean = 0, past = 1;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    past *= weight;
    return mean / (1 - past);
  });
}

// Round places of a logarithmic axis: in even steps within a decade, else 1, 2 and 5 of each decade, or the decades alone.
function ticks(low, high) {
  const isWide = high > 10 * low, unit = 10 ** Math.floor(Math.log10(isWide ? low : high - low)), digits = high > 1000 * low ? [1] : [1, 2, 5];
  const step = [0.1, 0.2, 0.5, 1, 2].find((each) => (high - low) / (each * unit) <= 6) * unit, decades = Math.ceil(Math.log10(high / low)) + 1;
  const found = Array.from({ length: isWide ? decades * digits.length : 8 }, (_, at) =>
    (isWide ? digits[at % digits.length] * unit * 10 ** Math.floor(at / digits.length) : (Math.ceil(low / step) + at) * step));
  return found.map((value) => Number(value.toPrecision(12))).filter((value) => value >= low && value <= high);
}

// The charts of `runs`, a list of [name, rows]: each has a title and lines.
export function charted(runs, axis) {
  const split = runs.map(([run, rows]) => [run, Object.groupBy(rows, (row) => row.split)]);
  const scores = new Set(split.flatMap(([, { evaluation = [] }]) => evaluation.flatMap((row) => Object.keys(row).filter((key) => key.includes("/")))));
  const all = [...CHARTS, ...[...scores].map((key) => [key.replace("/", ": ").replaceAll("_", " "), [["evaluation", key]]])];
  return all.map(([title, parts, isNoisy]) => ({ title, isNoisy, lines: split.flatMap(([run, rows], place) => parts.map(([name, key, factor = 1]) => {
    const found = (rows[name] ?? []).filter((row) => Number.isFinite(row[key]) && Number.isFinite(row[axis])).sort((a, b) => a[axis] - b[axis]);
    return { name: parts.length > 1 ? `${run} ${NAMES[name]}` : run, colour: colour(`run-${place % COLOURS}`), isHeldOut: name === "validation",
      xs: found.map((row) => row[axis]), ys: found.map((row) => row[key] * factor) };
  })).filter((line) => line.xs.length) })).filter((chart) => chart.lines.length);
}

// `on` may have `choose(value)`, called with a chosen place of the axis, and `zoom(isZoomed)`; `beside` stands beside the first chart.
export function curves(on = {}, beside = "") {
  const numbers = element("details", { ontoggle: () => list() }, element("summary", {}, "The numbers as a table"));
  const charts = element("div", { className: "charts" }), hidden = new Set();
  let Plot = null, plots = [], signature = "", place = null, settings = {}, isZoomed = false;

  function aligned(chart) {
    const tables = chart.lines.map((line) => (smooths(chart, line) ? [line.xs, line.ys, smoothed(line.ys, settings.weight)] : [line.xs, line.ys]));
    return Plot.join([...tables, [settings.span]]);
  }
  const smooths = (chart, line) => settings.weight > 0 && chart.isNoisy && !line.isHeldOut;

  function build(chart) {
    const series = [{}], told = element("span", { className: "shape at" }), legend = element("div", { className: "legend" }, told);
    const text = { stroke: colour("faint"), font: "11px Inter, system-ui, sans-serif", ticks: { show: false }, grid: { stroke: colour("line"), width: 1 } };
    const { isLog } = chart, isTime = settings.axis === "seconds";
    const entries = chart.lines.map((line) => {
      const isSmooth = smooths(chart, line), show = !hidden.has(line.name), raw = series.length;
      if (isSmooth) series.push({ stroke: `${line.colour}40`, width: 1, points: { show: false }, show });
      series.push({ stroke: line.colour, width: isSmooth ? 2 : 1.5, dash: line.isHeldOut ? [6, 4] : undefined, show,
        points: { show: line.xs.length === 1 || (line.isHeldOut && line.xs.length <= 60), size: 5, fill: line.colour } });
      const swatch = element("i", { className: line.isHeldOut ? "held-out" : "", style: `border-color: ${line.colour}` }), value = element("b");
      const made = button(swatch, () => toggle(line.name), { ariaPressed: String(show), title: `Show or hide ${line.name}` });
      made.append(line.name, value);
      legend.append(made);
      return { line, raw, smooth: isSmooth ? raw + 1 : null, value, button: made };
    });
    const linear = settings.isLog && !isLog ? [element("small", {}, " linear, as values are not above 0")] : [];
    const title = element("figcaption", {}, ...explain(chart.title), ...linear);
    const stage = element("div", { className: "curve" }), figure = element("figure", { className: `chart ${chart.title === "Loss" ? "first" : ""}` }, title, legend, stage);
    charts.append(figure);
    const plot = new Plot({
      width: stage.clientWidth || 320, height: stage.clientHeight || 190, legend: { show: false }, series, padding: [8, 14, 0, 0],
      scales: { x: { time: false }, y: isLog ? { distr: 3, range: (_, low, high) => [low / 1.05, high * 1.05] } : {} },
      axes: [{ ...text, size: 28, space: 60, values: (_, at) => at.map(isTime ? duration : compact), ...(isTime ? { incrs: TIMES } : {}) },
        { ...text, size: 54, values: (_, at) => at.map(compact), ...(isLog ? { splits: (self) => ticks(self.scales.y.min, self.scales.y.max), filter: (_, at) => at } : {}) }],
      cursor: { y: false, sync: { key: "curves", scales: ["x", null] }, points: { size: 7 }, bind: { mouseleave: () => () => { point(place); return null; } } },
      hooks: { setCursor: [tell], setScale: [(self, key) => key === "x" && plots.includes(self) && scaled(self)] },
    }, aligned(chart), stage);
    figure.plot = Object.assign(plot, { entries, told, title: chart.title });
    for (const [key, value] of Object.entries({ tabindex: 0, role: "slider", "aria-label": `${chart.title}: the crosshair` })) plot.over.setAttribute(key, value);
    plot.over.addEventListener("click", () => on.choose?.(plot.posToVal(plot.cursor.left, "x")));
    plot.over.addEventListener("keydown", (event) => keys(event, plot));
    return plot;
  }

  // Whether the axis shows less than everything; the button that undoes it is only of use then.
  function scaled(self) {
    const xs = self.data[0];
    isZoomed = self.scales.x.min > xs[0] || self.scales.x.max < xs.at(-1);
    on.zoom?.(isZoomed);
  }

  // Writes the values under the crosshair of a chart, or its last ones, into its legend.
  function tell(self) {
    if (!self.entries) return;
    const isOver = self.cursor.left >= 0, place = (series) => (isOver ? self.cursor.idxs[series] : self.data[series].findLastIndex((y) => y !== undefined));
    const read = (series) => (self.data[series][place(series)] === undefined ? "–" : precise(self.data[series][place(series)]));
    const xs = self.entries.map(({ raw }) => self.data[0][place(raw)]).filter((x) => x !== undefined), here = isOver ? self.posToVal(self.cursor.left, "x") : Math.max(...xs);
    const at = xs.sort((a, b) => Math.abs(a - here) - Math.abs(b - here))[0];
    if (at === undefined) return;
    self.told.textContent = placed(settings.axis, at);
    for (const { raw, smooth, value } of self.entries) value.textContent = smooth ? `${read(smooth)} (${read(raw)})` : read(raw);
    const said = self.entries.map(({ line, value }) => `${line.name} ${value.textContent}`).join(", ");
    for (const [key, value] of Object.entries({ valuemin: self.data[0][0], valuemax: self.data[0].at(-1), valuenow: at, valuetext: `${self.told.textContent}: ${said}` }))
      self.over.setAttribute(`aria-${key}`, value);
  }

  // Puts the crosshair of every chart at a place of the axis; without one it leaves them.
  function point(value) {
    for (const plot of plots) {
      const left = value == null ? -10 : plot.valToPos(value, "x");
      plot.setCursor({ left: left >= 0 && left <= plot.over.clientWidth ? left : -10, top: 0 }, true, false);
    }
  }

  // uPlot changes its scales and sizes at the end of a task; the crosshair can be placed after that.
  const settle = () => queueMicrotask(() => point(place));

  function zoom(low, high) {
    for (const plot of plots) plot.setScale("x", { min: low ?? plot.data[0][0], max: high ?? plot.data[0].at(-1) });
    settle();
  }

  function toggle(name) {
    if (!hidden.delete(name)) hidden.add(name);
    for (const plot of plots) {
      for (const { line, raw, smooth, button } of plot.entries.filter((each) => each.line.name === name)) {
        button.ariaPressed = String(!hidden.has(line.name));
        for (const each of [raw, smooth]) if (each) plot.setSeries(each, { show: !hidden.has(line.name) });
      }
    }
  }

  function keys(event, plot) {
    const xs = plot.data[0], here = plot.cursor.left >= 0 ? plot.cursor.idx : xs.length - 1, far = Math.ceil(xs.length / 20), { min, max } = plot.scales.x;
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, PageDown: here - far, PageUp: here + far, Home: 0, End: xs.length - 1 }[event.key];
    const factor = { "+": 0.25, "-": 1 }[event.key];
    if (to != null) point(place = xs[Math.max(0, Math.min(xs.length - 1, to))]);
    else if (factor) zoom(Math.max(xs[0], xs[here] - factor * (max - min)), Math.min(xs.at(-1), xs[here] + factor * (max - min)));
    else if (event.key === "Enter") on.choose?.(xs[here]);
    else if (event.key === "0" || event.key === "Escape") zoom();
    else return;
    event.preventDefault();
  }

  function list() {
    if (!numbers.open || !plots.length) return;
    const named = plots.flatMap((plot) => plot.entries.map(({ line }) => ({ head: `${plot.title}: ${line.name}`, line })));
    const [xs, ...columns] = Plot.join(named.map(({ line }) => [line.xs, line.ys])), every = Math.ceil(xs.length / MOST_ROWS);
    const rare = columns.filter((_, place) => named[place].line.xs.length <= MOST_ROWS / 2);
    const kept = [...xs.keys()].filter((at) => at % every === 0 || rare.some((column) => column[at] !== undefined));
    const rows = kept.map((at) => [xs[at].toLocaleString("en"), ...columns.map((column) => (column[at] === undefined ? "" : precise(column[at])))]);
    numbers.replaceChildren(numbers.firstElementChild,
      element("p", {}, every > 1 ? `Every ${every}th of ${xs.length.toLocaleString("en")} places, and all of rare values.` : "All logged places."),
      table([AXES[settings.axis], ...named.map(({ head }) => head)], rows));
  }

  // Draws charts with `settings` { axis, weight, isLog }; charts that exist only get their new points.
  async function draw(found, given) {
    Plot ??= await uPlot();
    const xs = found.flatMap((chart) => chart.lines.flatMap((line) => [line.xs[0], line.xs.at(-1)]));
    settings = { ...given, span: [Math.min(...xs), Math.max(...xs)] };
    for (const chart of found) chart.isLog = given.isLog && chart.lines.every((line) => line.ys.every((y) => y > 0));
    const looks = found.map((chart) => [chart.title, chart.isLog, chart.lines.map((line) => [line.name, line.colour])]);
    const now = JSON.stringify([given.axis, given.isLog, given.weight > 0, looks]);
    if (now === signature) found.forEach((chart, at) => {
      plots[at].entries.forEach((entry, index) => { entry.line = chart.lines[index]; });
      plots[at].setData(aligned(chart), !isZoomed);
      if (isZoomed) plots[at].redraw();
    });
    else {
      clear();
      signature = now;
      for (const chart of found) plots.push(build(chart));
      charts.firstElementChild?.after(beside);
      if (!found.length) charts.append(element("p", {}, "Nothing yet."), beside);
    }
    settle();
    list();
  }

  function clear() {
    for (const plot of plots) plot.destroy();
    [plots, signature, isZoomed] = [[], "", false];
    on.zoom?.(false);
    charts.replaceChildren();
  }
  const fit = () => {
    for (const plot of plots) {
      const { clientWidth: width, clientHeight: height } = plot.root.parentElement;
      plot.setSize({ width, height });
    }
    settle();
  };
  new ResizeObserver(fit).observe(charts);
  return { made: element("div", {}, charts, numbers), draw, clear, zoom, at: (value) => point(place = value) };
}
