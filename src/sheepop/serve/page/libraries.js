// Libraries of other projects, which lie in vendor/ and are loaded when they are first needed.
import { element } from "./draw.js";

const once = (load) => { let loaded = null; return () => (loaded ??= load()); };

// A style sheet in vendor/, without which what follows would flicker.
const sheet = (path) => new Promise((resolve, reject) => {
  document.head.append(element("link", { rel: "stylesheet", href: `/ui/vendor/${path}`, onload: resolve, onerror: () => reject(new Error(`${path} is missing.`)) }));
});

export const uPlot = once(() => Promise.all([import("./vendor/uplot/uplot.js"), sheet("uplot/uplot.css")]).then(([found]) => found.default));
export const markdownIt = once(() => import("./vendor/markdown-it/markdown-it.js").then((found) => found.default));
// KaTeX and DOMPurify are no modules; they leave a global name.
export const katex = once(() => Promise.all([import("./vendor/katex/katex.js"), sheet("katex/katex.css")]).then(() => globalThis.katex));
export const purifier = once(() => import("./vendor/dompurify/dompurify.js").then(() => globalThis.DOMPurify));

const LANGUAGES = ["bash", "c", "cpp", "css", "diff", "go", "java", "javascript", "json", "markdown", "python", "rust", "sql", "typescript", "xml", "yaml"];

export const highlighter = once(async () => {
  const [core, ...grammars] = await Promise.all(["core", ...LANGUAGES].map((name) => import(`./vendor/highlight/${name}.js`)));
  LANGUAGES.forEach((name, place) => core.default.registerLanguage(name, grammars[place].default));
  return core.default;
});
