"use strict";
const mostShown = 500;
for (const figure of document.querySelectorAll(".searched")) {
  const rows = JSON.parse(figure.querySelector("script").textContent);
  const input = figure.querySelector("input");
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => {
      const text = row.join("\n").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    figure.querySelector("tbody").replaceChildren(...found.slice(0, mostShown).map((row) => {
      const line = document.createElement("tr");
      line.append(...row.map((cell) => Object.assign(document.createElement("td"), { textContent: cell })));
      return line;
    }));
    const count = words.length ? `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")}`
      : rows.length.toLocaleString("en");
    figure.querySelector("output").textContent = found.length > mostShown ? `${count}, the first ${mostShown} shown` : count;
  };
  input.addEventListener("input", show);
  show();
}
