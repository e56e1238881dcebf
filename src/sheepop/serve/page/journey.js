// The journey: one picture of a network. Tokens enter on the left and become ribbons, the residual stream; every block adds to
// them at two stations; the likeliest next tokens leave on the right. It needs the numbers of `interpret/journey.py` only.
import { compact, draw, element, hueOf, share, shade, shortened, signed, visible } from "./draw.js";

const TOP = 46, FAINT = 0.06, NAMES = { attention: "Attention", mixer: "Mixer", forward: "Feed-forward" };
const between = (low, value, high) => Math.max(low, Math.min(high, value));

// What the strength of a ribbon's colour means, and which channels are beyond it.
const legend = ({ giants }, most) => ["99 % of a vector's numbers lie within full colour", ...(giants.length
  ? [`Beyond it: ${giants.slice(0, most).map(({ channel, times }, place) => `${place ? "" : "channel "}${channel} (${compact(times)}×)`).join(", ")}`] : [])];

// Where everything stands: the stations from left to right, and the rows of the tokens from top to bottom.
export function layout(width, data, unfolded) {
  const isNarrow = width < 640, names = isNarrow ? 54 : 116, odds = isNarrow ? 106 : 190, end = isNarrow ? 12 : 22, layers = data.weights.length;
  const row = between(13, Math.round(470 / data.tokens.length), 70), place = data.position - data.start;
  const tall = Math.max(1.5 * row, 44), ys = [];
  let y = TOP;
  data.tokens.forEach((_, t) => {
    const high = t === place ? tall : row;
    ys.push(y + high / 2);
    y += high;
  });
  const from = names + end + 6, to = width - odds - end, room = to - from;
  const wide = layers === 1 ? room : Math.max(room / layers, Math.min(0.4 * room, 230)), slim = layers === 1 ? 0 : (room - wide) / (layers - 1);
  const stations = [{ id: "embedding", kind: "embedding", x: names, width: end, name: "Embedding" }], blocks = [];
  let x = from;
  for (let layer = 0; layer < layers; layer++) {
    const broad = layer === unfolded ? wide : slim, thick = between(1.5, 0.2 * broad, 24), kind = data.mixed_by[layer];
    blocks.push({ layer, x, width: broad });
    stations.push({ id: `attention.${layer}`, layer, kind, x: x + 0.5 * broad - thick / 2, width: thick, name: `${NAMES[kind]} of block ${layer}`, block: broad },
      { id: `forward.${layer}`, layer, kind: "forward", x: x + 0.84 * broad - thick / 2, width: thick, name: `Feed-forward of block ${layer}`, block: broad });
    x += broad;
  }
  stations.push({ id: "prediction", kind: "prediction", x: to, width: end, name: "Prediction" });
  const ribbon = between(7, 0.6 * row, 32), foot = Math.max(y, TOP + data.next.length * 24) + 12, notes = legend(data, isNarrow ? 3 : 8);
  return { width, height: foot + 15 * notes.length, foot, notes, isNarrow, names, odds, row, ribbon, ys, place, stations, blocks, bottom: y, to };
}

// The colours of the ribbons: K strips for each token, one colour between two stations, since only stations change the stream.
function ribbons(svg, data, at) {
  const frame = draw(svg, "foreignObject", { x: 0, y: 0, width: at.width, height: at.height, class: "ribbons" }), dense = devicePixelRatio || 1;
  const canvas = element("canvas", { width: Math.round(at.width * dense), height: Math.round(at.height * dense), ariaHidden: "true" });
  const pen = canvas.getContext("2d"), hue = hueOf("residual"), count = data.channels.length;
  frame.append(canvas);
  pen.scale(dense, dense);
  data.stream.forEach((rows, point) => {
    const [left, right] = [at.stations[point].x, at.stations[point + 1].x], scale = data.scale[point];
    rows.forEach((numbers, t) => numbers.forEach((value, channel) => {
      pen.fillStyle = shade(signed(value / (scale[t] || 1)), hue);
      pen.fillRect(left, at.ys[t] - at.ribbon / 2 + (channel * at.ribbon) / count, right - left + 0.5, at.ribbon / count + 0.3);
    }));
  });
}

// What each station adds to the likeliest next token, as a wedge that is poured into the chosen ribbon behind it.
function wedges(svg, data, at) {
  const names = at.stations.slice(0, -1).map((station) => station.id);
  const most = Math.max(...names.map((name) => Math.abs(data.adds[name] ?? 0)), 1e-12);
  const y = at.ys[at.place], edge = at.ribbon / 2, tall = 16, parts = draw(svg, "g", { class: "adds" });
  names.forEach((name, point) => {
    const value = data.adds[name] ?? 0, out = (tall * Math.abs(value)) / most, station = at.stations[point];
    const left = station.x + station.width / 2, right = at.stations[point + 1].x;
    const side = (sign) => `M${left},${y + sign * edge} v${sign * out} Q${(left + right) / 2},${y + sign * (edge + out)} ${right},${y + sign * edge} Z`;
    const kind = value < 0 ? "add against" : "add";
    const made = draw(parts, "path", { class: kind, "data-part": name, "data-width": out.toFixed(3), d: `${side(-1)} ${side(1)}` });
    draw(made, "title", {}, `${station.name}: ${value < 0 ? "" : "+"}${value.toFixed(3)} to the logit of ${visible(data.next[0].text)}`);
  });
}

