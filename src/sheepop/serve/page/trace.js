// The trace room: a prompt, a strip of its tokens, and a view for each stage, for one model or two.
import { begin, once, post, suggested } from "./api.js";
import { button, choice, element, entered, share, submitted, together, visible, whole } from "./draw.js";
import { TOUR } from "./explain.js";
import { stop } from "./journey_view.js";
import { VIEWS } from "./views.js";

const KINDS = ["weights", "scores", "unmasked"], WINDOW = 60; // tokens in the picture

export async function open(page) {
  const given = page.chosen, names = page.models.map((each) => each.name);
  if (!names.length) {
    const again = button("Look again", page.guarded(() => post("reload").then(() => dispatchEvent(new Event("hashchange")))));
    page.view.append(element("p", {}, "There is no model yet: the run has no checkpoint so far."), again);
    return;
  }
  let chosen = { view: given.view in VIEWS ? given.view : "journey", position: whole(given.position), layer: whole(given.layer) ?? 0,
    head: whole(given.head) ?? 0, what: KINDS.includes(given.what) ? given.what : KINDS[0], source: whole(given.source), cross: given.cross === "true",
    open: given.open ?? null, start: whole(given.start), numbers: given.numbers === "true",
    tour: whole(given.tour) >= 1 && whole(given.tour) <= TOUR.length ? whole(given.tour) : null };
  let ids = given.ids ? given.ids.split(",").map(Number) : null, traces = [], latest = 0;

  let suggestion = given.prompt == null ? await suggested(page.runs, names.includes(given.model) ? given.model : names[0]) : null;
  const usual = { autocomplete: "off", spellcheck: false, oninput: () => { ids = null; } };
  const prompt = element("textarea", { id: "prompt", rows: 1, ...usual, value: given.prompt ?? suggestion, onkeydown: entered(() => anew()) });
  const target = element("input", { id: "target", ...usual, value: given.target ?? "" }), written = element("label", { className: "wide" }, "Target so far", target);
  const model = choice("Model", names, given.model, async () => {
    if (prompt.value === suggestion) prompt.value = suggestion = await suggested(page.runs, model.select.value);
    ids = null;
    start();
  });
  const beside = choice("Compare with", ["", ...names], given.beside, () => { ids = null; start(); }, (name) => name || "none");
  model.select.id = "model";
  const numbers = element("input", { type: "checkbox", checked: chosen.numbers, onchange: () => change({ numbers: numbers.checked }) });
  const reload = button("Reload", page.guarded(async () => {
    page.say("Loading the models again …");
    await post("reload");
    await start();
  }), { title: "Load the models again, such as a run's newest checkpoint" });
  page.controls.append(element("form", { id: "ask", onsubmit: submitted(() => anew()) },
    element("div", { className: "asking" }, element("label", { className: "wide" }, "Prompt", prompt),
      element("button", { title: "Enter; Shift and Enter begin a new line" }, "Trace")),
    written, element("div", { className: "options" }, model, ...(names.length > 1 ? [beside] : []), reload,
      element("label", { className: "box", title: "Decimals instead of colours alone" }, numbers, "Show numbers"))));

  const encodes = (name) => page.models.find((each) => each.name === name)?.encodes ?? false;

  function remember() {
    page.called(`${prompt.value}: ${VIEWS[chosen.view][0]}`);
    page.remember({ prompt: prompt.value, target: encodes(model.select.value) ? target.value : null, ids,
      model: model.select.value, beside: beside.select.value, ...chosen, cross: chosen.cross || null, numbers: chosen.numbers || null });
  }

  function fit() {
    const least = (of) => Math.min(...traces.map(of)) - 1;
    chosen.position = Math.min(chosen.position ?? Infinity, least((trace) => trace.tokens.length));
    const { position, start } = chosen;
    if (start == null || position < start || position >= start + WINDOW) chosen.start = Math.max(0, position - WINDOW + 1);
    const sources = least((trace) => trace.source_tokens.length);
    chosen.source = sources < 0 ? null : Math.min(chosen.source ?? Infinity, sources);
    chosen.layer = Math.min(chosen.layer, least((trace) => trace.sizes.encoder_layers + trace.sizes.layers));
    chosen.head = Math.min(chosen.head, least((trace) => trace.sizes.heads));
  }

  // The choices that changed, or a token to write; `failed` runs if it cannot be written.
  async function change({ append, failed = () => {}, ...settings }) {
    chosen = { ...chosen, ...settings };
    if (append == null) return show();
    ids = [...traces[0].tokens.map((token) => token.id), append].slice(traces[0].target == null ? 0 : 1);
    chosen.position = null;
    if (!await start()) failed();
  }

  async function drawStrip() {
    const { tokens, source_tokens } = traces[0], predictions = await once(traces[0], "predictions");
    const chip = ({ text, position }, name, title, below, more = "") => {
      const made = button(visible(text), () => change({ [name]: position }), { className: `token ${more}`, title, ariaPressed: String(position === chosen[name]) });
      made.append(element("small", {}, below));
      return made;
    };
    const read = source_tokens.map((token) => chip(token, "source", `Token ${token.position} of the source, id ${token.id}`, "source", "source"));
    const own = tokens.map((token) => {
      const before = predictions[token.position - 1], likely = before && share(Math.exp(before.logprob));
      return chip(token, "position", `Token ${token.position}, id ${token.id}${likely ? `, expected with ${likely}` : ""}`, likely ?? "–");
    });
    page.strip.replaceChildren(together(element("div", { className: "chips" }, ...read, ...own)));
  }

  function drawStages() {
    page.stages.replaceChildren(...Object.entries(VIEWS).map(([name, [label, , title]]) => {
      const isChosen = name === chosen.view;
      return button(label, () => change({ view: name }), { role: "tab", title, ariaSelected: String(isChosen), tabIndex: isChosen ? 0 : -1 });
    }));
    // On a phone the row of stages scrolls sideways.
    page.stages.scrollLeft = page.stages.querySelector("[aria-selected=true]").offsetLeft - page.stages.clientWidth / 2;
  }

  async function show() {
    const turn = ++latest;
    fit();
    drawStages();
    page.strip.hidden = chosen.view === "journey";
    remember();
    try {
      const drawn = await Promise.all(traces.map((trace) => VIEWS[chosen.view][1](trace, chosen, change)));
      if (chosen.view !== "journey") await drawStrip();
      if (turn !== latest) return;
      const columns = drawn.map((parts, place) => element("div", {},
        ...(drawn.length > 1 ? [element("p", { className: "shape" }, traces[place].model)] : []), ...parts));
      page.view.className = drawn.length > 1 ? "beside" : "";
      page.view.replaceChildren(...(columns.length > 1 ? columns : drawn[0]));
    } catch (error) {
      if (turn === latest) page.say(error.message, true);
    }
  }

  async function start() {
    const turn = ++latest;
    page.say("Tracing …");
    try {
      const wanted = [model.select.value, beside.select.value].filter(Boolean);
      const hasTarget = encodes(wanted[0]);
      written.hidden = !hasTarget;
      // Ids are those of the first model; the other one gets their text.
      const first = await (hasTarget ? begin(wanted[0], prompt.value, ids ?? target.value) : begin(wanted[0], ids ?? prompt.value));
      if (ids) (hasTarget ? target : prompt).value = first.target ?? first.prompt;
      const found = [first, ...(wanted[1] ? [await begin(wanted[1], prompt.value, hasTarget ? target.value : null)] : [])];
      if (turn !== latest) return true;
      traces = found;
    } catch (error) {
      page.say(error.message, true);
      return false;
    }
    page.say(traces.map(({ tokens, source_tokens: sources, model: name, sizes }) =>
      `${name}: ${tokens.length} tokens through ${sizes.layers} blocks of width ${sizes.width} with ${sizes.heads} heads`
      + `${sources.length ? `, which attend to ${sources.length} tokens of the source after ${sizes.encoder_layers} blocks of the encoder` : ""}.`).join(" "));
    await show();
    document.body.dataset.ready = String(traces[0].number);
    return true;
  }

  function onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !traces.length) return;
    const all = Object.keys(VIEWS);
    change({ view: all[(all.indexOf(chosen.view) + step + all.length) % all.length] }).then(() =>
      page.stages.querySelector("[aria-selected=true]").focus());
  }

  // Esc goes one level back: from the exact numbers to the picture, and from an opened station to the whole.
  function onEscape(event) {
    if (event.key !== "Escape" || !traces.length || event.target.matches("input, textarea, select")) return;
    if (chosen.view !== "journey") change({ view: "journey" });
    else if (chosen.open || chosen.tour) change({ open: null, tour: null });
  }

  function anew() {
    stop();
    chosen.position = null;
    start();
  }

  page.stages.onkeydown = onKey;
  document.onkeydown = onEscape;
  page.view.setAttribute("role", "tabpanel");
  page.until(() => {
    latest++;
    stop();
    page.stages.onkeydown = document.onkeydown = null;
    page.view.removeAttribute("role");
    page.view.className = "";
  });
  await start();
}
