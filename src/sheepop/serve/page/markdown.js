// Markdown that a model wrote, as elements that do no harm: no HTML, no images, and links that only lead somewhere.
import { element } from "./draw.js";
import { highlighter, katex, markdownIt, purifier } from "./libraries.js";

const SAFE = {
  RETURN_DOM_FRAGMENT: true, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOWED_TAGS: ["p", "br", "hr", "em", "strong", "s", "code", "pre", "blockquote", "ul", "ol", "li", "a", "span", "h1", "h2", "h3", "h4", "h5", "h6",
    "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "title", "class", "start", "align"], ADD_URI_SAFE_ATTR: ["start", "align"],
};
// Formulas: begin, end, whether it has lines of its own. A long one is shown as it is written.
const FORMULAS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]], LONGEST_FORMULA = 2000;
// A formula may neither load nor run anything, and neither its macros nor its sizes may explode.
const LIMITS = { trust: false, maxExpand: 200, maxSize: 20, strict: "ignore" };
let parser = null, clean = null, colours = null, setter = null;
const formulas = new Map(), MOST_FORMULAS = 500;

// Must be awaited once, before all else here.
export async function load() {
  const [make, purify] = await Promise.all([markdownIt(), purifier()]);
  parser ??= parserOf(make);
  clean = purify;
}

// The blocks of a text: where each begins and ends, and its tokens.
export function blocks(text) {
  const tokens = parser.parse(text, {}), starts = [0, ...Array.from(text.matchAll(/\r\n?|\n/g), (found) => found.index + found[0].length)];
  const heads = tokens.flatMap((token, place) => (token.level === 0 && token.nesting >= 0 ? [place] : []));
  return heads.map((place, each) => ({
    from: starts[tokens[place].map[0]], to: starts[tokens[place].map[1]] ?? text.length, tokens: tokens.slice(place, heads[each + 1]),
  }));
}

// A block as a fragment. If it needs a library that is not loaded yet, `later` gets the promise of it.
export function drawn({ tokens }, later) {
  if (!colours && tokens.some((token) => token.type === "fence" && token.info)) later(highlighter().then((found) => { colours = found; }));
  const made = clean.sanitize(parser.renderer.render(tokens, parser.options, {}), SAFE);
  const places = made.querySelectorAll(".formula-source");
  if (!setter && places.length) later(katex().then((found) => { setter = found; }));
  if (setter) places.forEach(typeset);
  for (const link of made.querySelectorAll("a[href]")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer", title: link.href });
  for (const table of made.querySelectorAll("table")) {
    const box = element("div", { className: "scroll", tabIndex: 0 });
    table.replaceWith(box);
    box.append(table);
  }
  return made;
}

function typeset(place) {
  const displayMode = place.classList.contains("display"), key = `${displayMode}${place.textContent}`;
  if (!formulas.has(key) && formulas.size < MOST_FORMULAS) {
    const box = element("span", { className: displayMode ? "math display" : "math" });
    formulas.set(key, box);
    try { setter.render(place.textContent, box, { displayMode, ...LIMITS }); } catch { box.replaceChildren(); }
  }
  const found = formulas.get(key);
  // What is no formula stays as it is written.
  if (found?.hasChildNodes()) place.replaceWith(found.cloneNode(true));
}

function parserOf(make) {
  const made = make({ html: false, linkify: true, highlight: (code, name) => (colours?.getLanguage(name)
    ? colours.highlight(code, { language: name, ignoreIllegals: true }).value : "") });
  const { escapeHtml } = made.utils, { rules } = made.renderer;
  // An image would be loaded from elsewhere.
  rules.image = ([...tokens], place) => `<a href="${escapeHtml(tokens[place].attrGet("src"))}">${escapeHtml(tokens[place].content || "image")}</a>`;
  rules.formula = (tokens, place) => `<code class="formula-source ${tokens[place].info}">${escapeHtml(tokens[place].content)}</code>`;
  rules.td_open = rules.th_open = (tokens, place) => {
    const side = /text-align:(\w+)/.exec(tokens[place].attrGet("style") ?? "");
    return `<${tokens[place].tag}${side ? ` align="${side[1]}"` : ""}>`;
  };
  made.inline.ruler.before("escape", "formula", inlineFormula);
  made.block.ruler.before("fence", "formula", formulaOfLines, { alt: ["paragraph", "reference", "blockquote", "list"] });
  return made;
}

const pushFormula = (state, content, isBlock) => Object.assign(state.push("formula", "code", 0), { content, info: isBlock ? "display" : "" });

function inlineFormula(state, silent) {
  const kind = FORMULAS.find(([begin]) => state.src.startsWith(begin, state.pos));
  if (!kind) return false;
  const [begin, end, isBlock] = kind, from = state.pos + begin.length, length = state.src.slice(from, from + LONGEST_FORMULA).indexOf(end);
  const content = state.src.slice(from, from + length), after = state.src[from + length + end.length] ?? "";
  // "$5 and $6" are amounts of money.
  if (length < 1 || from + length > state.posMax || (begin === "$" && (/^\s|\s$/.test(content) || /\d/.test(after)))) return false;
  if (!silent) pushFormula(state, content, isBlock);
  state.pos = from + length + end.length;
  return true;
}

function formulaOfLines(state, first, end, silent) {
  const { src, eMarks } = state, from = state.bMarks[first] + state.tShift[first] + 2, kind = FORMULAS.find(([begin, , isBlock]) => isBlock && src.startsWith(begin, from - 2));
  const length = kind && state.sCount[first] - state.blkIndent < 4 ? src.slice(from, from + LONGEST_FORMULA).indexOf(kind[1]) : -1;
  let last = first;
  while (last < end && eMarks[last] < from + length) last++;
  if (length < 0 || last >= end || src.slice(from + length + 2, eMarks[last]).trim()) return false;
  if (silent) return true;
  state.line = last + 1;
  pushFormula(state, state.getLines(first, last + 1, state.blkIndent, false).trim().slice(2, -2), true).map = [first, state.line];
  return true;
}
