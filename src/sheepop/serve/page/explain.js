// The column beside the picture: what a part of the network does, why, and its formula. The guided tour goes through the same parts.
import { button, element, explain } from "./draw.js";

// Name: title, what, why, formula, and the station that the tour shows. In a formula [query|q] is q in the colour of queries.
export const TOPICS = {
  whole: ["The whole network", "Each row is a token of the text. From left to right the model changes what it knows of each token: blue stations let tokens "
    + "look at each other, teal ones change each token by itself. On the right are the tokens that may follow the bold one. "
    + "Point at anything to learn what it is, and click on a station to see its numbers.",
  "The model learnt to predict the next token. For that it needs the tokens before it, and what it remembers of its training text.",
  "text → [residual|vectors] → [query|attention] → [forward|feed-forward] → … → [gold|next token]", null],
  tokens: ["Tokens", "The tokenizer cuts the text into pieces that the model knows. Each piece is a row of the picture.",
    "A network computes with numbers, so every piece has an id. Frequent words are one piece, rare ones are several.", "text → id₀ id₁ id₂ …", null],
  embedding: ["Embedding", "Each id selects a row of a table: the token's vector. It is the beginning of the token's ribbon.",
    "Tokens that are used alike get similar vectors, so what the model learns about one helps it with the other.", "[residual|x₀] = E[id]", "embedding"],
  attention: ["Attention", "Tokens look at each other. A blue arc leads to a token that the chosen one looks at, an orange arc comes from a later token "
    + "that looks at the chosen one. The thicker the arc, the larger the weight.",
  "The next word may depend on a name far back. Attention is the only way in which one token reaches another.",
  "w = softmax([query|q] · [key|k]ᵀ / √C),  out = W_O · (w · [value|v])", "attention.0"],
  heads: ["Heads", "A block looks several times at once. Each head has its own queries, keys and values, and its own pattern.",
    "One head can find the previous token while another finds the start of a quotation. The arcs of the picture are the mean over all heads.",
    "[query|q] = W_Q · x,  [key|k] = W_K · x,  [value|v] = W_V · x", "attention.0"],
  mixer: ["Mixer", "This block mixes tokens without attention: it carries a state from each token to the next.", "A state of fixed size costs the same for any length of text.",
    "state ← f(state, x)", null],
  forward: ["Feed-forward", "Each token by itself goes to a wider vector, through a bend, and back.",
    "Here the model keeps much of what it knows: a unit responds to a pattern and adds what usually follows it.", "[forward|out] = W₂ · f(W₁ · x)", "forward.0"],
  residual: ["Residual stream", "The ribbon is the sum of all that was added so far. Each of its strips is one number of the vector: violet above 0, grey below, "
    + "the stronger the larger, up to the size that 99 % of the numbers of the vector do not exceed.",
  "Since blocks only add, every later block can still read what an earlier one wrote. A gold wedge is what a part adds to the likeliest next token; "
    + "a hatched one speaks against it.",
    "[residual|x] ← [residual|x] + attention(x),  [residual|x] ← [residual|x] + [forward|feed-forward](x)", null],
  prediction: ["Prediction", "The last vector of the chosen token is compared with every word of the vocabulary. The gold bars are the likeliest next tokens.",
    "The model learnt only this: to give a high probability to what really comes next.", "[gold|p] = softmax(W · norm([residual|x]))", "prediction"],
  writing: ["Writing", "The model writes by choosing a next token, adding it to the text, and doing all of this again. A click on a gold bar writes that token.",
    "Keys and values of earlier tokens stay as they are, so they are kept in a cache, and only the new token needs computing.", "text ← text + token", "prediction"],
};
export const TOUR = ["tokens", "embedding", "attention", "heads", "forward", "residual", "prediction", "writing"];

function formula(text) {
  const parts = text.split(/\[(\w+)\|([^\]]+)\]/);
  const low = (part) => part.split(/_(\w)/).map((each, place) => (place % 2 ? element("sub", {}, each) : each));
  return element("p", { className: "formula" }, ...parts.map((part, place) =>
    (place % 3 === 0 ? element("span", {}, ...low(part)) : place % 3 === 2 ? element("b", { className: `is-${parts[place - 1]}` }, part) : "")));
}

// The column; `tour` is the number of a step, from 1, or null, and `go` changes it.
export function column(topic, tour, go) {
  const body = element("div", { className: "topic" }), steps = element("div", { className: "steps" });
  const open = () => { fold.ariaExpanded = String(made.classList.toggle("open")); };
  const fold = button("Explain", open, { className: "fold", ariaExpanded: String(Boolean(tour)) });
  const made = element("aside", { className: "explain", ariaLabel: "Explanation" }, fold, body, steps);
  made.tell = (name) => {
    const [title, what, why, equation] = TOPICS[name];
    if (body.dataset.topic === name) return;
    body.dataset.topic = name;
    fold.textContent = title;
    const part = (label, ...words) => [element("h3", {}, label), ...words];
    body.replaceChildren(element("h2", {}, title), ...part("What", element("p", {}, ...explain(what))), ...part("Why", element("p", {}, why)),
      ...part("Formula", formula(equation)));
  };
  const to = (label, step, settings = {}) => button(label, () => go(step), { "data-key": `tour.${label}`, ...settings });
  const last = TOUR.length, left = Number(localStorage.getItem("tour"));
  if (tour) steps.append(element("span", { className: "shape" }, `${tour} of ${last}`), to("Back", tour - 1, { disabled: tour === 1 }),
    ...(tour === last ? [to("Done", null)] : [to("Next", tour + 1), to("Leave the tour", null)]));
  else steps.append(left > 1 && left <= last ? to(`Resume the tour at ${left} of ${last}`, left) : "", to("Take the tour", 1));
  made.classList.toggle("open", Boolean(tour));
  made.tell(topic);
  return made;
}
