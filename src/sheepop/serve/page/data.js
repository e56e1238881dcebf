// The data room: the documents behind a step of a run, and what became of the files of its corpus.
import { ofRun } from "./api.js";
import { bars, button, choice, compact, element, folded, heading, submitted, table, visible } from "./draw.js";

export async function open(page) {
  if (!page.runs.length) {
    page.view.append(...heading("No run here", "This room shows the data of runs. Start the page with one: sheepop ui runs/quickstart"));
    return;
  }
  const both = page.guarded(() => Promise.all([showStep(), showCorpus()])), run = choice("Run", page.runs, page.chosen.run, both);
  const step = element("input", { type: "number", min: 1, value: page.chosen.step ?? 1 }), behind = element("section"), corpus = element("section");
  page.controls.append(element("form", { onsubmit: submitted(() => showStep()) }, run, element("label", {}, "Step", step), element("button", {}, "Show its documents")));
  page.view.append(behind, corpus);

  const showStep = page.guarded(async () => {
    page.remember({ run: run.select.value, step: step.value });
    page.say("Looking up the documents …");
    behind.replaceChildren();
    const rows = Map.groupBy(await ofRun(run.select.value, `steps/${Number(step.value)}`), (origin) => origin.row);
    behind.replaceChildren(...heading(`The documents behind step ${step.value}`, "A step reads some rows of tokens. These are the pieces of documents "
      + "that they were cut from, in the order in which they were read."),
    ...[...rows].map(([row, parts]) => Object.assign(folded(`Row ${row}: ${counted(parts.length, "document")}`, ...parts.map(source)), { open: row === 0 })));
    page.say(`${counted(rows.size, "row")} of step ${step.value}.`);
  });

  async function showCorpus() {
    corpus.replaceChildren();
    const name = run.select.value, found = await ofRun(name, "corpus"), lost = listOfLost(name, page);
    corpus.replaceChildren(...report(found, lost));
    await lost.show();
  }

  await both();
}

function source(origin) {
  const place = [origin.file, origin.place, origin.pages.length ? `page ${origin.pages.join(", ")}` : ""].filter(Boolean).join(" · ");
  const facts = [`document ${origin.document}`, `tokens ${origin.start} to ${origin.stop}`, origin.kind, origin.language].filter(Boolean);
  return element("article", {}, element("h3", {}, visible(place)), element("p", { className: "shape" }, facts.join(" · ")), element("pre", {}, origin.text));
}

const count = (value) => value.toLocaleString("en"), size = (bytes) => `${compact(bytes)}B`, plain = (name) => name.replaceAll("_", " ");
const counted = (number, name) => `${count(number)} ${name}${number === 1 ? "" : "s"}`;
const largest = (counts) => Object.entries(counts).sort(([, a], [, b]) => b - a);

