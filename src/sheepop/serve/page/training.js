// The training room: curves of runs while they train, what they write, and their network over time, all of them at one chosen step.
import { get, ofRun } from "./api.js";
import { AXES, charted, curves, placed } from "./curves.js";
import { button, choice, compact, element, explain, heading, nearest, precise, table } from "./draw.js";
import { snapshots } from "./snapshots.js";

const TEXTS = [
  ["What it writes", "The same prompt (bold) at the chosen step.", (row) => !row.rewards],
  ["Answers and their rewards", "Answers that a step learnt from, behind their prompts (bold). Those with an advantage above 0 become likelier.", (row) => row.rewards],
];
const PAGES = { run: "Report", plan: "Plan", corpus: "Corpus" };
const [LIVE, IDLE, FRAME] = [2000, 15000, 900]; // milliseconds between updates while a run trains, while none does, and between steps

export async function open(page) {
  if (!page.runs.length) {
    page.view.append(...heading("No run here", "This room shows runs. Start the page with one or several: sheepop ui runs/quickstart"));
    return;
  }
  const given = page.chosen, run = choice("Run", page.runs, given.run, () => { step = null; restart(); });
  const along = choice("Over", Object.keys(AXES), given.over ?? "step", () => redraw(), (name) => AXES[name]);
  const scale = choice("Scale", ["linear", "logarithmic"], given.scale ?? "linear", () => redraw());
  const others = new Set((given.beside ?? "").split("|").filter((name) => page.runs.includes(name)));
  const weight = element("input", { type: "range", min: 0, max: 0.999, step: 0.001, value: given.smooth ?? 0.6, oninput: () => redraw() }), told = element("output", {});
  const closer = "Drag in a chart, or press + in it, to look closer; a double click or 0 undoes it";
  const whole = button("Show all", () => drawn.zoom(), { disabled: true, title: closer });
  const boxes = page.runs.map((name) => {
    const onchange = ({ target }) => { others[target.checked ? "add" : "delete"](name); restart(); };
    return element("label", { className: "box" }, element("input", { type: "checkbox", checked: others.has(name), value: name, onchange }), name);
  });
  page.controls.append(element("form", {}, run, along, scale, element("label", {}, element("span", {}, "Smoothing ", told), weight), whole,
    ...(page.runs.length > 1 ? [element("fieldset", {}, element("legend", {}, "Compare with"), ...boxes)] : [])));
  const [facts, charts, answers, network, settings] = Array.from({ length: 5 }, () => element("section"));
  const writing = element("section", { className: "writing", tabIndex: 0, ariaLabel: "Texts at the chosen step" });
  const play = button("Play", () => (playing ? pause() : begin()), { className: "play" }), read = element("output", { className: "shape" });
  const at = element("input", { type: "range", min: 0, ariaLabel: "Step", oninput: () => { pause(); choose(marks[Number(at.value)]); } });
  const player = element("div", { className: "player", role: "group", ariaLabel: "The chosen step" }, play, at, read);
  page.view.append(facts, charts, answers, network, settings, player);
  const known = new Map(); // the rows of each run so far, and the offset up to which its file was read
  let turn = 0, timer = null, playing = null, step = given.step == null ? null : Number(given.step), samples = [], marks = [], pictures = null, drawnTexts = "";
  const drawn = curves({ choose: (value) => choose(stepAt(value)), zoom: (isZoomed) => { whole.disabled = !isZoomed; } }, writing);
  charts.append(...heading("Curves", "A colour is a run; dashed lines are its held-out text. The crosshair is at the chosen step: move the slider below, or click in a chart. "
    + "Drag to look closer; a double click shows all again."), drawn.made);
  page.until(() => { turn++; clearTimeout(timer); pause(); pictures?.stop(); drawn.clear(); });

  const shown = () => [run.select.value, ...page.runs.filter((name) => others.has(name) && name !== run.select.value)];
  const rows = () => known.get(run.select.value)?.rows ?? [];
  const remember = () => page.remember({ run: run.select.value, over: along.select.value, scale: scale.select.value, smooth: weight.value, beside: [...others].join("|"), step });

  async function follow(name) {
    const all = known.get(name) ?? { rows: [], offset: 0 };
    for (;;) {
      const more = await ofRun(name, "metrics", { offset: all.offset });
      // A resumed run may have removed rows; then its file is read from the start.
      if (more.from !== all.offset) all.rows = [];
      all.rows.push(...more.rows);
      Object.assign(all, { offset: more.offset, isRunning: more.is_running, isNew: all.isNew || more.rows.length > 0 });
      known.set(name, all);
      if (more.is_whole) return all;
    }
  }

  function drawCurves() {
    told.textContent = weight.value;
    weight.title = `The curve m follows each logged value y by m ← ${weight.value} m + ${(1 - weight.value).toFixed(3)} y; `
      + "the values themselves are faint. Held-out text is never smoothed.";
    const axis = along.select.value, settings = { axis, weight: Number(weight.value), isLog: scale.select.value === "logarithmic" };
    return drawn.draw(charted(shown().map((name) => [name, known.get(name).rows]), axis), settings);
  }

  async function drawFacts() {
    const found = await Promise.all(shown().map((name) => get(`runs/${encodeURIComponent(name)}`)));
    const listed = found.map((each) => [each.name, each.state, `${each.steps.toLocaleString("en")} of ${each.total_steps?.toLocaleString("en") ?? "?"}`,
      each.parameters == null ? "–" : compact(each.parameters), each.best_loss ?? "–",
      each.bits_per_byte == null ? "–" : `${each.bits_per_byte.toFixed(4)}${each.is_sampled ? " (sample)" : ""}`]);
    const head = ["Run", "State", "Steps", "Parameters", "Best loss", "Bits per byte"].map((each) => element("span", {}, ...explain(each)));
    const links = found.flatMap((each) => each.pages.map((kind) => element("a", { target: "_blank", rel: "noopener",
      href: `/ui/runs/${encodeURIComponent(each.name)}/pages/${kind}` }, `${PAGES[kind]} of ${each.name}`)));
    const measured = shown().filter((name) => known.get(name).rows.some((row) => row.split === "analysis"));
    const advised = await Promise.all(measured.map(async (name) =>
      (await ofRun(name, "advice")).advice.map(({ words }) => element("li", {}, shown().length > 1 ? `${name}: ${words}` : words))));
    const advice = advised.flat().length ? [element("h2", {}, "Advice"), element("ul", {}, ...advised.flat())] : [];
    facts.replaceChildren(table(head, listed), element("p", { className: "links" }, ...links), ...advice);
  }

  function rewarded({ reward, advantage, rewards }) {
    const numbers = Object.entries({ reward, advantage, ...(Object.keys(rewards).length > 1 ? rewards : {}) });
    return numbers.filter(([, value]) => value !== undefined).map(([name, value]) => `${name} ${value?.toPrecision(4) ?? "–"}`).join(", ");
  }

  async function readTexts() {
    samples = await Promise.all(shown().map(async (name) => [name, await ofRun(name, "samples")]));
    await pictures.refresh();
    marks = [...new Set([...samples.flatMap(([, found]) => found.map((row) => row.step)), ...pictures.steps])].sort((a, b) => a - b);
    player.hidden = !marks.length;
    at.max = Math.max(0, marks.length - 1);
    show();
  }

  const stepAt = (value) => nearest(rows(), value, (row) => row[along.select.value])?.step;

  // Chooses the step nearest to a wanted one that has something to show; the last one is followed while a run trains.
  function choose(wanted) {
    if (!marks.length) return;
    const found = nearest(marks, wanted);
    step = found === marks.at(-1) ? null : found;
    remember();
    show();
  }

  // Everything at the chosen step.
  function show() {
    const now = step == null ? marks.at(-1) : nearest(marks, step);
    if (now == null) return;
    at.value = marks.indexOf(now);
    const last = (split) => rows().findLast((row) => row.split === split && row.step <= now && row.loss != null)?.loss, axis = along.select.value;
    const losses = [["training", last("train")], ["held-out", last("validation")]].filter(([, loss]) => loss != null).map(([name, loss]) => `${name} loss ${precise(loss)}`);
    read.textContent = [placed("step", now), ...losses].join(" · ");
    at.setAttribute("aria-valuetext", read.textContent);
    drawn.at(axis === "step" ? now : rows().findLast((row) => row.step <= now && row[axis] != null)?.[axis] ?? 0);
    pictures.show(now);
    // What is drawn already stays, with what a reader has selected in it.
    const texts = JSON.stringify([now, samples.map(([name, all]) => [name, all.length])]);
    if (texts !== drawnTexts) [writing, answers].forEach((section, place) => section.replaceChildren(...written(...TEXTS[place], now)));
    drawnTexts = texts;
  }

  function written(title, words, belongs, now) {
    const found = samples.map(([name, all]) => [name, all.filter(belongs)]);
    if (!found.some(([, all]) => all.length)) return [];
    return [...heading(title, words), element("div", { className: "beside" }, ...found.map(([name, all]) => {
      const last = all.findLast((row) => row.step <= now)?.step;
      return element("div", {}, element("p", { className: "shape" }, last == null ? `${name}: nothing yet` : `${name}, ${placed("step", last)}`),
        ...all.filter((row) => row.step === last).flatMap((row) => [element("pre", {}, element("b", {}, row.prompt), row.text),
          ...(row.rewards ? [element("p", { className: "shape" }, rewarded(row))] : [])]));
    }))];
  }

  const pause = () => { playing = clearInterval(playing); play.textContent = "Play"; };

  function begin() {
    if (Number(at.value) === marks.length - 1) choose(marks[0]);
    play.textContent = "Pause";
    playing = setInterval(() => {
      choose(marks[Number(at.value) + 1]);
      if (Number(at.value) >= marks.length - 1) pause();
    }, FRAME);
  }

  async function drawSettings() {
    if (page.runs.length < 2) return;
    const found = await get("differences"), names = Object.keys(found.settings);
    settings.replaceChildren(...heading("What differs", found.warning ?? "The settings in which the runs differ."),
      names.length ? table(["Setting", ...found.runs], names.map((name) => [name, ...found.settings[name].map((value) => JSON.stringify(value))]), "long")
        : element("p", {}, "All settings are the same."));
  }

  async function look(now) {
    try {
      const found = await Promise.all(shown().map(follow));
      if (now !== turn) return;
      const isNew = found.some((each) => each.isNew), isRunning = found.some((each) => each.isRunning);
      for (const each of found) each.isNew = false;
      page.say(isRunning ? "Training now; the curves update automatically." : "Not training now.");
      if (isNew || !facts.childElementCount) {
        await drawCurves();
        await drawFacts();
        await readTexts();
      }
      timer = setTimeout(() => look(now), isRunning ? LIVE : IDLE);
    } catch (error) {
      if (now !== turn) return;
      page.say(error.message, true);
      timer = setTimeout(() => look(now), IDLE);
    }
  }

  function restart() {
    clearTimeout(timer);
    pause();
    remember();
    page.called(`Training of ${shown().join(", ")}`);
    pictures?.stop();
    for (const part of [facts, writing, answers, network]) part.replaceChildren();
    pictures = snapshots(page, run.select.value, network);
    [marks, drawnTexts] = [[], ""];
    player.hidden = true;
    for (const box of boxes) box.hidden = box.control.value === run.select.value;
    return look(++turn);
  }

  const redraw = page.guarded(async () => { remember(); await drawCurves(); show(); });
  await restart();
  await drawSettings();
}
