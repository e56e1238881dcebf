// The first view of a trace: the picture with its column of explanations, what is opened below it, and its motion.

import { ask } from "./api.js";
import { column, topicOf, TOPICS, TOUR } from "./explain.js";
import { element, share, visible } from "./draw.js";
import { journey, layout } from "./journey.js";
import { opened } from "./opened.js";

// A pass takes four seconds at speed 1. The motion goes on from a written token to the next one, so it outlives a view.
const SECONDS = 4, motion = { isPlaying: false, speed: 1, place: 0, frame: 0 };

export function stop() {
  motion.isPlaying = false;
  cancelAnimationFrame(motion.frame);
}

export async function show(trace, chosen, change) {
  const name = `${chosen.position}.${chosen.start}`, before = trace.sizes.encoder_layers;
  const data = await ((trace.journeys ??= {})[name] ??= ask(trace.number, "journey", { position: chosen.position, start: chosen.start }));
  const layer = Math.max(0, chosen.layer - before), stations = layout(1000, data, layer).stations, open = stations.find((each) => each.id === chosen.open);
  const panel = open && await opened(open, trace, chosen, change, data);
  const focused = document.activeElement?.closest("[data-key]")?.dataset.key;
  const first = data.mixed_by.indexOf("attention");
  const go = (step) => {
    if (step) localStorage.setItem("tour", step); else localStorage.removeItem("tour");
    const topic = TOUR[step - 1], wanted = ["embedding", "heads", "forward", "prediction"].includes(topic) ? TOPICS[topic][4] : null;
    change({ tour: step, open: topic === "heads" && first > 0 ? `attention.${first}` : wanted, layer: before + Math.max(0, first) });
  };
  const side = column(chosen.tour ? TOUR[chosen.tour - 1] : open ? topicOf(open) : "whole", chosen.tour, go);
  const stage = element("div", { className: "stage" }), made = element("div", { className: "journey" });
  const controls = bar(trace, data, change);
  made.append(element("div", { className: "picture-side" }, controls, stage, ...(panel ? [panel] : [])), side);
  if (chosen.tour) made.dataset.tour = TOUR[chosen.tour - 1];
  const on = {
    open: (id, of) => change({ open: id, ...(of == null ? {} : { layer: before + of }) }), choose: (position) => change({ position }),
    write: (id) => change({ append: id }), point: (place) => {
      controls.querySelector(".told").textContent = place.kind === "token" ? looks(data, place.position - data.start) : told(trace, data);
      if (!chosen.tour && !motion.isPlaying) side.tell(topicOf(place));
    },
  };
  const redraw = () => {
    const width = Math.floor(stage.clientWidth);
    if (!width || width === stage.picture?.at.width) return;
    const wasFocused = stage.contains(document.activeElement) ? document.activeElement.dataset.key : focused;
    stage.picture = journey(data, { ...chosen, layer }, width, on);
    stage.replaceChildren(stage.picture);
    if (panel) {
      const station = stage.picture.at.stations.find((each) => each.id === chosen.open);
      panel.style.setProperty("--at", `${Math.round(station.x + station.width / 2)}px`);
    }
    // What a click has opened may be below the edge of the screen.
    if (panel && chosen.open !== motion.opened) panel.scrollIntoView({ block: "nearest" });
    motion.opened = chosen.open;
    // What had the focus before the view was drawn again has it afterwards.
    if (wasFocused && document.activeElement === document.body) made.querySelector(`[data-key="${CSS.escape(wasFocused)}"]`)?.focus({ preventScroll: true });
    moveIn(stage, data, side, change);
  };
  new ResizeObserver(redraw).observe(stage);
  return [made];
}

// The strongest arc of a token, in words.
function looks(data, t) {
  const word = (place) => visible(data.tokens[place].text), best = { weight: 0 };
  data.weights.forEach((rows, layer) => rows?.[t].forEach((weight, s) => {
    if (s !== t && weight > best.weight) Object.assign(best, { weight, s, layer });
  }));
  return best.weight ? `${word(t)} looks most at ${word(best.s)}: ${share(best.weight)} in block ${best.layer}` : `${word(t)} looks at itself only`;
}

// The size of the text, of its cache, and the likeliest next token.
function told(trace, data) {
  const { kv_heads: groups, head_dim: size } = trace.sizes, cached = 2 * data.mixed_by.filter((each) => each === "attention").length * groups * size * data.length;
  return `${data.length === 1 ? "1 token" : `${data.length} tokens`}, ${cached.toLocaleString("en")} numbers in the cache; next after ${visible(data.tokens[data.position - data.start].text)}: ${visible(data.next[0].text)}`;
}

