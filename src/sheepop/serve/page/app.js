// The page has six rooms. The address contains the choices made in a room, so that a link opens the same view again.
import { get } from "./api.js";
import { element, learn, visible } from "./draw.js";

// Name of a room and of its module: label, and description. A module is loaded when somebody enters.
const ROOMS = {
  trace: ["Trace", "Follow a text through a model, number by number"],
  chat: ["Chat", "Chat with one model or two, and see how sure they are"],
  arena: ["Arena", "Vote between two answers without knowing which models wrote them"],
  analysis: ["Analysis", "A model and its training as control systems: gains, influence, the loop of writing, stability"],
  training: ["Training", "Watch runs learn: curves, texts and pictures over time"],
  data: ["Data", "The corpus, and the documents behind a step"],
};
const [rooms, controls, status, stages, strip, view, save] =
  ["rooms", "controls", "status", "stages", "tokens", "view", "save"].map((id) => document.getElementById(id));
let room = null, name = "view", leaving = [];
const learnt = get("glossary").then(learn);

const say = (message, isBad = false) => Object.assign(status, { textContent: message, className: isBad ? "bad" : "" });

// The argument of a room: elements to draw in, the choices, and `until`, which registers work to do on leaving the room.
function page(chosen, known) {
  return {
    ...known, controls, stages, strip, view, chosen, say,
    // An asynchronous action whose failure is told.
    guarded: (act) => (...given) => act(...given).catch((error) => say(error.message, true)),
    called: (title) => { name = title; },
    until: (end) => leaving.push(end),
    remember: (settings) => {
      const given = Object.entries(settings).filter(([, value]) => value != null && value !== "");
      history.replaceState(null, "", `#${new URLSearchParams([["room", room], ...given])}`);
    },
  };
}

async function enter() {
  const { room: wanted, ...chosen } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  for (const end of leaving.splice(0)) end();
  try {
    const [models, runs] = await Promise.all([get("models"), get("runs"), learnt]), known = { models, runs };
    room = wanted in ROOMS ? wanted : known.models.length || !known.runs.length ? "trace" : "training";
    for (const each of [controls, stages, strip, view]) each.replaceChildren();
    for (const each of [stages, strip]) each.hidden = room !== "trace";
    rooms.replaceChildren(...Object.entries(ROOMS).map(([each, [label, title]]) => {
      const link = element("a", { href: `#room=${each}`, title }, label);
      if (each === room) link.setAttribute("aria-current", "page");
      return link;
    }));
    // On a phone the row of rooms scrolls sideways.
    rooms.querySelector("[aria-current]").scrollIntoView({ block: "nearest", inline: "center" });
    say("");
    name = room;
    const { open } = await import(`./${room}.js`);
    await open(page(chosen, known));
  } catch (error) {
    say(error.message, true);
  }
}

// The view as one HTML file without scripts: canvases become images and fields become their values.
async function saved() {
  const kept = document.implementation.createHTMLDocument(`SheepOp: ${name}`);
  const sheets = await Promise.all(["journey", "style"].map(async (each) => (await fetch(`/ui/${each}.css`)).text()));
  const [copy, canvases] = [view.cloneNode(true), view.querySelectorAll("canvas")];
  copy.querySelectorAll("canvas").forEach((canvas, index) => {
    const image = kept.createElement("img");
    image.src = canvases[index].toDataURL();
    image.className = "map-image";
    canvas.replaceWith(image);
  });
  const fields = view.querySelectorAll("select, input, textarea");
  copy.querySelectorAll("select, input, textarea").forEach((field, index) =>
    field.replaceWith(`: ${fields[index].selectedOptions?.[0].textContent ?? fields[index].value}`));
  // Of a formula the part stays that needs neither KaTeX's style sheet nor its fonts: MathML, which browsers draw themselves.
  copy.querySelectorAll(".katex-html").forEach((each) => each.remove());
  kept.head.append(element("meta", { charset: "utf-8" }));
  kept.body.append(element("h1", {}, visible(name)), element("p", {}, status.textContent), strip.cloneNode(true), copy);
  // The sheet is added as text, since the page's content security policy forbids inline styles.
  const text = kept.documentElement.outerHTML.replace("</head>", () => `<style>${sheets.join("")}</style></head>`);
  return new Blob(["<!doctype html>\n", text], { type: "text/html" });
}

save.onclick = async () => {
  const address = URL.createObjectURL(await saved());
  element("a", { href: address, download: `${new URLSearchParams(location.hash.slice(1)).get("view") ?? room}.html` }).click();
  URL.revokeObjectURL(address);
};
addEventListener("hashchange", enter);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", enter);

await enter();
