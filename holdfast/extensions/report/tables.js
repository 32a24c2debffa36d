"use strict";
// The table of commits, page by page, and tables that a click on a heading sorts.
(() => {
  const { data, make, number, bytes, copy } = holdfast;
  const PAGE = 50;
  const LOOKS = { kept: "good", deleted: "calm", quarantined: "bad", "rolled back": "warn" };
  const HEADS = ["commit", "steps", "content id", "state", "loss", "size", "trained", "save", "paused", "attempt", "committed (UTC)", "note"];

  function showTable(place, { rows, left_out }) {
    const names = ["number", "parent", "start", "step", "epoch", "attempt", "why", "at", "path", "sha256", "size", "train", "stall", "save", "loss", "state", "note", "pinned", "signed", "verified"];
    const commits = rows.map(row => Object.fromEntries(names.map((name, i) => [name, row[i]])));
    const state = { page: 0, chosen: commits };
    const body = make("tbody"), status = make("span"), search = make("input", { type: "search", size: 26, placeholder: "number, step or content id", "aria-label": "Find a commit" });
    const kinds = ["all", ...new Set(commits.map(each => each.state)), ...["verified", "pinned", "signed"].filter(kind => commits.some(each => each[kind]))];
    const kind = make("select", { "aria-label": "Which commits" }, ...kinds.map(each => make("option", { value: each }, each)));
    const back = make("button", { type: "button" }, "newer"), on = make("button", { type: "button" }, "older");

    function choose() {
      const text = search.value.trim().toLowerCase(), of = kind.value;
      state.chosen = commits.filter(each => (of === "all" || each.state === of || Boolean(each[of]))
        && (!text || each.sha256.startsWith(text) || String(each.number) === text || String(each.step) === text));
      state.page = 0;
      show();
    }

    function show() {
      const { page, chosen } = state, last = Math.max(0, Math.ceil(chosen.length / PAGE) - 1), start = page * PAGE;
      body.replaceChildren(...chosen.slice(start, start + PAGE).map(makeRow));
      status.textContent = chosen.length ? `${number(start + 1, 15)} to ${number(Math.min(start + PAGE, chosen.length), 15)} of ${number(chosen.length, 15)}` : "no such commit";
      back.disabled = page === 0;
      on.disabled = page === last;
    }

    search.addEventListener("input", choose);
    kind.addEventListener("change", choose);
    back.addEventListener("click", () => { state.page -= 1; show(); });
    on.addEventListener("click", () => { state.page += 1; show(); });
    const head = make("tr", {}, ...HEADS.map(each => make("th", { scope: "col" }, each)));
    const table = make("table", {}, make("caption", {}, "Commits, the newest first"), make("thead", {}, head), body);
    place.append(
      make("div", { class: "tools" }, kind, search),
      make("div", { class: "scroll rows", tabindex: 0, role: "region", "aria-label": "Commits" }, table),
      make("div", { class: "pages" }, back, on, status),
      make("p", { class: "note" }, "Retention deletes checkpoints; their records and trails stay. An attempt that continues from a checkpoint verifies it: every byte is read back. This page read records alone; holdfast verify compares every byte with these content ids."),
    );
    if (left_out) place.append(make("p", { class: "note" }, `${number(left_out, 15)} older commits are not listed.`));
    show();
  }

  function makeRow(commit) {
    const id = make("button", { type: "button", class: "id", title: commit.sha256, "aria-label": `${commit.sha256.slice(0, 12)}: copy the content id` });
    id.append(make("code", {}, commit.sha256.slice(0, 12)));
    id.addEventListener("click", () => copy(commit.sha256, id));
    const verified = commit.verified ? `verified by attempt ${commit.verified}` : "";
    const marks = [verified, commit.pinned && "pinned", commit.signed && "signed", commit.why !== "chunk" && commit.why, commit.note].filter(Boolean);
    const seconds = value => (value ? `${number(value, 3)} s` : "");
    const cells = [
      `${number(commit.start, 15)} to ${number(commit.step, 15)}`, id, make("span", { class: `badge ${LOOKS[commit.state] || "unknown"}` }, commit.state),
      commit.loss === "NaN" ? "not finite" : number(commit.loss), bytes(commit.size), seconds(commit.train), seconds(commit.save), seconds(commit.stall),
      String(commit.attempt), commit.at.slice(0, 19).replace("T", " "), marks.join("; "),
    ];
    return make("tr", {}, make("th", { scope: "row", title: commit.path }, String(commit.number)), ...cells.map(each => make("td", {}, each)));
  }

  // A click on a heading sorts by numbers where all cells are numbers, and by text otherwise; empty cells come last.
  function makeSortable(table) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      const button = make("button", { type: "button" }, cell.textContent);
      cell.replaceChildren(button);
      button.addEventListener("click", () => {
        const isDown = cell.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        const read = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
        const rows = [...body.rows], isNumeric = rows.every(row => read(row) === "" || !Number.isNaN(Number(read(row))));
        rows.sort((a, b) => {
          const [one, other] = [read(a), read(b)];
          if (one === "" || other === "") return (one === "") - (other === "");
          return (isDown ? -1 : 1) * (isNumeric ? one - other : one.localeCompare(other, "en", { numeric: true }));
        });
        body.append(...rows);
      });
    });
  }

  const place = document.getElementById("commit-table");
  if (place && data.commits.rows.length) showTable(place, data.commits);
  else if (place) place.append(make("p", { class: "empty" }, "No checkpoint is committed yet."));
  for (const table of document.querySelectorAll(".sortable table")) makeSortable(table);
})();