const arc = (x, from, to, bend) => `M${x},${from} C${x - bend},${from} ${x - bend},${to} ${x},${to}`;
const bendOf = (at, station, from, to) => Math.min(0.46 * station.block, 6 + 0.16 * Math.abs(at.ys[to] - at.ys[from]));

// Attention of all tokens, faintly: a weight is as thick as it is large, in four classes so that long texts stay quick.
function quietArcs(svg, data, at) {
  const made = draw(svg, "g", { class: "arcs quiet" });
  for (const station of at.stations) {
    const weights = station.kind === "attention" && data.weights[station.layer], classes = [[], [], [], []];
    if (!weights) continue;
    weights.forEach((row, t) => row.forEach((weight, s) => {
      if (s !== t && weight >= FAINT) classes[Math.min(3, Math.floor(4 * weight))].push(arc(station.x, at.ys[s], at.ys[t], bendOf(at, station, s, t)));
    }));
    classes.forEach((paths, index) => paths.length && draw(made, "path", { d: paths.join(" "), "stroke-width": 0.6 + 1.1 * index }));
  }
}

// The arcs of one token in every block: where it looks (blue), and who looks at it (orange). An arc is as thick as the
// square root of its weight, so that small weights are seen beside that of the first token, which is often near 1.
function arcsOf(group, data, at, t) {
  group.replaceChildren();
  for (const station of at.stations) {
    const weights = station.kind === "attention" && data.weights[station.layer];
    if (!weights) continue;
    const thick = between(3, station.block / 20, 5), line = (from, to, weight, kind) => {
      if (!(weight >= 0.02)) return;
      const d = from === to ? `M${station.x - 1},${at.ys[t] - 3} q-9,3 0,6` : arc(station.x, at.ys[from], at.ys[to], bendOf(at, station, from, to));
      const told = { "data-layer": station.layer, "data-from": from, "data-to": to, "data-weight": weight };
      const made = draw(group, "path", { class: kind, d, ...told, "stroke-width": (thick * Math.sqrt(weight)).toFixed(2) });
      draw(made, "title", {}, `${visible(data.tokens[to].text)} looks at ${visible(data.tokens[from].text)} in block ${station.layer}: ${share(weight)}, the mean over heads`);
    };
    weights.forEach((row, other) => other > t && line(t, other, row[t], "found"));
    weights[t].forEach((weight, s) => line(s, t, weight, "looks"));
  }
}

// The likeliest next tokens, with a band from the end of the chosen ribbon to each, as broad as it is likely.
function odds(svg, data, at, on) {
  const made = draw(svg, "g", { class: "odds" }), begin = at.stations.at(-1), left = begin.x + begin.width, x = left + (at.isNarrow ? 12 : 44);
  const wide = at.width - x - 4, gap = 24, all = data.next.length * gap, from = between(TOP - 12, at.ys[at.place] - all / 2, Math.max(TOP - 12, at.foot - all - 10));
  data.next.forEach((token, rank) => {
    const told = at.isNarrow ? `${Math.round(100 * token.probability)} %` : share(token.probability);
    const y = from + gap * rank + gap / 2, y0 = at.ys[at.place], part = draw(made, "g", { class: "odd", "data-key": `next.${rank}`, role: "button", tabindex: -1,
      "aria-label": `${visible(token.text)}, ${told}${on.write ? "; Enter writes it" : ""}` });
    draw(part, "path", { class: "fan", d: `M${left},${y0} C${left + 24},${y0} ${x - 24},${y} ${x},${y}`, "stroke-width": Math.max(0.4, 22 * token.probability).toFixed(2) });
    draw(part, "rect", { class: "space", x, y: y - gap / 2 + 1, width: wide, height: gap - 2 });
    const width = Math.max(1, wide * token.probability).toFixed(2);
    draw(part, "rect", { class: "bar", x, y: y - gap / 2 + 2, width, height: gap - 4, rx: 3, "data-probability": token.probability });
    draw(part, "text", { x: x + 6, y: y + 4, class: "word" }, shortened(visible(token.text), at.isNarrow ? 6 : 10));
    draw(part, "text", { x: at.width - 8, y: y + 4, "text-anchor": "end", class: "share" }, told);
    draw(part, "title", {}, `${visible(token.text)}: ${share(token.probability)}.${on.write ? " A click writes it." : ""}`);
    part.addEventListener("click", () => on.write?.(token.id));
  });
}

