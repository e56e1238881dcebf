// The training room: curves of one run or several while they train, their samples, and their traced prompt over time.

import { floats, get } from "./api.js";
import { bars, chart, choice, compact, element, explain, heading, map, share, table, visible } from "./draw.js";

const CHARTS = {
  Loss: [["train", "loss"], ["validation", "loss"]], "Bits per byte": [["validation", "bits_per_byte"]],
  "Learning rate": [["train", "learning_rate"]], "Gradient norm": [["train", "grad_norm"]],
  "Tokens per second": [["train", "tokens_per_second"]], "Memory, MB": [["train", "memory_bytes", 1e-6]],
  "Busy processor cores": [["train", "busy_cores"]],
};
// Of runs that learn from rewards or from pairs; each is drawn where a row has its numbers.
const ANSWER_CHARTS = {
  Reward: [["train", "reward"], ["validation", "reward"]], "Margin of rewards": [["train", "margin"], ["validation", "margin"]],
  "Tokens of an answer": [["train", "length"], ["validation", "length"]], "Divergence from the reference": [["train", "divergence"]],
};
const TEXTS = [
  ["What it writes", "The same prompt (bold) at several steps. Move the slider to see the model learn.", "Step", (row) => !row.rewards],
  ["Answers and their rewards", "Answers that a step learnt from, behind their prompts (bold). Those with an advantage above 0 become likelier.",
    "Step of the answers", (row) => row.rewards],
];
const AXES = { step: "Steps", tokens: "Tokens", seconds: "Seconds" };
const [LIVE, IDLE] = [2000, 15000]; // milliseconds between updates while a run trains, and while none does

