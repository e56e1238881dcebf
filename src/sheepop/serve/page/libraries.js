// Libraries of other projects, which lie in vendor/ and are loaded when they are first needed.

import { element } from "./draw.js";

const once = (load) => { let loaded = null; return () => (loaded ??= load()); };

// A style sheet in vendor/, without which what follows would flicker.
const sheet = (path) => new Promise((resolve, reject) => {
  document.head.append(element("link", { rel: "stylesheet", href: `/ui/vendor/${path}`, onload: resolve, onerror: () => reject(new Error(`${path} is missing.`)) }));
});

export const uPlot = once(async () => {
  const [found] = await Promise.all([import("./vendor/uplot/uplot.js"), sheet("uplot/uplot.css")]);
  return found.default;
});

// KaTeX and DOMPurify are no modules; they leave a global name.
export const katex = once(async () => {
  await Promise.all([import("./vendor/katex/katex.js"), sheet("katex/katex.css")]);
  return globalThis.katex;
});
