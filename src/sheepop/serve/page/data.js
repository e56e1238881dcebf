// The data room: the documents behind a step of a run, and the report of its corpus.

import { get } from "./api.js";
import { choice, element, heading, visible } from "./draw.js";

export async function open(page) {
  if (!page.runs.length) {
    page.view.append(...heading("No run here", "This room shows the data of runs. Start the page with one: sheepop ui runs/quickstart"));
    return;
  }
  const run = choice("Run", page.runs, page.chosen.run);
  const step = element("input", { type: "number", min: 1, value: page.chosen.step ?? 1 });
  const form = element("form", {}, run, element("label", {}, "Step", step), element("button", {}, "Show its documents"));
  const behind = element("section", {}), corpus = element("section", {});
  page.controls.append(form);
  page.view.append(behind, corpus);

  async function showStep() {
    page.remember({ run: run.select.value, step: step.value });
    page.say("Looking up the documents …");
    try {
      const origins = await get(`runs/${encodeURIComponent(run.select.value)}/steps/${Number(step.value)}`);
      const rows = grouped(origins);
      behind.replaceChildren(...heading(`The documents behind step ${step.value}`, "A step reads some rows of tokens. These are "
        + "the pieces of documents that they were cut from, in the order in which they were read."),
      ...[...rows].map(([row, parts]) => element("details", { open: row === 0 }, element("summary", {}, `Row ${row}: `
        + `${parts.length === 1 ? "1 document" : `${parts.length} documents`}`), ...parts.map(source))));
      page.say(`${rows.size === 1 ? "1 row" : `${rows.size} rows`} of step ${step.value}.`);
    } catch (error) {
      behind.replaceChildren();
      page.say(error.message, true);
    }
  }

  async function showCorpus() {
    const name = encodeURIComponent(run.select.value), { pages } = await get(`runs/${name}`);
    corpus.replaceChildren(...heading("The corpus", pages.includes("corpus")
      ? "The files that were read, the documents that were left out and why, and the result." : "This run's corpus has no report here."));
    if (!pages.includes("corpus")) return;
    const address = `/ui/runs/${name}/pages/corpus`;
    corpus.append(element("p", {}, element("a", { href: address, target: "_blank", rel: "noopener" }, "Open the report on its own page")),
      element("iframe", { src: address, title: "The report of the corpus", sandbox: "allow-scripts", loading: "lazy" }));
  }

  form.addEventListener("submit", (event) => { event.preventDefault(); showStep(); });
  run.select.addEventListener("change", () => Promise.all([showStep(), showCorpus()]).catch((error) => page.say(error.message, true)));
  await Promise.all([showStep(), showCorpus()]);
}

function grouped(origins) {
  const rows = new Map();
  for (const origin of origins) rows.set(origin.row, [...(rows.get(origin.row) ?? []), origin]);
  return rows;
}

function source(origin) {
  const place = [origin.file, origin.place, origin.pages.length ? `page ${origin.pages.join(", ")}` : ""].filter(Boolean).join(" · ");
  const facts = [`document ${origin.document}`, `tokens ${origin.start} to ${origin.stop}`, origin.kind, origin.language].filter(Boolean);
  return element("article", {}, element("h3", {}, visible(place)), element("p", { className: "shape" }, facts.join(" · ")),
    element("pre", {}, origin.text));
}
