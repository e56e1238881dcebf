// The first view of a trace: the picture with its column of explanations, what is opened below it, and its motion.
import { ask } from "./api.js";
import { column, TOPICS, TOUR } from "./explain.js";
import { button, choice, element, share, visible } from "./draw.js";
import { journey, layout } from "./journey.js";
import { opened } from "./opened.js";

// A pass takes four seconds at speed 1. The motion goes on from a written token to the next one, so it outlives a view.
const PASS = 4000, motion = { isPlaying: false, speed: 1, place: 0, runs: [], timer: 0 };
// How much of the pass is over.
const place = () => (motion.runs[0]?.currentTime ?? 0) / PASS;

export function stop() {
  motion.isPlaying = false;
  motion.place = place() % 1;
  clearTimeout(motion.timer);
  motion.runs.forEach((run) => run.pause());
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
  const side = column(chosen.tour ? TOUR[chosen.tour - 1] : open?.kind ?? "whole", chosen.tour, go);
  const stage = element("div", { className: "stage" }), made = element("div", { className: "journey" });
  const controls = bar(trace, data, change);
  made.append(element("div", { className: "picture-side" }, controls, stage, ...(panel ? [panel] : [])), side);
  if (chosen.tour) made.dataset.tour = TOUR[chosen.tour - 1];
  const on = {
    open: (id, of) => change({ open: id, ...(of == null ? {} : { layer: before + of }) }), choose: (position) => change({ position }),
    write: (id) => change({ append: id }), point: (place) => {
      controls.querySelector(".told").textContent = place.kind === "tokens" ? looks(data, place.position - data.start) : told(trace, data);
      if (!chosen.tour && !motion.isPlaying) side.tell(place.kind);
    },
  };
  const redraw = () => {
    const width = Math.floor(stage.clientWidth);
    if (!width || width === stage.picture?.at.width) return;
    const wasFocused = stage.contains(document.activeElement) ? document.activeElement.dataset.key : focused;
    stage.picture = journey(data, { ...chosen, layer }, width, on);
    stage.replaceChildren(stage.picture);
    if (panel) panel.point(stage.picture.at.stations.find((each) => each.id === chosen.open));
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
  const word = (place) => visible(data.tokens[place].text), all = data.weights.flatMap((rows, layer) => rows?.[t].map((weight, s) => ({ weight, s, layer })) ?? []);
  const best = all.reduce((most, each) => (each.s !== t && each.weight > most.weight ? each : most), { weight: 0 });
  return best.weight ? `${word(t)} looks most at ${word(best.s)}: ${share(best.weight)} in block ${best.layer}` : `${word(t)} looks at itself only`;
}

// The size of the text, of its cache, and the likeliest next token.
function told(trace, data) {
  const { kv_heads: groups, head_dim: size } = trace.sizes, layers = data.mixed_by.filter((each) => each === "attention").length;
  return `${data.length === 1 ? "1 token" : `${data.length} tokens`}, ${(2 * layers * groups * size * data.length).toLocaleString("en")} numbers in the cache; `
    + `next after ${visible(data.tokens[data.position - data.start].text)}: ${visible(data.next[0].text)}`;
}

// What stands above the picture: play, pause, step and speed, and the window of a long text.
function bar(trace, data, change) {
  const named = (label, title, act, settings = {}) => button(label, act, { title, "data-key": `bar.${title}`, ...settings });
  const follow = "Follow the chosen token through the network, and let the model write", end = data.length - 1, most = data.tokens.length, last = data.start + most;
  const play = named(motion.isPlaying ? "Pause" : "Play", follow, () => motion.toggle?.(), { className: "play" });
  const { select: speed } = choice("Speed", [0.5, 1, 2, 4], motion.speed, (each) => {
    motion.speed = Number(each);
    motion.runs.forEach((run) => run.updatePlaybackRate(motion.speed));
  }, (each) => `${each}×`);
  speed.ariaLabel = "Speed";
  const earlier = () => change({ start: Math.max(0, data.start - most), position: Math.max(0, data.start - 1) });
  const later = () => change({ start: Math.min(end, last), position: Math.min(end, last + most - 1) });
  const moves = data.length > most ? [named("Earlier", "Earlier tokens", earlier, { disabled: !data.start }),
    element("span", { className: "shape" }, `${data.start} to ${last - 1} of ${data.length}`), named("Later", "Later tokens", later, { disabled: last > end })] : [];
  return element("div", { className: "controls-bar" }, play, named("Step", "To the next station", () => motion.step?.()), speed, ...moves,
    element("span", { className: "shape told" }, told(trace, data)));
}

// The motion: a light runs along the chosen ribbon, and what is still to come is veiled. The browser animates both without drawing anew.
function moveIn(stage, data, side, change) {
  const { at } = stage.picture, stations = at.stations, last = stations.length - 1, y = at.ys[at.place], calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const [light, veil] = ["light", "veil"].map((className) => element("div", { className, ariaHidden: "true", hidden: true }));
  const play = stage.parentElement.querySelector(".play"), drawn = [...stage.picture.querySelectorAll(".station")];
  const left = stations[0].x + stations[0].width, whole = stations[last].x + stations[last].width - left, high = Math.max(at.ribbon, 40);
  veil.style.cssText = `left: ${left}px; top: ${y - high / 2}px; width: ${whole}px; height: ${high}px`;
  light.style.top = `${y - 9}px`;
  stage.append(veil, light);
  const steps = (of) => stations.map(({ x, width }) => ({ transform: of(x + width / 2), easing: calm ? "step-end" : "linear" }));
  const along = (each, of) => each.animate(steps(of), { duration: PASS, fill: "both" });
  if (motion.runs[0]?.playState === "running") motion.place = place();
  motion.runs.forEach((run) => run.cancel());
  const runs = motion.runs = [along(light, (x) => `translateX(${x - 9}px)`), along(veil, (x) => `scaleX(${Math.max(0, left + whole - x) / whole})`)];
  let lit = -1;
  const seek = (place) => runs.forEach((run) => { run.pause(); run.currentTime = place * PASS; });
  const look = () => {
    const index = Math.floor(place() * last + 1e-6);
    if (index === lit) return;
    lit = index;
    drawn.forEach((each, number) => each.classList.toggle("lit", number === index));
    // What changes faster than anybody reads is not told.
    if (!motion.isPlaying || PASS / last / motion.speed > 500) side.tell(stations[index].kind);
  };
  const begin = () => { light.hidden = veil.hidden = false; };
  const tick = () => {
    if (!motion.isPlaying || !light.isConnected) return;
    look();
    motion.timer = setTimeout(tick, ((1 - ((place() * last) % 1)) * PASS) / last / motion.speed);
  };
  const start = () => {
    motion.isPlaying = true;
    begin();
    runs.forEach((run) => { run.playbackRate = motion.speed; run.play(); });
    tick();
  };
  // The token is written when the light has arrived, and the next pass begins with it.
  runs[0].onfinish = () => {
    if (!motion.isPlaying || !light.isConnected) return;
    motion.place = 0;
    change({ append: data.next[0].id, failed: stop });
  };
  motion.toggle = () => {
    if (motion.isPlaying) stop(); else start();
    play.textContent = motion.isPlaying ? "Pause" : "Play";
  };
  motion.step = () => {
    stop();
    play.textContent = "Play";
    begin();
    const here = Math.floor(place() * last + 1e-6);
    seek((light.dataset.began ? (here + 1) % stations.length : here) / last);
    light.dataset.began = "yes";
    look();
  };
  seek(motion.place);
  if (motion.isPlaying) start();
}
