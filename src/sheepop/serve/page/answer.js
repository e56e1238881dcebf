// An answer while it grows: as Markdown or as plain text, each token with its probability and its alternatives.
import { button, element, share, visible } from "./draw.js";
import { blocks, drawn } from "./markdown.js";

// A longer text is shown plain and without tokens, since a browser could not keep up.
const LONGEST = 100_000;
const PLAIN = /[^]{0,4000}\n|[^]{1,4000}/gu;

// Draws into `body`; `branch(text)` continues the answer differently, `isPlain()` tells how it is shown. Its methods: `add` appends a piece
// and its tokens [text, log-probability, alternatives], `end` draws what is left, `redraw` draws everything anew; `text` is the text so far.
export function answer(body, { begun = "", branch, isPlain, name }) {
  const content = element("div", { className: "content" }), tip = element("div", { className: "tip", role: "status", hidden: true });
  body.replaceChildren(content, tip);
  const tokens = [], waiting = [];
  let text = begun, placed = begun.length, partial = null, shown = [], cost = 0, isDue = false, current = -1;

  // Finds the places of tokens in the text. Some tokens are only a part of a character, which the last one of them completes.
  function place() {
    const put = (token, to) => { if (to > placed) tokens.push({ from: placed, to, token }); placed = to; };
    while (waiting.length) {
      const [word] = waiting[0], found = word ? text.indexOf(word, placed) : -1;
      if (found < 0 && !/\ufffd|^bytes:/.test(word) && text.length < placed + word.length + 8) return;
      const token = waiting.shift();
      if (found < 0) partial = token;
      else {
        put(partial ?? token, found);
        put(token, found + word.length);
      }
    }
  }

  function draw() {
    const started = performance.now(), plain = isPlain() || text.length > LONGEST;
    isDue = false;
    content.classList.toggle("plain", plain);
    const parts = plain ? Array.from(text.matchAll(PLAIN), ({ index, 0: { length } }) => ({ from: index, to: index + length })) : blocks(text);
    parts.forEach((part, number) => {
      const key = `${plain}${part.from} ${text.slice(part.from, part.to)}`;
      if (shown[number]?.key === key) return;
      const later = (loading) => loading.then(() => { if (shown[number]?.key === key) shown[number].key = null; schedule(); }, () => { /* shown as it is */ });
      const node = plain ? element("span", {}, text.slice(part.from, part.to)) : element("div", {}, drawn(part, later));
      if (text.length <= LONGEST) mark(node, part.from, part.to);
      if (shown[number]) shown[number].node.replaceWith(node); else content.append(node);
      shown[number] = { key, node };
    });
    for (const each of shown.splice(parts.length)) each.node.remove();
    if (tokens.length) Object.assign(body, { tabIndex: 0, ariaLabel: `${name}. Arrow keys go from token to token.` }).setAttribute("role", "group");
    cost = performance.now() - started;
  }

  // At most once a frame, and less often if drawing takes long.
  function schedule() {
    if (isDue) return;
    isDue = true;
    setTimeout(() => requestAnimationFrame(() => { if (isDue) draw(); }), 3 * cost);
  }

  // Encloses the tokens in `root`, which shows the text between `from` and `to`, perhaps without its markup.
  function mark(root, from, to) {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), nodes = [];
    while (walker.nextNode()) if (!walker.currentNode.parentElement.closest(".math")) nodes.push(walker.currentNode);
    let at = from, next = tokens.findIndex((each) => each.to > from);
    if (next < 0) return;
    for (const node of nodes) {
      // Code loses its indentation in a list, and text its backslashes: each line is looked up, or else each of its words.
      const parts = node.data.split(/(\n)/).flatMap((line) => (text.slice(at, to).includes(line) ? [line] : line.split(/(\s+)/)));
      node.replaceWith(...parts.filter(Boolean).flatMap((part) => {
        const found = text.indexOf(part, at), end = found + part.length;
        if (part === "\n" || found < 0 || end > to) return [part];
        at = end;
        while (next < tokens.length && tokens[next].to <= found) next++;
        const made = [];
        let done = found;
        for (let each = next; each < tokens.length && tokens[each].from < end; each++) {
          const until = Math.min(tokens[each].to, end), span = element("span", { className: "tok" }, text.slice(Math.max(tokens[each].from, found), until));
          span.dataset.place = each;
          span.style.setProperty("--sure", Math.exp(tokens[each].token[1]).toFixed(3));
          if (tokens[each].from > done) made.push(text.slice(done, tokens[each].from));
          made.push(span);
          done = until;
        }
        return done < end ? [...made, text.slice(done, end)] : made;
      }));
    }
  }

  function hide() {
    tip.hidden = true;
    body.querySelectorAll(".tok.current").forEach((each) => each.classList.remove("current"));
  }

  function show(number, span) {
    if (!tip.hidden && current === number) return;
    hide();
    current = number;
    const { from, token: [word, logprob, others] } = tokens[number];
    tip.replaceChildren(element("small", {}, `${visible(word)}  ${share(Math.exp(logprob))}`), ...others.map(([other, value]) => {
      const settings = { className: other === word ? "same" : "", disabled: !branch, title: "Continue the answer from here with this token" };
      return button(`${visible(other)}  ${share(Math.exp(value))}`, () => { hide(); branch(text.slice(0, from) + other); }, settings);
    }));
    content.querySelectorAll(`.tok[data-place="${number}"]`).forEach((each) => each.classList.add("current"));
    tip.hidden = false;
    const box = body.getBoundingClientRect(), at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    tip.style.setProperty("--x", `${Math.max(0, Math.min(at.left - box.left, box.width - tip.offsetWidth))}px`);
    tip.style.setProperty("--y", `${at.bottom - box.top}px`);
  }

  body.addEventListener("pointerover", ({ target }) => {
    const span = target.closest(".tok");
    if (span) show(Number(span.dataset.place), span); else if (!tip.contains(target)) hide();
  });
  body.addEventListener("pointerleave", hide);
  body.addEventListener("focusout", ({ relatedTarget }) => { if (!body.contains(relatedTarget)) hide(); });
  body.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (event.key === "ArrowDown" && !tip.hidden) (document.activeElement.closest(".tip") ? document.activeElement.nextElementSibling : tip.querySelector("button"))?.focus();
    else if (!step || !tokens.length) return;
    event.preventDefault();
    // Tokens of markup and formulas are not shown.
    for (let number = step ? current + step : -1; number >= 0 && number < tokens.length; number += step) {
      const span = content.querySelector(`.tok[data-place="${number}"]`);
      if (span) return show(number, span);
    }
  });

  return {
    get text() { return text; },
    add(piece, more = []) {
      text += piece;
      waiting.push(...more);
      place();
      schedule();
    },
    end() {
      if (partial && placed < text.length) tokens.push({ from: placed, to: text.length, token: partial });
      if (shown.length) shown.at(-1).key = null;
      draw();
    },
    redraw() {
      [shown, isDue] = [[], false];
      content.replaceChildren();
      draw();
    },
  };
}
