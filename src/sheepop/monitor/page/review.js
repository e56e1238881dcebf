// Shows one answer at a time. All text comes from strangers: it is set as text, never as markup.

const part = (name) => document.getElementById(name);
const token = new URLSearchParams(location.hash.slice(1)).get("token") || "";
const VERBS = { keep: "kept", mend: "mended", drop: "dropped" };
// Controls that reorder or hide what is written are shown by their numbers.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

let decisions = [];
let shown = null;
let place = 0;
let busy = false;

async function ask(path, body) {
  const options = { headers: { Authorization: `Bearer ${token}` } };
  if (body !== undefined) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    options.headers["Content-Type"] = "application/json";
  }
  const answer = await fetch(path, options);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error.message);
  return found;
}

// Does one thing at a time, so that a key that is held down decides on no answer that nobody has seen.
async function once(work) {
  if (busy) return;
  busy = true;
  part("trouble").textContent = "";
  try {
    await work();
  } catch (error) {
    part("trouble").textContent = error instanceof TypeError ? "The server does not answer. Is it still running?" : error.message;
  }
  busy = false;
}

function element(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

const visible = (text) => text.replace(HIDDEN, (found) => `⟨${found.codePointAt(0).toString(16).padStart(4, "0")}⟩`);

function message({ role, text, calls }, className = "") {
  const made = element("article", "", className);
  made.append(element("h2", role), element("pre", visible(text)));
  if (calls) made.append(element("pre", visible(calls), "calls"));
  return made;
}

async function show(number) {
  shown = await ask(`answers/${number}`);
  place = number;
  const { decision } = shown;
  const facts = [`${place + 1} of ${decisions.length}`, shown.why, shown.model, shown.time.slice(0, 16).replace("T", " "), shown.place];
  part("about").replaceChildren(visible(facts.filter(Boolean).join(" · ")));
  if (decision) part("about").append(" · ", element("span", VERBS[decision.decision], `mark ${decision.decision}`));
  const parts = shown.asked.map((each) => message(each));
  parts.push(message(shown.answer, `answer ${decision?.decision === "keep" ? "" : decision ? "drop" : ""}`));
  if (decision?.text) parts.push(message({ role: "mended", text: decision.text, calls: "" }, "answer"));
  for (const comment of shown.comments) parts.push(message({ role: "comment of the voter", text: comment, calls: "" }));
  part("conversation").replaceChildren(...parts);
  part("mending").hidden = true;
  part("previous").disabled = place === 0;
  part("next").disabled = place + 1 >= decisions.length;
  progress();
  scrollTo(0, 0);
}

function progress() {
  const done = decisions.filter(Boolean).length;
  const counts = Object.entries(VERBS).map(([verb, word]) => `${decisions.filter((each) => each === verb).length} ${word}`);
  part("progress").textContent = `${done} of ${decisions.length} decided: ${counts.join(", ")}`;
  part("bar").value = decisions.length ? done / decisions.length : 1;
}

function nextOpen() {
  const after = decisions.findIndex((each, number) => number > place && !each);
  return after >= 0 ? after : decisions.findIndex((each) => !each);
}

async function toNextOpen() {
  const next = nextOpen();
  if (next >= 0) return show(next);
  await show(place);
  part("trouble").textContent = "Every answer has a decision.";
}

const decide = (decision, text) =>
  once(async () => {
    const { id, choice } = shown;
    await ask("decisions", text === undefined ? { id, choice, decision } : { id, choice, decision, text });
    decisions[place] = decision;
    await toNextOpen();
  });

function mend() {
  part("mended").value = shown.decision?.text ?? shown.answer.text;
  part("mending").hidden = false;
  part("mended").focus();
  part("mending").scrollIntoView({ block: "end" });
}

function cancel() {
  part("mending").hidden = true;
  part("mend").focus();
}

const actions = {
  k: () => decide("keep"),
  d: () => decide("drop"),
  m: mend,
  n: () => once(toNextOpen),
  ArrowLeft: () => place > 0 && once(() => show(place - 1)),
  ArrowRight: () => place + 1 < decisions.length && once(() => show(place + 1)),
};

addEventListener("keydown", (event) => {
  if (!shown) return;
  if (!part("mending").hidden) {
    if (event.key === "Escape") cancel();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) part("mending").requestSubmit();
    return;
  }
  const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  event.preventDefault();
  action();
});
part("mending").addEventListener("submit", (event) => {
  event.preventDefault();
  decide("mend", part("mended").value);
});
part("cancel").addEventListener("click", cancel);
for (const [name, key] of Object.entries({ keep: "k", mend: "m", drop: "d", open: "n", previous: "ArrowLeft", next: "ArrowRight" })) {
  part(name).addEventListener("click", () => shown && actions[key]());
}

once(async () => {
  const found = await ask("answers");
  decisions = found.decisions;
  part("file").textContent = `Decisions go to ${visible(found.file)}`;
  await show(Math.max(0, decisions.findIndex((each) => !each)));
});
