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

export const purifier = once(async () => {
  await import("./vendor/dompurify/dompurify.js");
  return globalThis.DOMPurify;
});

export const markdownIt = once(async () => (await import("./vendor/markdown-it/markdown-it.js")).default);

const LANGUAGES = ["bash", "c", "cpp", "css", "diff", "go", "java", "javascript", "json", "markdown", "python", "rust", "sql", "typescript", "xml", "yaml"];

export const highlighter = once(async () => {
  const [core, ...grammars] = await Promise.all(["core", ...LANGUAGES].map((name) => import(`./vendor/highlight/${name}.js`)));
  LANGUAGES.forEach((name, place) => core.default.registerLanguage(name, grammars[place].default));
  return core.default;
});
