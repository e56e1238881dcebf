// Training played over one picture: the journey of a run's prompt through its network at several steps, and its attention.
import { floats, ofRun } from "./api.js";
import { choice, element, explain, heading, knobs, map, share, told, visible } from "./draw.js";
import { journey } from "./journey.js";

const MILLISECONDS = 350; // in which one picture becomes the next

const mixed = (from, to, part) => (Array.isArray(to) ? to.map((each, place) => mixed(from?.[place] ?? 0, each, part))
  : to == null ? to : (from ?? 0) + part * (to - (from ?? 0)));

// The numbers between two pictures of the same tokens; the next tokens are those of the second one.
function between(from, to, part) {
  const before = new Map(from.next.map((token) => [token.id, token.probability]));
  return { ...to, ...Object.fromEntries(["stream", "scale", "weights"].map((name) => [name, mixed(from[name], to[name], part)])),
    adds: Object.fromEntries(Object.entries(to.adds).map(([name, value]) => [name, mixed(from.adds[name], value, part)])),
    next: to.next.map((token) => ({ ...token, probability: mixed(before.get(token.id), token.probability, part) })) };
}

// Draws a run's pictures in `place`: `refresh` asks which `steps` have one, and `show(step)` shows the last one up to a step. Nothing
// is fetched while nobody sees it, since a picture of a checkpoint costs the server loading a model.
export function snapshots(page, run, place) {
  const steps = [], kept = new Map(), words = element("p"), stage = element("div", { className: "stage" }), attention = element("div");
  let source = "", traced = new Set(), channels = null, shown = null, isSeen = false, wanted = null, layer = null, frame = 0, fields = null;

  async function refresh() {
    const [found, traces] = await Promise.all(["journeys", "traces"].map((what) => ofRun(run, what)));
    source = found.source;
    traced = new Set(traces);
    steps.splice(0, steps.length, ...found.steps);
    if (!steps.length || place.childElementCount) return;
    place.append(...heading("Training over one picture", "Each token of the prompt is a ribbon, its residual stream; blue arcs are attention, and gold is what "
      + "a part adds to the logit of the likeliest next token. The strips are the same channels at every step."), words, stage, attention);
  }

  // The last picture chooses the channels, since those of the first one vary by chance.
  async function picture(step) {
    if (!channels) {
      const last = await ofRun(run, `journeys/${steps.at(-1)}`);
      channels = last.channels.join(",");
      kept.set(steps.at(-1), last);
    }
    if (!kept.has(step)) kept.set(step, await ofRun(run, `journeys/${step}`, { channels }));
    return kept.get(step);
  }

  function put(data) {
    const unfolded = layer ?? data.weights.length - 1, focused = stage.contains(document.activeElement) && document.activeElement.dataset.key;
    stage.replaceChildren(journey(data, { layer: unfolded }, Math.floor(stage.clientWidth), { open: (_, of) => { layer = of ?? layer; put(data); } }));
    if (focused) stage.querySelector(`[data-key="${focused}"]`)?.focus({ preventScroll: true });
  }

  function move(from, to) {
    cancelAnimationFrame(frame);
    if (!from || matchMedia("(prefers-reduced-motion: reduce)").matches) return put(to);
    const begin = performance.now(), next = (now) => {
      const part = Math.min(1, Math.max(0, now - begin) / MILLISECONDS);
      put(part < 1 ? between(from, to, part) : to);
      if (part < 1 && stage.isConnected) frame = requestAnimationFrame(next);
    };
    frame = requestAnimationFrame(next);
    return undefined;
  }

  const chosen = () => steps.findLast((each) => each <= wanted) ?? steps[0];

  async function look() {
    const step = chosen();
    if (!isSeen || wanted == null || step == null || step === shown?.step) return;
    const data = await picture(step);
    if (step !== chosen() || !stage.clientWidth) return;
    const [last, likeliest] = [data.tokens.at(-1), data.next[0]].map(({ text }) => element("code", {}, visible(text)));
    const which = `${source === "traces" ? "stored trace" : "checkpoint"} ${steps.indexOf(step) + 1} of ${steps.length}`;
    words.replaceChildren(element("b", {}, `${run}, step ${step.toLocaleString("en")}`), ` (${which}): after `, last,
      " the likeliest token is ", likeliest, ` with ${share(data.next[0].probability)}.`);
    move(shown?.data, data);
    stage.dataset.step = step;
    shown = { step, data };
    if (traced.has(step)) await heads(step);
  }
  const guarded = page.guarded(look);

  // The attention of one head, of which the picture shows the mean.
  async function heads(step) {
    const trace = await ofRun(run, `traces/${step}`);
    if (!fields) {
      const { compare } = new Intl.Collator("en", { numeric: true }), maps = Object.keys(trace.tensors).filter((each) => each.endsWith("attention.weights")).sort(compare);
      if (!maps.length) return;
      const called = (each) => `${each.startsWith("encoder") ? "Encoder block" : "Block"} ${each.split(".")[1]}${each.includes("cross") ? ", the source" : ""}`;
      const anew = () => { shown = { ...shown, step: null }; guarded(); };
      fields = [choice("Attention", maps, maps.at(-1), anew, called), choice("Head", [...Array(trace.config.num_heads).keys()], 0, anew)];
      attention.replaceChildren(element("h3", {}, ...explain("The attention of one head")), knobs(...fields), element("div", { className: "head" }));
    }
    const [tensor, head] = fields.map((each) => each.select.value);
    const [target, source] = [trace.tokens, trace.source_tokens ?? []].map((tokens) => tokens.map((token) => token.text));
    const [queries, keys] = [tensor.startsWith("encoder") ? source : target, /^encoder|cross/.test(tensor) ? source : target];
    const found = await floats(`runs/${encodeURIComponent(run)}/traces/${step}/tensor`, { tensor, head });
    const cell = told("A row is the token that attends, a column one that it attends to.");
    if (step !== chosen() || fields.some((each, at) => each.select.value !== [tensor, head][at])) return;
    attention.lastElementChild.replaceChildren(cell, map(found.values, queries.length, keys.length, queries, keys, { hue: "query", byRow: true }, (row, column) => {
      cell.textContent = `${visible(queries[row])} → ${visible(keys[column])}: ${share(found.values[row * keys.length + column])}`;
    }));
  }

  const seen = new IntersectionObserver(([entry]) => { isSeen = entry.isIntersecting; guarded(); }, { rootMargin: "200px" });
  const sized = new ResizeObserver(() => { if (shown && stage.clientWidth !== stage.firstElementChild?.at.width) put(shown.data); });
  seen.observe(place);
  sized.observe(stage);
  const stop = () => { seen.disconnect(); sized.disconnect(); cancelAnimationFrame(frame); };
  return { steps, refresh, stop, show: (step) => { wanted = step; return guarded(); } };
}
