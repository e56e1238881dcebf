// What the page asks the server for: a trace, and slices of it.

async function answer(response) {
  if (response.ok) return response;
  let message = `The server answered with status ${response.status}.`;
  try { message = (await response.json()).error.message; } catch { /* no reason was given */ }
  throw new Error(message);
}

export async function models() {
  return (await answer(await fetch("/ui/models"))).json();
}

export async function begin(model, prompt) {
  const body = JSON.stringify({ model, prompt });
  const headers = { "content-type": "application/json" };
  return (await answer(await fetch("/ui/traces", { method: "POST", headers, body }))).json();
}

// A slice as JSON: next, attribution, map or neighbours of a trace.
export async function ask(number, what, settings = {}) {
  const query = new URLSearchParams(Object.entries(settings).filter(([, value]) => value != null));
  return (await answer(await fetch(`/ui/traces/${number}/${what}?${query}`))).json();
}

// The logits of all tokens behind a position.
export async function logits(number, position) {
  return floats(await fetch(`/ui/traces/${number}/logits?position=${position}`));
}

// A tensor, or one head of it, as { shape, values }.
export async function tensor(number, name, head) {
  const query = new URLSearchParams(head == null ? { name } : { name, head });
  return floats(await fetch(`/ui/traces/${number}/tensor?${query}`));
}

async function floats(given) {
  const response = await answer(given);
  const bytes = new DataView(await response.arrayBuffer());
  const values = new Float32Array(bytes.byteLength / 4);
  for (let place = 0; place < values.length; place++) values[place] = bytes.getFloat32(4 * place, true);
  return { shape: response.headers.get("x-shape").split(",").map(Number), values };
}
