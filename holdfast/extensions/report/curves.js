"use strict";
// Curves with values under the cursor, zoom by mouse and keyboard, a log scale, and rolled-back steps. uPlot draws them.
(() => {
  const { data, make, drawing, number, color, isDark, say } = holdfast;
  const grid = document.getElementById("curve-grid");
  if (!grid) return;
  const LIGHT = ["#1f5fbf", "#b3541e", "#1a7f4b", "#8a3fb0", "#a8123e", "#0f7f86", "#6b6f00", "#4b5563"];
  const DARK = ["#7fb0ff", "#f0a36b", "#5cc98f", "#c99bee", "#ff8fa8", "#57c7cd", "#cfd060", "#c3cad6"];
  const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
  const ODD = { nan: "NaN", inf: "infinity", "-inf": "minus infinity" };
  const HEIGHT = 200, FIRST_HEIGHT = 300, MOST_MARKS = 40;
  const state = { log: false, rolled: false, range: null };
  const plots = new Map(), names = Object.keys(data.curves);

  const colorOf = run => (isDark() ? DARK : LIGHT)[run % LIGHT.length];
  const dashOf = run => DASHES[Math.floor(run / LIGHT.length) % DASHES.length];
  const isSingle = data.runs.length === 1;
  const whole = findWhole();

  // All curves have the same steps from left to right, so that what is above each other happened at once.
  function findWhole() {
    let low = Infinity, high = -Infinity;
    for (const drawn of Object.values(data.curves)) for (const { x } of drawn) {
      if (x.length) [low, high] = [Math.min(low, x[0]), Math.max(high, x[x.length - 1])];
    }
    return low < high ? [low, high] : [low - 1, high + 1];
  }

  // ---- one curve

  function join(drawn) {
    const tables = drawn.map(each => [each.x, isLog(drawn) ? each.y.map(y => (y > 0 ? y : null)) : each.y]);
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  const isLog = drawn => state.log && drawn.some(each => each.y.some(y => y > 0));

  function fitRange(u, low, high, drawn) {
    if (state.rolled) {
      const from = u.scales.x.min, to = u.scales.x.max;
      for (const each of drawn) for (const [x, y] of each.rolled || []) y.forEach((value, i) => {
        if (value === null || x[i] < from || x[i] > to || (isLog(drawn) && value <= 0)) return;
        low = low === null ? value : Math.min(low, value);
        high = high === null ? value : Math.max(high, value);
      });
    }
    if (low === null || high === null) return isLog(drawn) ? [0.1, 1] : [0, 1];
    return isLog(drawn) ? uPlot.rangeLog(low, high, 10, false) : uPlot.rangeNum(low, high, 0.08, true);
  }

  function drawOver(u, drawn) {
    const { ctx, bbox } = u, ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineWidth = ratio;
    if (isSingle) drawMarks(u, ctx, bbox, ratio);
    if (state.rolled) for (const each of drawn) for (const piece of each.rolled || []) drawPiece(u, ctx, ratio, piece, each.run, isLog(drawn));
    ctx.setLineDash([]);
    ctx.fillStyle = color("bad");
    for (const each of drawn) for (const [step] of each.odd || []) {
      const x = u.valToPos(step, "x", true);
      ctx.beginPath();
      ctx.moveTo(x - 5 * ratio, bbox.top);
      ctx.lineTo(x + 5 * ratio, bbox.top);
      ctx.lineTo(x, bbox.top + 9 * ratio);
      ctx.fill();
    }
    ctx.restore();
  }

  function drawMarks(u, ctx, bbox, ratio) {
    const marks = data.runs[0].marks.filter(([step]) => step > u.scales.x.min && step < u.scales.x.max);
    if (marks.length > MOST_MARKS) return;
    ctx.strokeStyle = color("muted");
    ctx.setLineDash([2 * ratio, 4 * ratio]);
    for (const [step] of marks) {
      const x = u.valToPos(step, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
  }

  function drawPiece(u, ctx, ratio, [xs, ys], run, log) {
    ctx.strokeStyle = isSingle ? color("faint") : colorOf(run);
    ctx.globalAlpha = 0.75;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    ctx.beginPath();
    let isPen = false;
    xs.forEach((step, i) => {
      const value = ys[i];
      if (value === null || (log && value <= 0)) { isPen = false; return; }
      const x = u.valToPos(step, "x", true), y = u.valToPos(value, "y", true);
      if (isPen) ctx.lineTo(x, y); else ctx.moveTo(x, y);
      isPen = true;
      if (xs.length === 1) ctx.arc(x, y, 2 * ratio, 0, 7);
    });
    ctx.stroke();
    ctx.globalAlpha = 1;
  }

  function summarize(drawn) {
    return drawn.map(each => {
      if (!isSingle && !each.odd_count && !each.rolled_count) return "";
      const finite = each.y.filter(y => y !== null), parts = isSingle ? [] : [`${data.runs[each.run].name}: `];
      if (!finite.length) parts.push("no finite value");
      else {
        const low = finite.reduce((a, b) => Math.min(a, b)), high = finite.reduce((a, b) => Math.max(a, b));
        parts.push(`last ${number(finite[finite.length - 1])}, least ${number(low)}, greatest ${number(high)}`);
      }
      if (each.odd_count) parts.push(`; not finite in ${number(each.odd_count, 15)} ${each.odd_count === 1 ? "step" : "steps"}, first ${ODD[each.odd[0][1]]} in step ${number(each.odd[0][0], 15)}`);
      if (each.rolled_count) parts.push(`; ${each.rolled_count} rolled back`);
      if (each.of) parts.push(`; extremes of ${number(each.of, 15)} values`);
      return parts.join("");
    }).filter(Boolean).join(" · ");
  }

  function tell(u, drawn) {
    const index = u.cursor.idx;
    if (index === null || index === undefined) return summarize(drawn);
    const values = drawn.map((each, i) => [isSingle ? "" : `${data.runs[each.run].name} `, u.data[i + 1][index]]);
    const shown = values.filter(([, value]) => value !== undefined).map(([name, value]) => name + (value === null ? "not shown" : number(value, 6)));
    return `step ${number(u.data[0][index], 15)}: ${shown.join(" · ")}`;
  }

  function options(plot) {
    const { drawn, box, said } = plot, isFirst = names[0] === plot.name;
    const axis = { stroke: () => color("muted"), font: "12px system-ui, sans-serif", grid: { stroke: () => color("grid"), width: 1 }, ticks: { stroke: () => color("grid"), width: 1 } };
    const write = (u, splits) => splits.map(each => (each === null ? "" : number(each)));
    return {
      width: Math.max(200, box.clientWidth), height: isFirst ? FIRST_HEIGHT : HEIGHT, padding: [10, 14, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: true, y: false }, points: { size: 7 }, bind: { dblclick: () => reset } },
      scales: { x: { time: false, range: (u, low, high) => (low === null || low === high ? whole : [low, high]) }, y: { distr: isLog(drawn) ? 3 : 1, range: (u, low, high) => fitRange(u, low, high, drawn) } },
      axes: [
        { ...axis, values: write, space: 70, size: 34 },
        { ...axis, values: write, size: (u, shown) => 18 + 7 * Math.max(3, ...(shown || []).map(each => each.length)) },
      ],
      series: [{}, ...drawn.map(each => ({ stroke: () => (isSingle ? color("accent") : colorOf(each.run)), width: 1.6, dash: dashOf(each.run), points: { size: 5 } }))],
      hooks: {
        draw: [u => drawOver(u, drawn)],
        setCursor: [u => { said.textContent = tell(u, drawn); }],
        setScale: [(u, key) => { if (key === "x" && plot.u) zoom(u.scales.x.min, u.scales.x.max, plot); }],
      },
    };
  }

  // ---- all of them

  let isZooming = false;
  function zoom(low, high, source) {
    if (isZooming) return;
    isZooming = true;
    const isWhole = low <= whole[0] && high >= whole[1];
    state.range = isWhole ? null : [low, high];
    for (const each of plots.values()) if (each !== source && each.u) setRange(each);
    isZooming = false;
  }

  function setRange(plot) {
    const [low, high] = state.range || whole;
    plot.u.setScale("x", { min: low, max: high });
  }

  function draw(plot) {
    if (plot.u) plot.u.destroy();
    plot.u = null;
    const u = new uPlot(options(plot), join(plot.drawn), plot.box);
    plot.u = u;
    plot.said.textContent = summarize(plot.drawn);
    setRange(plot);
  }

  const redraw = () => { for (const each of plots.values()) if (each.u) draw(each); };

  function press(event, plot) {
    const u = plot.u;
    if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = u.data[0], { min, max } = u.scales.x;
    const first = steps.findIndex(x => x >= min), last = steps.findLastIndex(x => x <= max);
    let index = u.cursor.idx ?? last;
    const jump = event.shiftKey ? 10 : 1;
    if (event.key === "ArrowLeft") index = Math.max(first, index - jump);
    else if (event.key === "ArrowRight") index = Math.min(last, index + jump);
    else if (event.key === "Home") index = first;
    else if (event.key === "End") index = last;
    else if (event.key === "+" || event.key === "-") {
      const middle = steps[index], half = (max - min) * (event.key === "+" ? 0.25 : 1);
      u.setScale("x", { min: Math.max(whole[0], middle - half), max: Math.min(whole[1], middle + half) });
    } else if (event.key === "0" || event.key === "Escape") reset();
    else return;
    event.preventDefault();
    const at = u.data.slice(1).map(each => each[index]).find(each => each !== null && each !== undefined);
    setTimeout(() => { // when uPlot has set the new scale
      u.setCursor({ left: u.valToPos(steps[index], "x"), top: at === undefined ? 0 : u.valToPos(at, "y") });
      say(plot.said.textContent);
    });
  }

  function reset() {
    state.range = null;
    isZooming = true;
    for (const each of plots.values()) if (each.u) setRange(each);
    isZooming = false;
  }

  function makeTools() {
    const search = make("input", { type: "search", placeholder: "filter by name", "aria-label": "Filter curves by name", oninput: () => {
      for (const each of plots.values()) each.box.parentElement.hidden = !each.name.toLowerCase().includes(search.value.toLowerCase());
    } });
    const box = (text, key) => make("label", {}, make("input", { type: "checkbox", onchange: event => { state[key] = event.target.checked; redraw(); } }), text);
    const tools = make("div", { class: "tools" }, box("log scale", "log"));
    if (Object.values(data.curves).some(drawn => drawn.some(each => each.rolled))) tools.append(box("rolled-back steps", "rolled"));
    tools.append(make("button", { type: "button", onclick: reset }, "whole range"));
    if (names.length > 6) tools.append(search);
    return tools;
  }

  function makeKeys() {
    const keys = make("div", { class: "tools" });
    data.runs.forEach((run, i) => {
      const line = drawing("line", { x1: 0, x2: 22, y1: 5, y2: 5, "stroke-width": 3, "stroke-dasharray": dashOf(i).join(" ") });
      const paint = () => line.setAttribute("stroke", colorOf(i));
      paint();
      holdfast.onTheme(paint);
      keys.append(make("span", { class: "run-key" }, drawing("svg", { "aria-hidden": "true" }, line), run.name));
    });
    return keys;
  }

  grid.replaceChildren();
  if (!names.length) {
    grid.append(make("p", { class: "empty" }, "No step is committed yet, so there is nothing to draw."));
    return;
  }
  const watcher = new IntersectionObserver(entries => {
    for (const each of entries) if (each.isIntersecting && !plots.get(each.target.dataset.name).u) draw(plots.get(each.target.dataset.name));
  }, { rootMargin: "300px" });
  const resizer = new ResizeObserver(entries => {
    for (const { target } of entries) {
      const { u } = plots.get(target.parentElement.dataset.name), width = Math.max(200, target.clientWidth);
      if (u && u.width !== width && !matchMedia("print").matches) u.setSize({ width, height: u.height });
    }
  });
  const list = make("div", { class: "grid" });
  grid.append(makeTools(), ...(isSingle ? [] : [makeKeys()]), list);
  for (const name of names) {
    const box = make("div", { class: "plot" }), said = make("div", { class: "said" });
    const plot = { name, drawn: data.curves[name], box, said, u: null };
    const whole = make("div", {
      class: name === names[0] ? "curve first" : "curve", tabindex: 0, role: "group", "data-name": name,
      "aria-label": `${name} by step. ${summarize(plot.drawn)}`, "aria-keyshortcuts": "ArrowLeft ArrowRight Home End + - 0",
      onkeydown: event => press(event, plot),
    }, make("h3", {}, name), box, said);
    said.textContent = summarize(plot.drawn);
    plots.set(name, plot);
    list.append(whole);
    watcher.observe(whole);
    resizer.observe(box);
  }
  const help = "Drag over a curve to zoom in, and double-click to see all of it. With the keyboard: arrows, Home, End, + and -, and 0 for the whole range.";
  const marks = isSingle && data.runs[0].marks.length > 1 ? " A dotted line is the step that an attempt began with." : "";
  grid.append(make("p", { class: "note" }, help + marks));
  if (data.left_out) grid.append(make("p", { class: "note" }, `${data.left_out} further curves are not drawn.`));
  holdfast.onTheme(() => { for (const each of plots.values()) if (each.u) each.u.redraw(false); });
  addEventListener("beforeprint", () => { for (const each of plots.values()) if (!each.u) draw(each); });
})();
