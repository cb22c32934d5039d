// Keys, a linked step unfolded, and what changes while a page is open: every page is whole without this file.
"use strict";
const unfoldTarget = () => {
  const step = document.getElementById(location.hash.slice(1))?.querySelector("details");
  if (step) step.open = true;
};
addEventListener("hashchange", unfoldTarget);
unfoldTarget();
document.querySelector("header nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const stops = [...document.querySelectorAll("[data-nav]")];
  const at = stops.indexOf(document.activeElement);
  const go = (index) => {
    const stop = stops[Math.max(0, Math.min(stops.length - 1, index))];
    if (!stop) return;
    stop.focus({ preventScroll: true });
    stop.scrollIntoView({ block: "nearest" });
  };
  if (event.key === "j") go(at + 1);
  else if (event.key === "k") go(at < 0 ? 0 : at - 1);
  else if (event.key === "/") {
    const search = document.querySelector("[data-search]");
    if (!search) return;
    search.focus();
    search.select();
  } else if (event.key === "e") {
    const steps = [...document.querySelectorAll(".steps details")];
    const open = steps.some((step) => !step.open);
    for (const step of steps) step.open = open;
  } else return;
  event.preventDefault();
});

document.addEventListener("submit", (event) => {
  const words = event.submitter?.dataset.confirm;
  if (words && !confirm(words)) event.preventDefault();
});

// What the server sends is what it would have written into the page: pieces of HTML by name, nothing that runs.
const made = (html) => {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content.firstElementChild;
};
const replace = (name, html) => {
  const old = document.querySelector(`[data-part="${CSS.escape(name)}"]`);
  if (!old) return;
  const fresh = made(html);
  if (!fresh) return old.replaceChildren();
  if (old.isEqualNode(fresh)) return;
  const focused = document.activeElement;
  const held = old.contains(focused) ? (focused === old ? "" : focused.getAttribute("href")) : null;
  old.replaceWith(fresh);
  if (held === "") fresh.focus({ preventScroll: true });
  else if (held) fresh.querySelector(`[href="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
};
const live = document.querySelector("[data-live]")?.dataset.live;
if (live) {
  const state = document.querySelector("[data-live-state]");
  const list = document.querySelector("[data-grows]");
  const source = new EventSource(live);
  const show = (on) => { if (state) state.hidden = !on; };
  // A part's newest HTML waits here for its turn: a few a frame, so that a page full of changes still scrolls.
  const waiting = new Map();
  const work = () => {
    const until = performance.now() + 8;
    for (const [name, [html, isNew]] of waiting) {
      waiting.delete(name);
      if (!isNew) replace(name, html);
      else if (list && !document.getElementById(name)) list.append(made(html));
      if (performance.now() > until) break;
    }
    if (waiting.size) requestAnimationFrame(work);
  };
  source.addEventListener("open", () => show(true));
  source.addEventListener("error", () => show(false));
  source.addEventListener("message", (event) => {
    const { replaced, added } = JSON.parse(event.data);
    if (!waiting.size) requestAnimationFrame(work);
    for (const [name, html] of Object.entries(replaced)) waiting.set(name, [html, false]);
    for (const [name, html] of Object.entries(added)) waiting.set(name, [html, true]);
  });
  addEventListener("pagehide", () => source.close());
}
