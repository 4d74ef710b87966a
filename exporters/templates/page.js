// Draws each plot in a box of 1000 by 100, which the page stretches to its width: a value holds from the start of its
// bucket to the end. The legend shows the values under the pointer, or those that arrow keys,
// Home and End choose.
const roundUp = (value) => {
  const power = 10 ** (Math.ceil(Math.log10(value)) - 1);
  return value > 0 ? [1, 2, 4, 5, 8, 10].map((step) => step * power).find((each) => each >= value) : 1;
};
for (const plot of document.querySelectorAll(".plot")) {
  const data = JSON.parse(plot.dataset.plot), mark = plot.querySelector("u");
  const legend = plot.parentElement.querySelectorAll("ul.legend li");
  const names = Object.keys(data.of), series = Object.values(data.of), count = data.at.length;
  const sums = data.at.map((_, n) => series.reduce((sum, values) => sum + values[n], 0));
  const top = data.share ? 1 : roundUp(Math.max(0, ...(data.stacked ? sums : series.flat())));
  const stairs = (values, from = 0) => values.flatMap((value, n) => [n, n + 1].map(
    (edge) => `${(1000 * (from + edge) / count).toFixed(1)},${(100 - 100 * value / top).toFixed(2)}`));
  let base = data.at.map(() => 0), shapes = "";
  series.forEach((values, color) => {
    if (data.stacked) {
      const above = base.map((low, n) => low + values[n]);
      shapes += `<polygon class="k${color}" points="${[...stairs(above), ...stairs(base).reverse()].join(" ")}"/>`;
      base = above;
    } else {
      for (let from = 0, to; from < count; from = to + 1) {
        for (to = from; to < count && values[to] !== null; to++);
        const points = stairs(values.slice(from, to), from).join(" ");
        if (points) shapes += `<polyline class="k${color}" points="${points}"/>`;
      }
    }
  });
  plot.querySelector("svg").innerHTML = shapes;
  const scale = (value) => data.share ? 100 * value + " %"
    : value.toLocaleString("en", {maximumFractionDigits: top >= 2 ? 0 : 3});
  plot.querySelector(".top").textContent = scale(top);
  plot.querySelector(".half").textContent = scale(top / 2);
  const text = (value) => value === null ? "" : data.share ? (100 * value).toFixed(1) + " %" : value.toLocaleString("en");
  let place = -1;
  const show = (asked) => {
    place = Math.min(count - 1, Math.max(0, asked));
    mark.hidden = false;
    mark.style.left = 100 * (place + 0.5) / count + "%";
    names.forEach((name, n) => { legend[n].querySelector("strong").textContent = text(data.of[name][place]); });
    legend[names.length].textContent = data.at[place];
    plot.ariaValueNow = place + 1;
    plot.ariaValueText = [data.at[place], ...names.map((name) => `${name} ${text(data.of[name][place])}`)].join(", ");
  };
  const point = (event) => {
    const box = plot.getBoundingClientRect();
    show(Math.floor((event.clientX - box.left) / box.width * count));
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("keydown", (event) => {
    const asked = {ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: count - 1}[event.key];
    if (asked === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    show(asked);
  });
}
