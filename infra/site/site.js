// Code and tables that are wider than the page can be scrolled with the keyboard only if they can have the focus.
const SCROLLED = "pre > code, .md-typeset__scrollwrap, .md-typeset__table";

function letFocus() {
  for (const each of document.querySelectorAll(SCROLLED)) {
    if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
    else each.removeAttribute("tabindex");
  }
}

// Tables get their scrolling wrapper from the theme's script, and a width changes with the window.
new ResizeObserver(letFocus).observe(document.body);
addEventListener("load", letFocus);
