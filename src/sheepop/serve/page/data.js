// The data room: the documents behind a step of a run, and what became of the files of its corpus.

import { get } from "./api.js";
import { bars, choice, compact, element, heading, table, visible } from "./draw.js";

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
    const name = encodeURIComponent(run.select.value);
    corpus.replaceChildren();
    const found = await get(`runs/${name}/corpus`), lost = listOfLost(name, page);
    corpus.replaceChildren(...report(found, lost));
    await lost.show();
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

const count = (value) => value.toLocaleString("en"), size = (bytes) => `${compact(bytes)}B`, plain = (name) => name.replaceAll("_", " ");
const largest = (counts) => Object.entries(counts).sort(([, a], [, b]) => b - a);
const folded = (title, ...parts) => element("details", {}, element("summary", {}, title), ...parts);

// What the report of the build says, in the order in which files become a corpus.
function report(found, lost) {
  const { files, documents, contents } = found, out = (kind, counts) => largest(counts).map(([why, number]) => [kind, plain(why), count(number)]);
  const why = [...out("file", files.skipped), ...out("folder", files.folders_skipped), ...out("place in a file", files.refused_parts)];
  const removed = found.stages.flatMap((stage) => Object.entries(stage.removed).map(([reason, number]) => [plain(stage.stage), plain(reason), count(number), size(stage.removed_bytes[reason])]));
  const bits = Object.keys(contents.lengths).map(Number), span = bits.length ? Array.from({ length: Math.max(...bits) - Math.min(...bits) + 1 }, (_, at) => Math.min(...bits) + at) : [];
  const drawn = (rows, text) => bars(rows.map(([word, value]) => ({ word: String(word), values: [value], text: text(value) })));
  const excerpts = (samples) => samples.map((each) => element("article", {}, element("h3", {}, [each.file, each.place, each.reason ? `${plain(each.stage)}: ${plain(each.reason)}` : each.kind].filter(Boolean).join(" · ")), element("pre", {}, each.excerpt)));
  return [...heading("The corpus", `${count(files.found)} files were found and ${count(files.read)} read, ${size(found.input_bytes)} in all. They had ${count(documents.in)} documents, of which ${count(documents.kept)} are in the corpus: ${size(documents.bytes)} of text, in a vocabulary of ${count(found.vocabulary)}.`),
    table(["Split", "Documents", "Bytes", "Tokens", "Unknown tokens"], Object.entries(found.tokens).map(([split, each]) => [split, ...Object.values(each).map(count)])),
    ...(found.mix.length ? [table(Object.keys(found.mix[0]).map(plain), found.mix.map((source) => Object.values(source).map(String)))] : []),
    ...heading("Left out and removed", why.length || removed.length ? "Why inputs could not be used, and why documents were removed, such as duplicates." : "Every file was read in full, and no document was removed."),
    ...(why.length ? [table(["What", "Why it was left out", "Number"], why)] : []), ...(removed.length ? [table(["Stage", "Why it was removed", "Documents", "Size"], removed)] : []), ...(why.length || removed.length ? [lost.made] : []),
    element("div", { className: "beside" }, element("div", {}, ...heading("Sizes", "Documents by length, each bar twice as long texts as the one above."), drawn(span.map((bit) => [`up to ${size(2 ** bit)}`, contents.lengths[bit] ?? 0]), count)),
      element("div", {}, ...heading("Languages", "The text of the corpus by language."), drawn(largest(contents.language_bytes).slice(0, 25), size))),
    element("div", { className: "beside" }, element("div", {}, ...heading("Formats", "Where the text came from."), table(["Suffix", "Files", "Size", "Text"], Object.entries(found.formats).map(([suffix, each]) => [suffix || "none", count(each.files), size(each.bytes), size(each.text_bytes)]))),
      element("div", {}, ...heading("Kinds", "Documents by kind."), table(["Kind", "Found", "In the corpus"], largest(found.kinds_in).map(([kind, number]) => [kind, count(number), count(contents.kinds[kind] ?? 0)])))),
    folded("The stages of cleaning", table(["Stage", "Documents in", "Changed", "Documents out", "Bytes out"], found.stages.map((stage) => [plain(stage.stage), ...["documents_in", "changed_documents", "documents_out", "bytes_out"].map((key) => count(stage[key]))]))),
    folded("Some kept documents", ...excerpts(found.kept_samples)), folded("Some removed documents", ...excerpts(found.removed_samples))];
}

// All that was lost, a page at a time; `made` is its element, and `show` reads the first page.
function listOfLost(name, page) {
  const search = element("input", { type: "search", ariaLabel: "Search in what was left out and removed", placeholder: "Search files and reasons" }), rows = element("div", {}), told = element("span", { className: "shape", ariaLive: "polite" });
  const [earlier, later] = ["Earlier", "Later"].map((label) => element("button", { type: "button" }, label)), PAGE = 12;
  let start = 0, turn = 0;
  const show = async () => {
    const now = ++turn, found = await get(`runs/${name}/lost`, { start, search: search.value });
    if (now !== turn) return;
    rows.replaceChildren(table(["File", "Place", "What", "Why"], found.rows.map((row) => [row.file, row.place, plain(row.what), plain(row.detail)]), "long"));
    told.textContent = found.rows.length ? `${count(start + 1)} to ${count(start + found.rows.length)}` : "nothing";
    [earlier.disabled, later.disabled] = [!start, found.is_last];
  };
  const go = (to) => { start = Math.max(0, to); show().catch((error) => page.say(error.message, true)); };
  earlier.addEventListener("click", () => go(start - PAGE));
  later.addEventListener("click", () => go(start + PAGE));
  search.addEventListener("input", () => go(0));
  return { made: element("div", {}, element("div", { className: "pages" }, search, earlier, later, told), rows), show };
}
