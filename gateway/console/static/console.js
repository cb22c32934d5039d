// Keys, and a linked step unfolded: every page is whole without this file.
"use strict";
const unfoldTarget = () => {
  const step = document.getElementById(location.hash.slice(1))?.querySelector("details");
  if (step) step.open = true;
};
addEventListener("hashchange", unfoldTarget);
unfoldTarget();

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