function stationsOf(svg, data, at, chosen, on) {
  const all = draw(svg, "g", { class: "stations" }), current = chosen.open ?? "embedding";
  const every = Math.ceil(22 / Math.min(22, ...at.blocks.map((block) => block.width))), middle = { "text-anchor": "middle" };
  for (const block of at.blocks) {
    const isWide = block.width > 90, name = isWide ? `Block ${block.layer}` : block.layer;
    if (isWide || block.layer % every === 0) draw(all, "text", { class: "block", x: block.x + block.width * 0.62, y: 14, ...middle }, name);
  }
  for (const station of at.stations) {
    const adds = data.adds[station.id], told = adds == null ? "" : `, adds ${adds.toFixed(3)} to the logit of ${visible(data.next[0].text)}`;
    const made = draw(all, "g", { class: `station of-${station.kind}${station.block < 30 ? " folded" : ""}`, role: "button", "data-key": station.id,
      tabindex: station.id === current ? 0 : -1, "aria-label": `${station.name}${told}`, "aria-expanded": String(station.id === chosen.open) });
    draw(made, "rect", { x: station.x - 3, y: TOP - 8, width: station.width + 6, height: at.bottom - TOP + 12, class: "space" });
    draw(made, "rect", { x: station.x, y: TOP - 6, width: station.width, height: at.bottom - TOP + 8, rx: Math.min(6, station.width / 2), class: "body" });
    const label = station.block == null ? (at.isNarrow ? "" : station.name) : station.block > 185 ? NAMES[station.kind] : "";
    draw(made, "text", { x: station.x + station.width / 2, y: station.kind === "prediction" && at.blocks.at(-1).width > 90 ? 14 : 32, ...middle }, label);
    draw(made, "title", {}, `${station.name}${told}`);
    made.addEventListener("click", () => on.open?.(station.id === chosen.open ? null : station.id, station.layer));
    for (const event of ["pointerenter", "focus"]) made.addEventListener(event, () => on.point?.(station));
  }
}

// The picture. `on` has what to do: open(station, layer), choose(position), write(id), point(station); each may be missing.
export function journey(data, chosen, width, on = {}) {
  const at = layout(width, data, between(0, chosen.layer ?? 0, data.weights.length - 1));
  const svg = draw(new DocumentFragment(), "svg", { class: "journey-picture", width: at.width, height: at.height, viewBox: `0 0 ${at.width} ${at.height}`, role: "group",
    "aria-label": `${data.tokens.length} tokens on their way through ${data.weights.length} blocks to the next token. `
      + "Left and right move between stations, up and down between tokens." });
  wedges(svg, data, at);
  ribbons(svg, data, at);
  quietArcs(svg, data, at);
  const arcs = draw(svg, "g", { class: "arcs" }), rows = draw(svg, "g", { class: "names" });
  data.tokens.forEach((token, t) => {
    const made = draw(rows, "g", { class: t === at.place ? "name chosen" : "name", "data-key": `token.${token.position}`, role: "button", tabindex: -1,
      "font-size": between(10, at.row - 6, 14), "aria-pressed": String(t === at.place), "aria-label": `Token ${token.position}: ${visible(token.text)}` });
    draw(made, "rect", { class: "space", x: 0, y: at.ys[t] - at.row / 2, width: at.names - 6, height: at.row });
    const shown = shortened(visible(token.text), at.isNarrow ? 6 : 13);
    draw(made, "text", { x: at.names - 10, y: at.ys[t] + 4, "text-anchor": "end" }, shown);
    draw(made, "title", {}, `Token ${token.position}, id ${token.id}: ${shortened(visible(token.text), 900)}`);
    made.addEventListener("click", () => on.choose?.(token.position));
    made.addEventListener("pointerenter", () => { arcsOf(arcs, data, at, t); on.point?.({ kind: "tokens", position: token.position }); });
    made.addEventListener("pointerleave", () => arcsOf(arcs, data, at, at.place));
  });
  stationsOf(svg, data, at, chosen, on);
  odds(svg, data, at, on);
  at.notes.forEach((words, line) => draw(svg, "text", { class: "note", x: 4, y: at.foot + 15 * line + 8 }, words));
  arcsOf(arcs, data, at, at.place);
  svg.addEventListener("keydown", (event) => keys(event, svg, data, on));
  return Object.assign(svg, { at });
}

// The picture is one tab stop: left and right move between stations and the next tokens, up and down choose a token.
function keys(event, svg, data, on) {
  const side = { ArrowRight: 1, ArrowLeft: -1 }[event.key], up = { ArrowDown: 1, ArrowUp: -1 }[event.key], here = document.activeElement;
  if (event.key === "Enter" || event.key === " ") here.dispatchEvent(new MouseEvent("click"));
  else if (side) {
    const all = [...svg.querySelectorAll(".station, .odd")], next = all[all.indexOf(here) + side];
    for (const each of all) each.setAttribute("tabindex", each === (next ?? here) ? 0 : -1);
    next?.focus();
  } else if (up) on.choose?.(between(0, data.position + up, data.length - 1));
  else return;
  event.preventDefault();
}
