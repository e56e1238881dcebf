// Requests of the page to the server.

async function request(path, settings) {
  const response = await fetch(path, settings).catch((error) => {
    throw error instanceof TypeError ? new Error("The server does not answer. Is it still running?") : error;
  });
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({ error: { message: `The server answered with status ${response.status}.` } }));
  throw Object.assign(new Error(error.message), { code: error.code });
}

const posted = (body, signal) => ({ method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
const query = (settings) => new URLSearchParams(Object.entries(settings).filter(([, value]) => value != null));
export const get = async (path, settings = {}) => (await request(`/ui/${path}?${query(settings)}`)).json();
// What there is of a run.
export const ofRun = (run, what, settings) => get(`runs/${encodeURIComponent(run)}/${what}`, settings);
export const post = async (path, body) => (await request(`/ui/${path}`, posted(body))).json();
// A vote on an answer that the server recorded: 1 is good, -1 is bad.
export const judge = async (id, vote) => (await request("/v1/votes", posted({ id, vote }))).json();
// A prompt of the kind that a model learnt to continue, if it is one of these runs and its held-out text is here.
const USUAL = "The sheep jumped over the";
export const suggested = async (runs, model) => (runs.includes(model) ? ofRun(model, "prompt").catch(() => USUAL) : USUAL);
// A new trace of a text, or of token ids; an encoder-decoder also has a target.
export const begin = (model, prompt, target) => post("traces", { model, prompt, target });
// A slice as JSON: next, attribution, map or neighbours of a trace.
export const ask = (number, what, settings) => get(`traces/${number}/${what}`, settings);
// A slice that depends on no choice, which is requested once.
export const once = (trace, what) => (trace[what] ??= ask(trace.number, what));
// The logits of all tokens after a position.
export const logits = (number, position) => floats(`traces/${number}/logits`, { position });
// A tensor, one head of it, or one column of its last dimension, as { shape, values }.
export const tensor = (number, name, head, column) => floats(`traces/${number}/tensor`, { name, head, column });
// The values of one row of a tensor, or of a head of it.
export const vector = async (number, name, row, head) => (await floats(`traces/${number}/tensor`, { name, row, head })).values;

export async function floats(path, settings) {
  const response = await request(`/ui/${path}?${query(settings)}`);
  // The numbers are little-endian, like every processor that browsers run on.
  return { shape: response.headers.get("x-shape").split(",").map(Number), values: new Float32Array(await response.arrayBuffer()) };
}

const CUT_SHORT = "The answer broke off: the server has ended, or has lost the connection. Send the message again.";

// Yields the events of a stream as they arrive.
export async function* events(path, body, signal) {
  const response = await request(path, posted(body, signal));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { done, value } = await reader.read().catch((error) => { throw error.name === "AbortError" ? error : new Error(CUT_SHORT); });
    if (done) throw new Error(CUT_SHORT);
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const content = part.replace(/^data: /, "");
      if (content === "[DONE]") return;
      const event = JSON.parse(content);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
