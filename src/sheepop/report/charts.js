"use strict";
const coarsePointer = matchMedia("(pointer: coarse)").matches;
for (const holder of document.querySelectorAll(".plot")) {
  const figure = JSON.parse(holder.nextElementSibling.textContent);
  // On a touch screen, a drag scrolls the page.
  if (coarsePointer) figure.layout.dragmode = false;
  Plotly.newPlot(holder, figure.data, figure.layout, {
    responsive: true,
    displayModeBar: coarsePointer ? false : "hover",
    displaylogo: false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  });
}
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  // A view box lets a chart drawn for the screen shrink to the width of the paper.
  for (const svg of document.querySelectorAll(".plot .main-svg")) {
    svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
  }
});
addEventListener("afterprint", () => {
  for (const svg of document.querySelectorAll(".plot .main-svg")) svg.removeAttribute("viewBox");
});
