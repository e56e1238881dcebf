// The chat: one model or two, all settings of the sampler, the probability of each token, and votes.
import { answer } from "./answer.js";
import { events, judge, post } from "./api.js";
import { button, choice, element, entered, folded, heading, knobs, submitted } from "./draw.js";
import { load } from "./markdown.js";

// Name in the API: label and default value ("" means the server's default).
const SETTINGS = {
  temperature: ["Temperature", 0.8], top_p: ["Top-p", 0.95], top_k: ["Top-k", ""], min_p: ["Min-p", ""], typical_p: ["Typical-p", ""],
  repetition_penalty: ["Repetition penalty", ""], presence_penalty: ["Presence penalty", ""], frequency_penalty: ["Frequency penalty", ""],
  max_tokens: ["Most tokens", 128], min_tokens: ["Fewest tokens", ""], seed: ["Seed", ""],
};
const ALTERNATIVES = 5;

export async function open(page) {
  const names = page.models.map((each) => each.name), models = new Map(page.models.map((each) => [each.name, each]));
  if (!names.length) {
    page.view.append(...heading("No model yet", "The run has no checkpoint so far. You can chat with its model after the first one."));
    return;
  }
  await load();
  const { chosen } = page, onchange = () => remember();
  const model = choice("Model", names, chosen.model, onchange), beside = choice("Compare with", ["", ...names], chosen.beside, onchange, (name) => name || "none");
  const fields = Object.fromEntries(Object.entries(SETTINGS).map(([name, [, value]]) =>
    [name, element("input", { type: "number", step: "any", value: chosen[name] ?? value, onchange })]));
  const stop = element("input", { value: chosen.stop ?? "", placeholder: "a text that ends the answer", onchange });
  const system = element("textarea", { rows: 2, value: chosen.system ?? "", placeholder: "Instructions for the model", onchange });
  const tools = element("textarea", { rows: 2, value: chosen.tools ?? "", placeholder: "What the model may call: a JSON list of OpenAI's tools", onchange });
  const box = (checked, more) => element("input", { type: "checkbox", checked, onchange: () => { remember(); more?.(); } });
  const sure = box(chosen.sure === "yes"), plain = box(chosen.plain === "yes", () => answers.forEach((each) => each.redraw()));
  const records = page.models.some((each) => each.recorded), record = box(chosen.record !== "no");
  const boxes = [[sure, "Probabilities"], [plain, "Plain text"], ...(records ? [[record, "Record this conversation"]] : [])];
  page.controls.append(element("form", {}, model, beside, ...boxes.map((each) => element("label", { className: "box" }, ...each))),
    folded("Settings", knobs(...Object.entries(SETTINGS).map(([name, [label]]) => element("label", {}, label, fields[name])),
      element("label", {}, "Stop", stop), element("label", { className: "wide" }, "System", system), element("label", { className: "wide" }, "Tools", tools))));

  const say = () => { if (!stopping) submit(words.value); };
  const log = element("div", { className: "log", role: "log", ariaLive: "polite" });
  const words = element("textarea", { id: "say", rows: 2, placeholder: "Say something", ariaLabel: "Message", onkeydown: entered(say) });
  const send = element("button", { title: "Enter; Shift and Enter begin a new line" }, "Send");
  const again = button("Start over", () => { stopping?.abort(); history = []; pending = null; answers.clear(); log.replaceChildren(); });
  page.view.append(log, element("form", { id: "composer", onsubmit: submitted(() => (stopping ? stopping.abort() : say())) },
    element("label", { className: "wide" }, "Message", words), send, again));
  const answers = new Set(), prints = new Map();
  let history = [], pending = null, stopping = null;
  page.until(() => stopping?.abort());

  const chats = () => [model, beside].every((each) => !each.select.value || models.get(each.select.value).chats);

  function remember() {
    const values = Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.value]));
    page.remember({ model: model.select.value, beside: beside.select.value, ...values, stop: stop.value, system: system.value, tools: tools.value,
      sure: sure.checked ? "yes" : "", plain: plain.checked ? "yes" : "", record: records && !record.checked ? "no" : "" });
    page.called("Chat");
    log.classList.toggle("sure", sure.checked);
    page.say([chats() ? "" : "A model without a chat template continues the plain text.",
      records && record.checked ? "This server records conversations, with placeholders for personal data." : ""].join(" ").trim());
  }

  // `begun` is the beginning of the answer, which the model continues.
  function request(name, prompt, place, begun) {
    const given = Object.entries(fields).filter(([, field]) => field.value !== ""), settings = Object.fromEntries(given.map(([key, { value }]) => [key, Number(value)]));
    // With the same seed, two copies of a model would give the same answer.
    if (settings.seed != null) settings.seed += place;
    if (stop.value) settings.stop = stop.value;
    if (tools.value.trim() && chats()) settings.tools = listed(tools.value);
    const common = { model: name, stream: true, ...settings, ...(records && !record.checked ? { store: false } : {}) };
    const asked = begun ? { messages: [...prompt, { role: "assistant", content: begun }], continue_final_message: true, add_generation_prompt: false } : { messages: prompt };
    return chats() ? ["/v1/chat/completions", { ...common, ...asked, logprobs: true, top_logprobs: ALTERNATIVES }]
      : ["/v1/completions", { ...common, prompt: prompt.map((each) => each.content).join("") + begun, logprobs: ALTERNATIVES }];
  }

  async function write(name, prompt, place, into, begun, branch) {
    const shown = answer(into, { begun, branch, isPlain: () => plain.checked, name: `Answer of ${name}` }), calls = [];
    answers.add(shown);
    let end = null, thought = null, id = null;
    try {
      for await (const event of events(...request(name, prompt, place, begun), stopping.signal)) {
        const found = event.choices[0], print = event.system_fingerprint;
        id = event.id;
        if (prints.has(name) && prints.get(name) !== print) page.say(`${name} was loaded again meanwhile. This answer is by the model that is on the disk now.`);
        prints.set(name, print);
        if (!found) continue;
        const reasoning = found.delta?.reasoning_content;
        if (reasoning) {
          if (!thought) into.before(folded("Reasoning", thought = element("pre")));
          thought.append(reasoning);
        } else shown.add((found.delta ? found.delta.content : found.text) ?? "", sureness(found.logprobs));
        for (const call of found.delta?.tool_calls ?? []) {
          calls.push({ id: call.id, type: call.type, function: call.function });
          into.before(folded(`Calls ${call.function.name}`, element("pre", {}, call.function.arguments)));
        }
        end = found.finish_reason ?? end;
      }
    } finally {
      shown.end();
    }
    if (end === "length") into.append(element("small", { className: "shape" }, " (stopped at the length limit)"));
    if (records && record.checked) into.after(opinion(id));
    return { text: shown.text, calls };
  }

  // Buttons that record whether an answer is good.
  function opinion(id) {
    const made = [["Good", 1], ["Bad", -1]].map(([label, vote], place) => button(label, page.guarded(async () => {
      await judge(id, vote);
      made.forEach((each, at) => { each.ariaPressed = String(at === place); });
    }), { ariaPressed: "false" }));
    return knobs(...made);
  }

  function settle(place) {
    if (!pending) return;
    history = [...pending.prompt, { role: "assistant", content: pending.texts[place], ...(pending.calls[place]?.length ? { tool_calls: pending.calls[place] } : {}) }];
    pending.columns.forEach((column, each) => column.classList.toggle("left-out", each !== place));
    pending = null;
  }

  function vote(texts, wanted, prompt) {
    const told = element("p", { className: "shape" });
    const made = ["Left is better", "Right is better"].map((label, place) => button(label, page.guarded(async () => {
      const file = await post("votes", { prompt: chats() ? prompt : prompt.map((each) => each.content).join(""), chosen: texts[place], rejected: texts[1 - place],
        chosen_model: wanted[place], rejected_model: wanted[1 - place] });
      told.textContent = `Saved in ${file}, which sheepop tune dpo and reward read.`;
      settle(place);
      for (const each of made) each.disabled = true;
    }), { disabled: texts[0] === texts[1] || texts.some((text) => !text) }));
    return [knobs(...made), told];
  }

  // Sends a message; the answer begins with `begun`, if an earlier one is continued differently.
  async function submit(message, begun = "") {
    if (!message) return;
    settle(0);
    remember();
    const wanted = [model.select.value, ...(beside.select.value ? [beside.select.value] : [])];
    const before = history.length || !system.value || !chats() ? history : [{ role: "system", content: system.value }];
    let prompt = [...before, { role: "user", content: message }], leftOut = 0;
    const columns = wanted.map((name) => element("div", { className: "answer" }, element("small", { className: "shape" }, name)));
    const bodies = columns.map((column) => column.appendChild(element("div", { className: "written" })));
    const turn = element("article", {}, element("p", { className: "asked" }, message), element("div", { className: "beside" }, ...columns));
    log.append(turn);
    if (!begun) words.value = "";
    const branch = (text) => {
      if (stopping) return;
      for (let each = turn; each; each = each.nextElementSibling) each.classList.add("left-out");
      [pending, history] = [null, prompt.slice(0, -1)];
      submit(message, text);
    };
    stopping = new AbortController();
    send.textContent = "Stop";
    const texts = wanted.map(() => ""), calls = [];
    const ask = async () => {
      const ends = await Promise.allSettled(wanted.map(async (name, place) => {
        ({ text: texts[place], calls: calls[place] } = await write(name, prompt, place, bodies[place], begun, branch));
      }));
      return ends.find((end) => end.status === "rejected")?.reason;
    };
    try {
      let failed = await ask();
      // As in the terminal, the oldest messages leave a context that is full.
      while (failed?.code === "context_length_exceeded" && shorter(prompt)) {
        prompt = shorter(prompt);
        leftOut += 2;
        failed = await ask();
      }
      if (failed) throw failed;
      if (leftOut) page.say(`The model's context is full, so it no longer reads the first ${leftOut} messages.`);
      pending = { prompt, texts, columns, calls };
      if (texts.length > 1) turn.append(...vote(texts, wanted, prompt)); else settle(0);
    } catch (error) {
      // Stopped and failed answers are not part of the conversation.
      turn.classList.add("left-out");
      page.say(error.name === "AbortError" ? "Stopped; this turn is not part of the conversation." : error.message, error.name !== "AbortError");
    }
    stopping = null;
    send.textContent = "Send";
    words.focus();
  }

  remember();
  page.view.prepend(...heading("Chat with a model", "Point at a token of an answer to see its probability under the model and the "
    + "alternatives; a click on one continues the answer with it. With a second model beside the first, vote for the better answer: votes are saved as preferences."));
}

// The conversation without its first question and answer, but with its instructions; null if only the last question is left.
function shorter(prompt) {
  const first = prompt[0].role === "system" ? 1 : 0;
  return prompt.length > first + 2 ? [...prompt.slice(0, first), ...prompt.slice(first + 2)] : null;
}

// Tokens with their probabilities and alternatives, from either shape of the API.
function sureness(found) {
  if (!found) return [];
  if (found.content) return found.content.map((each) => [each.token, each.logprob, each.top_logprobs.map((other) => [other.token, other.logprob])]);
  return found.tokens.map((text, place) => [text, found.token_logprobs[place], Object.entries(found.top_logprobs[place] ?? {})]);
}

function listed(text) {
  try { return JSON.parse(text); } catch (error) { throw new Error(`Tools: this is not JSON: ${error.message}.`); }
}

