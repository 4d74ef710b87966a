for (const plot of document.querySelectorAll(".plot")) {
  const data = JSON.parse(plot.dataset.plot), mark = plot.querySelector("u");
  const legend = plot.parentElement.querySelectorAll("ul.legend li");
  const names = Object.keys(data.of);
  const text = (value) => value === null ? "" : data.share ? (100 * value).toFixed(1) + " %" : value.toLocaleString("en");
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const part = Math.min(0.9999, Math.max(0, (event.clientX - box.left) / box.width));
    const place = Math.floor(part * data.at.length);
    mark.hidden = false;
    mark.style.left = 100 * (place + 0.5) / data.at.length + "%";
    names.forEach((name, n) => { legend[n].querySelector("strong").textContent = text(data.of[name][place]); });
    legend[names.length].textContent = data.at[place];
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
}
