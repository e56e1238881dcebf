for (const holder of document.querySelectorAll(".journey")) {
  const data = JSON.parse(holder.nextElementSibling.textContent);
  let layer = 0;
  const draw = () => holder.replaceChildren(journey(data, { layer }, holder.clientWidth, {
    open: (_, at) => {
      layer = at ?? layer;
      draw();
    },
  }));
  let width = 0;
  new ResizeObserver(() => {
    if (holder.clientWidth === width) return;
    width = holder.clientWidth;
    draw();
  }).observe(holder);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
