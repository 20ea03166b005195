// Filters of the report. Without a script everything is shown, and the filters are not.
"use strict";
const filters = document.querySelector(".filters");
const boxes = [...filters.querySelectorAll("input")];
const shown = (kind) => new Set(boxes.filter((box) => box.name === kind && box.checked).map((box) => box.value));

function apply() {
  const [papers, verdicts, fidelities] = ["paper", "verdict", "fidelity"].map(shown);
  const matches = (element) =>
    (papers.size === 0 || papers.has(element.dataset.paper)) &&
    element.dataset.findings.split("|").some((finding) => {
      const [fidelity, verdict] = finding.split("=");
      return (verdicts.size === 0 || verdicts.has(verdict)) && (fidelities.size === 0 || fidelities.has(fidelity));
    });
  let count = 0;
  for (const claim of document.querySelectorAll("[data-findings]")) {
    const match = matches(claim);
    if (claim.matches(".square")) claim.classList.toggle("off", !match);
    else claim.hidden = !match;
    if (claim.matches(".square") && match) count += 1;
  }
  const filtered = boxes.some((box) => box.checked);
  for (const part of document.querySelectorAll("[data-part]")) {
    part.hidden = filtered && !part.querySelector("[data-findings]:not([hidden])");
  }
  filters.querySelector("output").textContent = filtered ? `${count} of ${filters.dataset.claims} claims` : "";
  filters.querySelector("button").hidden = !filtered;
}

function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  if (target.closest("[hidden]")) {
    for (const box of boxes) box.checked = false;
    apply();
  }
  for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  target.scrollIntoView();
}

filters.hidden = false;
filters.addEventListener("input", apply);
filters.querySelector("button").addEventListener("click", () => {
  for (const box of boxes) box.checked = false;
  apply();
});
addEventListener("hashchange", reveal);
reveal();
