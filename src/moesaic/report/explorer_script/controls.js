// Views and controls, and the first drawing of the page.

const VIEWS = { images: drawImage, classes: drawClass, experts: drawExpertView, dispatch: drawDispatch };
const tabs = [...root.querySelectorAll('[role="tab"]')];

function offered(view) {
  if (view === "experts") return layer().kind !== "channel";
  return view !== "dispatch" || (layer().kind !== "channel" && layer().chooser !== "expert");
}

function show(view) {
  state.view = offered(view) ? view : "images";
  for (const tab of tabs) {
    tab.hidden = !offered(tab.dataset.view);
    const selected = tab.dataset.view === state.view;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
    document.getElementById(tab.getAttribute("aria-controls")).hidden = !selected;
  }
  VIEWS[state.view]();
}
for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab.dataset.view));
  tab.addEventListener("keydown", (event) => {
    const ways = { ArrowRight: 1, ArrowLeft: -1 };
    const shown = tabs.filter((each) => !each.hidden);
    const to = event.key === "Home" ? 0 : event.key === "End" ? shown.length - 1 : shown.indexOf(tab) + (ways[event.key] ?? NaN);
    if (Number.isNaN(to)) return;
    event.preventDefault();
    const next = shown[(to + shown.length) % shown.length];
    show(next.dataset.view);
    next.focus();
  });
}

const CONTROLS = { order: "order", filter: "filter", verdict: "verdict", source: "source", search: "search" };
function syncControls() {
  for (const [part, name] of Object.entries(CONTROLS)) if (find(part)) find(part).value = state[name];
}
for (const [part, name] of Object.entries(CONTROLS)) {
  find(part)?.addEventListener("input", (event) => {
    state[name] = event.target.value;
    list();
    if (listed.length) { state.patch = null; drawImage(); }
  });
}
find("reset").addEventListener("click", () => {
  Object.assign(state, { filter: "", verdict: "", source: "", search: "", order: find("order").options[0].value });
  syncControls();
  list();
  drawImage();
});

find("layer")?.addEventListener("input", (event) => {
  state.layer = Number(event.target.value);
  Object.assign(state, { hidden: new Set(), least: -Infinity, patch: null, pinned: false, expert: 0 });
  if (find("least")) find("least").value = 0;
  syncLeast();
  drawExperts();
  fillExperts();
  show(state.view);
});
find("checkpoint")?.addEventListener("input", (event) => {
  state.checkpoint = Number(event.target.value);
  syncCheckpoint();
  list();
  show(state.view);
});
function syncCheckpoint() {
  if (!find("checkpoint")) return;
  find("checkpoint-name").textContent = checkpoint().name;
  find("checkpoint").setAttribute("aria-valuetext", checkpoint().name);
}
find("previous").addEventListener("click", () => step(-1));
find("next").addEventListener("click", () => step(1));
find("which-class")?.addEventListener("input", (event) => { state.class = Number(event.target.value); drawClass(); });
find("map")?.addEventListener("input", (event) => { state.map = event.target.value; drawClass(); });
function fillExperts() {
  if (!find("which-expert")) return;
  find("which-expert").replaceChildren(...Array.from({ length: layer().experts }, (_, e) => element("option", { value: e }, `expert ${e}`)));
}
find("which-expert")?.addEventListener("input", (event) => { state.expert = Number(event.target.value); drawExpertView(); });

state.order = find("order").options[0].value;
root.classList.add("ready");
syncControls();
syncLeast();
syncCheckpoint();
drawExperts();
fillExperts();
list();
state.image = listed[0];
mark();
show("images");
