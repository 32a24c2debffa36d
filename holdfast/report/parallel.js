"use strict";
// Parallel coordinates: an axis for each setting that differs and each result, a line for each run.
(() => {
  const { data, drawing, make, number } = holdfast;
  const place = document.getElementById("parallel-plot");
  if (!place) return;
  const WIDTH = 1160, TOP = 46, BOTTOM = 300, HEIGHT = 330, SIDE = 90;
  const across = (WIDTH - 2 * SIDE) / (data.axes.length - 1);

  // Where each value lies on its axis, from 0 at the bottom to 1, and the texts beside it.
  function place_values({ values }) {
    const known = values.filter(each => each !== null && each !== "");
    if (known.every(each => typeof each === "number")) {
      const low = Math.min(...known), high = Math.max(...known);
      const isLog = low > 0 && high / low >= 20, scale = value => (isLog ? Math.log(value) : value);
      const span = scale(high) - scale(low) || 1;
      const at = value => (low === high ? 0.5 : (scale(value) - scale(low)) / span);
      return { at: values.map(each => (each === null || each === "" ? null : at(each))), texts: [...new Set([low, high])].map(each => [at(each), number(each, 4)]) };
    }
    const kinds = [...new Set(known.map(String))].sort(), at = value => (kinds.length < 2 ? 0.5 : kinds.indexOf(String(value)) / (kinds.length - 1));
    return { at: values.map(each => (each === null || each === "" ? null : at(each))), texts: kinds.slice(0, 12).map(each => [at(each), each.slice(0, 16)]) };
  }

  const y = share => BOTTOM - share * (BOTTOM - TOP);
  const placed = data.axes.map(place_values), svg = drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "parallel", role: "img", "aria-label": "Settings and results of each run as parallel coordinates; the table has the same values" });
  data.runs.forEach((run, i) => {
    const points = placed.map((axis, k) => (axis.at[i] === null ? null : `${SIDE + k * across},${y(axis.at[i])}`)).filter(Boolean);
    svg.append(drawing("polyline", { points: points.join(" "), class: "way", tabindex: 0, role: "img", "aria-label": run.name }, drawing("title", {}, run.name)));
  });
  data.axes.forEach((axis, k) => {
    const x = SIDE + k * across;
    svg.append(drawing("line", { x1: x, x2: x, y1: TOP, y2: BOTTOM, class: "axis" }));
    const name = axis.name.replace(/^settings\./, "");
    svg.append(drawing("text", { x, y: k % 2 ? 14 : 30, "text-anchor": "middle", class: "head" }, name.length > 22 ? `${name.slice(0, 21)}…` : name));
    for (const [at, text] of placed[k].texts) svg.append(drawing("text", { x: x + 6, y: y(at) + 4 }, text));
  });
  place.append(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Parallel coordinates" }, svg));
  place.append(make("p", { class: "note" }, "Each line is a run; point at one to see its name."));
})();
