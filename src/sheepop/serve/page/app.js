// The page: what is chosen stands in its address, so that a link opens the same view again.

import { begin, models } from "./api.js";
import { element, share, visible } from "./draw.js";
import { VIEWS } from "./views.js";

const [form, prompt, model, status, stages, strip, view] =
  ["ask", "prompt", "model", "status", "stages", "tokens", "view"].map((id) => document.getElementById(id));
const save = document.getElementById("save");
const START = { view: "text", position: null, layer: 0, head: 0, what: "weights" };
let chosen = { ...START }, trace = null, latest = 0;

function say(message, isBad = false) {
  status.textContent = message;
  status.className = isBad ? "bad" : "";
}

function remember() {
  const { view: name, position, layer, head, what } = chosen;
  const query = new URLSearchParams({ prompt: prompt.value, model: model.value, view: name, position, layer, head, what });
  history.replaceState(null, "", `#${query}`);
}

function recall() {
  const found = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (found.prompt) prompt.value = found.prompt;
  if (found.model) model.value = found.model;
  const whole = (value) => (/^\d+$/.test(value ?? "") ? Number(value) : null);
  chosen = { view: found.view in VIEWS ? found.view : START.view, position: whole(found.position), layer: whole(found.layer) ?? 0,
    head: whole(found.head) ?? 0, what: ["weights", "scores", "unmasked"].includes(found.what) ? found.what : START.what };
}

function fit() {
  const last = trace.tokens.length - 1;
  chosen.position = chosen.position == null ? last : Math.min(chosen.position, last);
  chosen.layer = Math.min(chosen.layer, trace.sizes.layers - 1);
  chosen.head = Math.min(chosen.head, trace.sizes.heads - 1);
}

async function change(settings) {
  if (settings.append != null) {
    prompt.value += settings.append;
    await start({ ...chosen, position: null });
    return;
  }
  chosen = { ...chosen, ...settings };
  await show();
}

function drawStrip() {
  strip.replaceChildren(...trace.tokens.map((token) => {
    const before = trace.predictions[token.position - 1];
    const chip = element("button", { className: "token", ariaPressed: String(token.position === chosen.position),
      title: `Token ${token.position}, id ${token.id}` }, visible(token.text), element("small", {}, before ? share(Math.exp(before.logprob)) : "–"));
    chip.addEventListener("click", () => change({ position: token.position }));
    return chip;
  }));
}

function drawStages() {
  stages.replaceChildren(...Object.entries(VIEWS).map(([name, [label, , title]]) => {
    const tab = element("button", { role: "tab", title, ariaSelected: String(name === chosen.view), tabIndex: name === chosen.view ? 0 : -1 }, label);
    tab.addEventListener("click", () => change({ view: name }));
    return tab;
  }));
}

stages.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !trace) return;
  const all = Object.keys(VIEWS);
  change({ view: all[(all.indexOf(chosen.view) + step + all.length) % all.length] }).then(() =>
    stages.querySelector("[aria-selected=true]").focus());
});

async function show() {
  const turn = ++latest;
  fit();
  drawStages();
  drawStrip();
  remember();
  try {
    const parts = await VIEWS[chosen.view][1](trace, chosen, change);
    if (turn === latest) view.replaceChildren(...parts);
  } catch (error) {
    if (turn === latest) say(error.message, true);
  }
}

async function start(wanted) {
  say("Tracing …");
  try {
    trace = await begin(model.value, prompt.value);
  } catch (error) {
    say(error.message, true);
    return;
  }
  const { layers, width, heads } = trace.sizes;
  say(`${trace.tokens.length} tokens through ${layers} blocks of width ${width} with ${heads} heads.`);
  chosen = wanted;
  await show();
  document.body.dataset.ready = String(trace.number);
}

prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
// The view as one file: maps become pictures and fields their values, so it needs neither this server nor scripts.
async function saved() {
  const page = document.implementation.createHTMLDocument(`${prompt.value}: ${VIEWS[chosen.view][0]}`);
  const sheet = await (await fetch("/ui/style.css")).text();
  const [copy, canvases] = [view.cloneNode(true), view.querySelectorAll("canvas")];
  copy.querySelectorAll("canvas").forEach((canvas, place) => {
    const image = page.createElement("img");
    image.src = canvases[place].toDataURL();
    image.className = "map-image";
    canvas.replaceWith(image);
  });
  const fields = view.querySelectorAll("select, input");
  copy.querySelectorAll("select, input").forEach((field, place) =>
    field.replaceWith(`: ${fields[place].selectedOptions?.[0].textContent ?? fields[place].value}`));
  page.head.append(element("meta", { charset: "utf-8" }));
  page.body.append(element("h1", {}, visible(prompt.value)), element("p", {}, `Through ${model.value}.`), strip.cloneNode(true), copy);
  // As text: this page's policy would refuse a sheet inside of a document.
  const text = page.documentElement.outerHTML.replace("</head>", () => `<style>${sheet}</style></head>`);
  return new Blob(["<!doctype html>\n", text], { type: "text/html" });
}

save.addEventListener("click", async () => {
  const address = URL.createObjectURL(await saved());
  element("a", { href: address, download: `${chosen.view}.html` }).click();
  URL.revokeObjectURL(address);
});

form.addEventListener("submit", (event) => {
  event.preventDefault();
  start({ ...chosen, position: null });
});
addEventListener("hashchange", () => { recall(); start(chosen); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => trace && show());

try {
  model.replaceChildren(...(await models()).map((name) => element("option", { value: name }, name)));
  recall();
  await start(chosen);
} catch (error) {
  say(error.message, true);
}
