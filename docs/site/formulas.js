document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".arithmatex"))
    renderMathInElement(place, {
      delimiters: [{left: "\\(", right: "\\)", display: false}, {left: "\\[", right: "\\]", display: true}],
      throwOnError: true,
    });
});
