"use strict";
// What all parts of a report share: its data, elements, numbers, the theme, and buttons that copy.
const holdfast = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  const themes = ["auto", "light", "dark"], watchers = [];
  let theme = "auto";

  // An element with properties and children. Texts stay texts: nothing here reads markup.
  function make(name, properties = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(properties)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value !== null && value !== false) made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  }

  function drawing(name, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function number(value, digits = 5) {
    if (value === null || value === undefined) return "";
    const size = Math.abs(value);
    if (size && (size < 1e-4 || size >= 1e9)) return value.toExponential(Math.max(0, digits - 3)).replace(/\.?0+e/, "e");
    return value.toLocaleString("en-US", { maximumSignificantDigits: digits });
  }

  function bytes(size) {
    for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (size >= unit) return `${(size / unit).toFixed(1)} ${name}`;
    return `${size} bytes`;
  }

  const color = name => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const isDark = () => root.dataset.theme === "dark";

  function setTheme(chosen) {
    root.dataset.theme = chosen === "auto" ? (dark.matches ? "dark" : "light") : chosen;
    for (const watcher of watchers) watcher();
  }

  function say(text) {
    live.textContent = text;
  }

  async function copy(text, button) {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      done = false; // not allowed here: select the text instead
      const code = button.parentElement.querySelector("code");
      if (code) getSelection().selectAllChildren(code);
    }
    const before = button.textContent;
    say(done ? "copied" : "selected, to be copied");
    button.textContent = done ? "copied" : "selected";
    setTimeout(() => { button.textContent = before; }, 1200);
  }

  const live = make("div", { class: "hidden", "aria-live": "polite" });
  document.body.append(live);
  setTheme(theme);
  dark.addEventListener("change", () => setTheme(theme));
  addEventListener("beforeprint", () => setTheme("light")); // paper is white
  addEventListener("afterprint", () => setTheme(theme));
  const button = document.getElementById("theme");
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    button.textContent = `theme: ${theme}`;
    setTheme(theme);
  });
  for (const each of document.querySelectorAll("button.copy")) {
    each.addEventListener("click", () => copy(each.parentElement.querySelector("code").textContent, each));
  }
  return { data, make, drawing, number, bytes, color, isDark, copy, say, onTheme: watcher => watchers.push(watcher) };
})();
