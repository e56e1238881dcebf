// The arena: two models answer a prompt, and the reader sees their names after the vote.
import { answer } from "./answer.js";
import { events, get, post } from "./api.js";
import { button, element, heading, share, submitted, table } from "./draw.js";
import { load } from "./markdown.js";

// Name in the API: label and key.
const CHOICES = { left: ["Left is better", "L"], right: ["Right is better", "R"], tie: ["Equally good", "T"], neither: ["Both are bad", "B"] };
const SIDES = ["left", "right"], NEXT = "N";
const SAID = { left: "Left was voted better.", right: "Right was voted better.", tie: "A tie.", neither: "Both were voted bad." };

export async function open(page) {
  const arena = await get("arena");
  if (arena.models < 2) return invite(page, arena);
  await load();
  const onkeydown = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit(); };
  const words = element("textarea", { id: "say", rows: 3, placeholder: "A prompt for both models", onkeydown });
  const ask = element("button", { title: "Ctrl and Enter" }, "Ask both"), drawn = button("Draw a prompt", () => begin(null));
  page.controls.append(element("form", { onsubmit: submitted(() => { if (words.value.trim()) begin(words.value); }) },
    element("label", { className: "wide" }, "Prompt", words), ask, ...(arena.prompts ? [drawn] : [])));
  const stage = element("article", {}), ranks = element("section", {});
  page.view.append(stage, ranks);
  let reading = null, press = () => {};
  page.until(() => { reading?.abort(); removeEventListener("keydown", onKey); });

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    press(event.key.toUpperCase());
  }
  addEventListener("keydown", onKey);

  // A row of buttons, each with its own key.
  function buttons(choices) {
    const made = choices.map(([label, key, act]) => button(label, act, { ariaKeyShortcuts: key }));
    for (const each of made) each.append(element("kbd", {}, each.ariaKeyShortcuts));
    press = (key) => made.find((each) => each.ariaKeyShortcuts === key && !each.disabled)?.click();
    return element("div", { className: "choices" }, ...made);
  }

  async function write(round, side, into, signal) {
    const shown = answer(into, { isPlain: () => !arena.chats });
    try {
      for await (const event of events(`/ui/arena/rounds/${round}/${side}`, {}, signal)) {
        shown.add(event.text);
        if (event.is_cut === false && !shown.text) into.append(element("small", { className: "shape" }, "(nothing)"));
        if (event.is_cut) into.append(element("small", { className: "shape" }, " (stopped at the length limit)"));
      }
    } finally {
      shown.end();
    }
  }

  async function show(round) {
    reading?.abort();
    const { signal } = reading = new AbortController();
    page.remember({ round: round.round });
    const titles = SIDES.map((side) => element("h3", {}, side === "left" ? "Left" : "Right"));
    const bodies = SIDES.map((side) => element("div", { className: "written", ariaLabel: `The answer on the ${side}` }));
    const row = element("div", {}), told = element("p", { className: "shape", role: "status" });
    stage.replaceChildren(element("p", { className: "asked" }, round.prompt),
      element("div", { className: "beside" }, ...SIDES.map((_, place) => element("div", { className: "answer" }, titles[place], bodies[place]))), row, told);
    ranks.replaceChildren();

    async function reveal(found) {
      titles.forEach((title, place) => title.append(": ", element("b", {}, found.models[place])));
      bodies.forEach((body, place) => body.classList.toggle("left-out", found.vote === "neither" || found.vote === SIDES[1 - place]));
      row.replaceChildren(buttons([["Next round", NEXT, next]]));
      told.textContent = `${SAID[found.vote]} Saved in ${arena.votes}.`;
      page.say("");
      await standings();
    }

    async function vote(choice) {
      press = () => {};
      for (const each of row.querySelectorAll("button")) each.disabled = true;
      try {
        await reveal(await post(`arena/rounds/${round.round}/vote`, { vote: choice }));
      } catch (error) {
        page.say(error.message, true);
        // The vote may have been saved although the answer was lost.
        const found = await get(`arena/rounds/${round.round}`).catch(() => round);
        if (found.vote) await reveal(found); else offer();
      }
    }
    const offer = () => row.replaceChildren(buttons(Object.entries(CHOICES).map(([choice, [label, key]]) => [label, key, () => vote(choice)])));

    press = () => {};
    page.say(round.vote ? "" : "Both are writing …");
    try {
      await Promise.all(SIDES.map((side, place) => write(round.round, side, bodies[place], signal)));
      if (round.vote) return await reveal(round);
      page.say("Which answer is better?");
      offer();
    } catch (error) {
      if (signal.aborted) return;
      page.say(error.message, true);
      row.replaceChildren(buttons([["Show them again", "A", () => show(round)], ["Next round", NEXT, next]]));
    }
  }

  const begin = page.guarded(async (prompt) => {
    ask.disabled = drawn.disabled = true;
    const round = await post("arena/rounds", { prompt }).finally(() => { ask.disabled = drawn.disabled = false; });
    words.value = "";
    words.blur();
    await show(round);
  });

  function next() {
    if (arena.prompts) return begin(null);
    words.focus();
    words.select();
  }

  async function standings() {
    const { rated, waiting, problem } = await get("arena/standings").catch((error) => ({ rated: [], waiting: [], problem: error.message }));
    const body = [...rated.map((each) => [each.name, String(each.games), share(each.win_rate), each.strength.toFixed(0),
      each.interval[0] < each.interval[1] ? each.interval.map((end) => end.toFixed(0)).join("–") : "–"]), ...waiting.map((name) => [name, "0", "–", "–", "–"])];
    ranks.replaceChildren(...heading("Standings", "Bradley-Terry strengths on the Elo scale: a model with 400 more is ten times as likely to win. "
      + "Intervals have 95 % confidence. A tie counts as half a win for each, and so does a round with two bad answers."),
    ...(problem ? [element("p", { role: "note" }, problem)] : []), table(["model", "rounds", "win rate", "strength", "interval"], body));
  }

  page.called("Arena");
  page.view.prepend(...heading("Vote for the better answer", "Two of the models answer the same prompt. After your vote you see which ones. Votes are saved as preferences."
    + (arena.chats ? "" : " One of the models has no chat template, so all of them continue the prompt as plain text.")));
  if (page.chosen.round) {
    try {
      return await show(await get(`arena/rounds/${encodeURIComponent(page.chosen.round)}`));
    } catch (error) {
      page.remember({});
      page.say(error.message, true);
    }
  }
  await standings();
}

// What there is instead of an arena with fewer than two models: the models that the server can load, and the command for others.
function invite(page, { command, loadable }) {
  const allow = (isAllowed) => made.forEach((each) => { each.disabled = !isAllowed; });
  const made = loadable.map((name) => button(`Load ${name}`, page.guarded(async () => {
    allow(false);
    page.say(`${name} is being loaded …`);
    await post("arena/models", { name }).finally(() => allow(true));
    page.view.replaceChildren();
    page.say("");
    await open(page);
  })));
  const list = element("ul", { className: "plain-list" }, ...made.map((each) => element("li", {}, each)));
  page.view.append(...heading("A second model is needed", "Here two models answer the same prompt, and you vote without knowing which one wrote which answer."),
    ...(loadable.length ? [element("h3", {}, "Models in your cache"), list] : []),
    element("h3", {}, "Any other model"), element("p", {}, "End this server, and start it with two models, such as two of your runs:"),
    element("pre", {}, command));
}