// What the report of the build says, in the order in which files become a corpus.
function report(found, lost) {
  const { files, documents, contents } = found, out = (kind, counts) => largest(counts).map(([why, number]) => [kind, plain(why), count(number)]);
  const why = [...out("file", files.skipped), ...out("folder", files.folders_skipped), ...out("place in a file", files.refused_parts)];
  const removed = found.stages.flatMap((stage) => Object.entries(stage.removed).map(([reason, number]) =>
    [plain(stage.stage), plain(reason), count(number), size(stage.removed_bytes[reason])]));
  const bits = Object.keys(contents.lengths).map(Number), least = Math.min(...bits), hasLost = why.length || removed.length;
  const lengths = Array.from({ length: bits.length && Math.max(...bits) - least + 1 }, (_, at) => [`up to ${size(2 ** (least + at))}`, contents.lengths[least + at] ?? 0]);
  const drawn = (rows, text) => bars(rows.map(([word, value]) => ({ word, values: [value], text: text(value) })));
  const excerpts = (samples) => samples.map((each) => {
    const place = [each.file, each.place, each.reason ? `${plain(each.stage)}: ${plain(each.reason)}` : each.kind];
    return element("article", {}, element("h3", {}, place.filter(Boolean).join(" · ")), element("pre", {}, each.excerpt));
  });
  const splits = Object.entries(found.tokens).map(([split, each]) => [split, ...Object.values(each).map(count)]);
  const formats = Object.entries(found.formats).map(([suffix, each]) => [suffix || "none", count(each.files), size(each.bytes), size(each.text_bytes)]);
  const kinds = largest(found.kinds_in).map(([kind, number]) => [kind, count(number), count(contents.kinds[kind] ?? 0)]);
  const stages = found.stages.map((stage) => [plain(stage.stage), ...["documents_in", "changed_documents", "documents_out", "bytes_out"].map((key) => count(stage[key]))]);
  const pair = (...parts) => element("div", { className: "beside" }, ...parts.map((part) => element("div", {}, ...part)));
  return [...heading("The corpus", `Of ${counted(files.found, "file")} that were found, ${count(files.read)} could be read, ${size(found.input_bytes)} in all. `
    + `Of ${counted(documents.in, "document")} in them, ${count(documents.kept)} went into the corpus: ${size(documents.bytes)} of text, `
    + `in a vocabulary of ${count(found.vocabulary)}.`),
  table(["Split", "Documents", "Bytes", "Tokens", "Unknown tokens"], splits),
  ...(found.mix.length ? [table(Object.keys(found.mix[0]).map(plain), found.mix.map((source) => Object.values(source).map(String)))] : []),
  ...heading("Left out and removed", hasLost ? "Why inputs could not be used, and why documents were removed, such as duplicates."
    : "Every file was read in full, and no document was removed."),
  ...(why.length ? [table(["What", "Why it was left out", "Number"], why)] : []),
  ...(removed.length ? [table(["Stage", "Why it was removed", "Documents", "Size"], removed)] : []), ...(hasLost ? [lost.made] : []),
  pair([...heading("Sizes", "Documents by length, each bar twice as long texts as the one above."), drawn(lengths, count)],
    [...heading("Languages", "The text of the corpus by language."), drawn(largest(contents.language_bytes).slice(0, 25), size)]),
  pair([...heading("Formats", "Where the text came from."), table(["Suffix", "Files", "Size", "Text"], formats)],
    [...heading("Kinds", "Documents by kind."), table(["Kind", "Found", "In the corpus"], kinds)]),
  folded("The stages of cleaning", table(["Stage", "Documents in", "Changed", "Documents out", "Bytes out"], stages)),
  folded("Some kept documents", ...excerpts(found.kept_samples)), folded("Some removed documents", ...excerpts(found.removed_samples))];
}

// All that was lost, a page at a time; `made` is its element, and `show` reads the first page.
function listOfLost(run, page) {
  const placeholder = "Search files and reasons", ariaLabel = "Search in what was left out and removed", PAGE = 12;
  const search = element("input", { type: "search", ariaLabel, placeholder, oninput: () => go(0) });
  const rows = element("div"), read = element("span", { className: "shape", ariaLive: "polite" });
  const earlier = button("Earlier", () => go(start - PAGE)), later = button("Later", () => go(start + PAGE));
  let start = 0, turn = 0;
  const show = async () => {
    const now = ++turn, found = await ofRun(run, "lost", { start, search: search.value });
    if (now !== turn) return;
    rows.replaceChildren(table(["File", "Place", "What", "Why"], found.rows.map((row) => [row.file, row.place, plain(row.what), plain(row.detail)]), "long"));
    read.textContent = found.rows.length ? `${count(start + 1)} to ${count(start + found.rows.length)}` : "nothing";
    [earlier.disabled, later.disabled] = [!start, found.is_last];
  };
  const go = page.guarded((to) => { start = Math.max(0, to); return show(); });
  return { made: element("div", {}, element("div", { className: "pages" }, search, earlier, later, read), rows), show };
}