export async function open(page) {
  if (!page.runs.length) {
    page.view.append(...heading("No run here", "This room shows runs. Start the page with one or several: sheepop ui runs/quickstart"));
    return;
  }
  const given = page.chosen, run = choice("Run", page.runs, given.run);
  const along = choice("Over", Object.keys(AXES), given.over ?? "step", (name) => AXES[name]);
  const others = new Set((given.beside ?? "").split("|").filter((name) => page.runs.includes(name)));
  const boxes = page.runs.map((name) => {
    const box = element("input", { type: "checkbox", checked: others.has(name), value: name });
    box.addEventListener("change", () => { if (box.checked) others.add(name); else others.delete(name); restart(); });
    return element("label", { className: "box" }, box, name);
  });
  page.controls.append(element("form", {}, run, along,
    ...(page.runs.length > 1 ? [element("fieldset", {}, element("legend", {}, "Compare with"), ...boxes)] : [])));
  const [facts, curves, texts, pictures, settings] = Array.from({ length: 5 }, () => element("section", {}));
  page.view.append(facts, curves, texts, pictures, settings);
  const known = new Map(); // the rows of each run so far, and the offset up to which its file was read
  let turn = 0, timer = null;
  page.until(() => { turn++; clearTimeout(timer); stop(); });
  let stop = () => {};

  const shown = () => [run.select.value, ...page.runs.filter((name) => others.has(name) && name !== run.select.value)];

  async function read(name) {
    const all = known.get(name) ?? { rows: [], offset: 0 };
    for (;;) {
      const more = await get(`runs/${encodeURIComponent(name)}/metrics`, { offset: all.offset });
      // A resumed run may have removed rows; then its file is read from the start.
      if (more.from !== all.offset) all.rows = [];
      all.rows.push(...more.rows);
      Object.assign(all, { offset: more.offset, isRunning: more.is_running, isNew: all.isNew || more.rows.length > 0 });
      known.set(name, all);
      if (more.is_whole) return all;
    }
  }

  function drawCurves() {
    const axis = along.select.value;
    const rows = shown().flatMap((name) => known.get(name).rows);
    const scores = new Set(rows.filter((row) => row.split === "evaluation").flatMap((row) => Object.keys(row).filter((key) => key.includes("/"))));
    const evaluations = [...scores].map((key) => [key.replace("/", ": ").replaceAll("_", " "), [["evaluation", key]]]);
    const answers = Object.entries(ANSWER_CHARTS).filter(([, parts]) =>
      parts.some(([split, key]) => rows.some((row) => row.split === split && row[key] != null)));
    const charts = { ...CHARTS, ...Object.fromEntries([...answers, ...evaluations]) };
    curves.replaceChildren(...heading("Curves", "Solid lines are training text, dashed ones held-out text. A point is a logged step, "
      + "or the mean of several if there are many."), element("div", { className: "charts" }, ...Object.entries(charts).map(([title, parts]) =>
      chart(title, shown().flatMap((name, colour) => parts.map(([split, key, factor = 1]) => ({
        name: [shown().length > 1 ? name : "", parts.length > 1 ? split : ""].filter(Boolean).join(" ") || title.toLowerCase(),
        colour: colour % 6, isDashed: split === "validation",
        points: known.get(name).rows.filter((row) => row.split === split && row[key] != null).map((row) => [row[axis], row[key] * factor]),
      }))), AXES[axis].toLowerCase()))));
  }

  async function drawFacts() {
    const found = await Promise.all(shown().map((name) => get(`runs/${encodeURIComponent(name)}`)));
    const rows = found.map((each) => [each.name, each.state, `${each.steps.toLocaleString("en")} of ${each.total_steps?.toLocaleString("en") ?? "?"}`,
      each.parameters == null ? "–" : compact(each.parameters), each.best_loss ?? "–",
      each.bits_per_byte == null ? "–" : `${each.bits_per_byte.toFixed(4)}${each.is_sampled ? " (sample)" : ""}`]);
    const head = ["Run", "State", "Steps", "Parameters", "Best loss", "Bits per byte"].map((each) => element("span", {}, ...explain(each)));
    const links = found.filter((each) => each.pages.includes("run")).map((each) => element("a", { target: "_blank", rel: "noopener",
      href: `/ui/runs/${encodeURIComponent(each.name)}/pages/run` }, `Report of ${each.name}`));
    facts.replaceChildren(table(head, rows), element("p", { className: "links" }, ...links));
  }

  function rewarded({ reward, advantage, rewards }) {
    const numbers = Object.entries({ reward, advantage, ...(Object.keys(rewards).length > 1 ? rewards : {}) });
    return numbers.filter(([, value]) => value !== undefined).map(([name, value]) => `${name} ${value?.toPrecision(4) ?? "–"}`).join(", ");
  }

  async function drawTexts() {
    const found = await Promise.all(shown().map(async (name) => [name, await get(`runs/${encodeURIComponent(name)}/samples`)]));
    texts.replaceChildren(...TEXTS.flatMap(([title, words, label, belongs]) =>
      written(title, words, label, found.map(([name, rows]) => [name, rows.filter(belongs)]))));
  }

  function written(title, words, label, found) {
    const steps = [...new Set(found.flatMap(([, rows]) => rows.map((row) => row.step)))].sort((a, b) => a - b);
    if (!steps.length) return [];
    const at = element("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, ariaLabel: label });
    const told = element("span", { className: "shape" }), made = element("div", { className: "beside" });
    const show = () => {
      const step = steps[Number(at.value)];
      told.textContent = `step ${step.toLocaleString("en")}`;
      made.replaceChildren(...found.map(([name, rows]) => {
        const last = rows.findLast((row) => row.step <= step)?.step;
        const texts = rows.filter((row) => row.step === last);
        return element("div", {}, element("p", { className: "shape" }, last == null ? `${name}: nothing yet` : `${name}, step ${last}`),
          ...texts.flatMap((row) => [element("pre", {}, element("b", {}, row.prompt), row.text),
            ...(row.rewards ? [element("p", { className: "shape" }, rewarded(row))] : [])]));
      }));
    };
    at.addEventListener("input", show);
    show();
    return [...heading(title, words), element("div", { className: "knobs" }, element("label", {}, "Step", at), told), made];
  }

  async function drawPictures() {
    stop();
    const name = encodeURIComponent(run.select.value), steps = await get(`runs/${name}/traces`);
    if (!steps.length) {
      pictures.replaceChildren();
      return;
    }
    const at = element("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, ariaLabel: "Step of the trace" });
    const play = element("button", { type: "button" }, "Play"), told = element("span", { className: "shape" });
    const first = await get(`runs/${name}/traces/${steps[0]}`), heads = [...Array(first.config.num_heads).keys()];
    const maps = Object.keys(first.tensors).filter((each) => each.endsWith("attention.weights")).sort(new Intl.Collator("en", { numeric: true }).compare);
    const called = (each) => `${each.startsWith("encoder") ? "Encoder block" : "Block"} ${each.split(".")[1]}${each.includes("cross") ? ", the source" : ""}`;
    const [layer, head] = [choice("Attention", maps, maps[0], called), choice("Head", heads, 0)];
    const made = element("div", { className: "beside" }), cell = element("p", { className: "shape", ariaLive: "polite" });
    let latest = 0;
    const show = async () => {
      const now = ++latest, step = steps[Number(at.value)], trace = await get(`runs/${name}/traces/${step}`);
      const [target, source] = [trace.tokens, trace.source_tokens ?? []].map((tokens) => tokens.map((token) => token.text)), last = trace.predictions.at(-1);
      const parts = [element("div", {}, ...heading("After the prompt", `The likeliest next tokens after ${visible(target.at(-1))}.`),
        bars(last.top.map(([id, probability]) => ({ word: visible(trace.words?.[id] ?? `token ${id}`), values: [probability], text: share(probability) }))))];
      const tensor = layer.select.value;
      if (tensor in trace.tensors) {
        const [queries, keys] = [tensor.startsWith("encoder") ? source : target, /^encoder|cross/.test(tensor) ? source : target];
        const found = await floats(`runs/${name}/traces/${step}/tensor`, { tensor, head: head.select.value });
        parts.unshift(element("div", {}, ...heading(`Attention of head ${tensor.split(".")[1]}.${head.select.value}`, "A row is the token that attends, a column a token that it attends to."),
          cell, map(found.values, queries.length, keys.length, queries, keys, { hue: "query", byRow: true }, (row, column) => {
            cell.textContent = `${visible(queries[row])} → ${visible(keys[column])}: ${share(found.values[row * keys.length + column])}`;
          })));
      }
      if (now !== latest) return;
      told.textContent = `step ${step.toLocaleString("en")}`;
      made.replaceChildren(...parts);
    };
    const guarded = () => show().catch((error) => page.say(error.message, true));
    let playing = null;
    stop = () => { clearInterval(playing); playing = null; play.textContent = "Play"; };
    play.addEventListener("click", () => {
      if (playing) return stop();
      if (Number(at.value) === steps.length - 1) at.value = -1;
      play.textContent = "Pause";
      playing = setInterval(() => {
        at.value = Number(at.value) + 1;
        guarded();
        if (Number(at.value) >= steps.length - 1) stop();
      }, 700);
      return undefined;
    });
    at.addEventListener("input", guarded);
    for (const each of [layer, head]) each.select.addEventListener("change", guarded);
    await show();
    pictures.replaceChildren(...heading("The traced prompt over time", `The trace of ${JSON.stringify(first.prompt)} at ${steps.length} steps.`),
      element("div", { className: "knobs" }, play, element("label", {}, "Step", at), told, layer, head), made);
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
      const found = await Promise.all(shown().map(read));
      if (now !== turn) return;
      const isNew = found.some((each) => each.isNew), isRunning = found.some((each) => each.isRunning);
      for (const each of found) each.isNew = false;
      page.say(isRunning ? "Training now; the curves update automatically." : "Not training now.");
      if (isNew || !curves.childElementCount) {
        drawCurves();
        await drawFacts();
        const samples = texts.childElementCount, isOver = !isRunning;
        if (!samples || isOver || found.some((each) => each.rows.at(-1)?.split !== "train")) await Promise.all([drawTexts(), drawPictures()]);
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
    page.remember({ run: run.select.value, over: along.select.value, beside: [...others].join("|") });
    page.called(`Training of ${shown().join(", ")}`);
    for (const part of [curves, texts, pictures]) part.replaceChildren();
    for (const box of boxes) box.hidden = box.control.value === run.select.value;
    return look(++turn);
  }

  run.select.addEventListener("change", restart);
  along.select.addEventListener("change", () => {
    page.remember({ run: run.select.value, over: along.select.value, beside: [...others].join("|") });
    drawCurves();
  });
  await restart();
  await drawSettings();
}