// What stands above the picture: play, pause, step and speed, and the window of a long text.
function bar(trace, data, change) {
  const button = (label, title, act, settings = {}) => {
    const made = element("button", { type: "button", title, ...settings }, label);
    made.dataset.key = `bar.${title}`;
    made.addEventListener("click", act);
    return made;
  };
  const play = button(motion.isPlaying ? "Pause" : "Play", "Follow the chosen token through the network, and let the model write", () => motion.toggle?.(), { className: "play" });
  const speed = element("select", { ariaLabel: "Speed" }, ...[0.5, 1, 2, 4].map((each) => element("option", { value: each, selected: each === motion.speed }, `${each}×`)));
  speed.addEventListener("change", () => { motion.speed = Number(speed.value); });
  const last = data.start + data.tokens.length, most = data.tokens.length;
  const moves = data.length > most ? [button("Earlier", "Earlier tokens", () => change({ start: Math.max(0, data.start - most), position: Math.max(0, data.start - 1) }), { disabled: !data.start }),
    element("span", { className: "shape" }, `${data.start} to ${last - 1} of ${data.length}`),
    button("Later", "Later tokens", () => change({ start: Math.min(data.length - 1, last), position: Math.min(data.length - 1, last + most - 1) }), { disabled: last >= data.length })] : [];
  return element("div", { className: "controls-bar" }, play, button("Step", "To the next station", () => motion.step?.()), speed, ...moves,
    element("span", { className: "shape told" }, told(trace, data)));
}

// The motion over one picture: a light runs along the chosen ribbon, and what is still to come of it is veiled.
function moveIn(stage, data, side, change) {
  const { at } = stage.picture, stations = at.stations, last = stations.length - 1, y = at.ys[at.place], calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const [light, veil] = ["light", "veil"].map((className) => element("div", { className, ariaHidden: "true", hidden: true }));
  const play = stage.parentElement.querySelector(".play"), drawn = [...stage.picture.querySelectorAll(".station")];
  const left = stations[0].x + stations[0].width, whole = stations[last].x + stations[last].width - left, high = Math.max(at.ribbon, 40);
  veil.style.cssText = `left: ${left}px; top: ${y - high / 2}px; width: ${whole}px; height: ${high}px`;
  light.style.top = `${y - 9}px`;
  stage.append(veil, light);
  let lit = -1, since = 0;
  const put = () => {
    const index = Math.min(last, Math.floor(motion.place)), part = calm ? 0 : motion.place - index, centre = (each) => each.x + each.width / 2;
    const x = index === last ? centre(stations[last]) : centre(stations[index]) + part * (centre(stations[index + 1]) - centre(stations[index]));
    light.style.transform = `translateX(${x - 9}px)`;
    veil.style.transform = `scaleX(${Math.max(0, left + whole - x) / whole})`;
    if (index === lit) return;
    lit = index;
    drawn.forEach((each, place) => each.classList.toggle("lit", place === index));
    // What changes faster than anybody reads is not told.
    if (!motion.isPlaying || SECONDS / last / motion.speed > 0.5) side.tell(topicOf(stations[index]));
  };
  const begin = () => {
    light.hidden = veil.hidden = false;
    stage.picture.classList.toggle("moving", true);
  };
  const run = (now) => {
    if (!motion.isPlaying || !stage.isConnected) return;
    motion.place = Math.min(last, motion.place + (Math.max(0, now - since) / 1000) * (last / SECONDS) * motion.speed);
    since = now;
    put();
    if (motion.place < last) motion.frame = requestAnimationFrame(run);
    else {
      // The token is written when the light has arrived, and the next pass begins with it.
      motion.place = 0;
      change({ append: data.next[0].id, failed: stop });
    }
  };
  const start = () => {
    begin();
    since = performance.now();
    motion.frame = requestAnimationFrame(run);
  };
  motion.toggle = () => {
    if (motion.isPlaying) stop();
    else {
      motion.isPlaying = true;
      if (motion.place >= last) motion.place = 0;
      start();
    }
    play.textContent = motion.isPlaying ? "Pause" : "Play";
  };
  motion.step = () => {
    stop();
    play.textContent = "Play";
    begin();
    motion.place = light.dataset.began ? (Math.floor(motion.place) + 1) % stations.length : Math.floor(motion.place);
    light.dataset.began = "yes";
    put();
  };
  if (motion.isPlaying) start();
}
