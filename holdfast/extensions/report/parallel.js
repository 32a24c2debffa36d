"use strict";
// Parallel coordinates: an axis for each setting that differs and each result, a line for each run.
(() => {
  const { data, drawing, make, number } = holdfast;
  const place = document.getElementById("parallel-plot");
  if (!place) return;
  const TOP = 50, BOTTOM = 300, HEIGHT = 316, SIDE = 80, LEAST = 110, WIDE = 180, BEST = "loss";
  const width = Math.max(place.clientWidth, 2 * SIDE + LEAST * (data.axes.length - 1)), across = (width - 2 * SIDE) / (data.axes.length - 1);
  const help = "Each line is a run: point at one, or go to one with Tab, to read it.";

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
  const shorten = name => (name.length > 22 ? `${name.slice(0, 21)}…` : name);
  const nameOf = axis => axis.name.replace(/^settings\./, "");
  const placed = data.axes.map(place_values), best = findBest(), said = make("p", { class: "note" }, help);
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, class: "parallel", role: "img", "aria-label": "Settings and results of each run as parallel coordinates; the table has the same values" });

  // The run with the least loss; -1 if no run has one.
  function findBest() {
    const losses = data.axes.find(axis => axis.name === BEST)?.values ?? [], known = losses.filter(each => typeof each === "number");
    return known.length ? losses.indexOf(Math.min(...known)) : -1;
  }

  function describe(i) {
    const values = data.axes.map(axis => `${nameOf(axis)} ${typeof axis.values[i] === "number" ? number(axis.values[i], 4) : axis.values[i] ?? "none"}`);
    return `${data.runs[i].name}: ${values.join(", ")}`;
  }

  function drawRun(run, i) {
    const points = placed.map((axis, k) => (axis.at[i] === null ? null : `${SIDE + k * across},${y(axis.at[i])}`)).filter(Boolean);
    const way = drawing("polyline", { points: points.join(" "), class: i === best ? "way best" : "way", tabindex: 0, role: "img", "aria-label": describe(i) }, drawing("title", {}, run.name));
    for (const event of ["pointerenter", "focus"]) way.addEventListener(event, () => { said.textContent = describe(i); });
    for (const event of ["pointerleave", "blur"]) way.addEventListener(event, () => { said.textContent = help; });
    svg.append(way);
  }

  data.runs.forEach((run, i) => { if (i !== best) drawRun(run, i); });
  if (best >= 0) drawRun(data.runs[best], best); // over the others
  data.axes.forEach((axis, k) => {
    const x = SIDE + k * across, isLower = across >= WIDE || k % 2 === 0;
    svg.append(drawing("line", { x1: x, x2: x, y1: TOP, y2: BOTTOM, class: "axis" }));
    svg.append(drawing("text", { x, y: isLower ? 34 : 16, "text-anchor": "middle", class: "head" }, shorten(nameOf(axis))));
    for (const [at, text] of placed[k].texts) svg.append(drawing("text", { x: x + 7, y: y(at) + 4 }, text));
  });
  place.append(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Parallel coordinates" }, svg), said);
  if (best >= 0) place.append(make("p", { class: "note" }, `The green line has the least loss: ${data.runs[best].name}.`));
})();
