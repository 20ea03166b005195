// One image: its prediction, the overlay of selected patches, and the patches most similar to one.

const isMap = () => layer().grid !== null;
const visible = (b) => selections(b).filter(({ expert, gate }) => !state.hidden.has(expert) && gate >= state.least);

function byPatch(chosen) {
  const found = new Map();
  for (const each of chosen) found.set(each.patch, [...(found.get(each.patch) ?? []), each]);
  return found;
}

function drawImage() {
  const b = state.image;
  const [width, height] = data.images.size[b];
  const picture = find("picture");
  picture.src = address(`image-${b}`);
  picture.alt = sentence(b);
  picture.classList.toggle("small", Math.max(width, height) < 200);
  find("stage").style.aspectRatio = `${width} / ${height}`;
  find("stage").style.setProperty("--shape", width / height);
  find("name").textContent = data.images.name[b];
  const position = listed.indexOf(b) + 1;
  find("position").textContent = `${position.toLocaleString("en")} of ${listed.length.toLocaleString("en")}`;
  find("status").textContent = `${sentence(b)}. Image ${position} of ${listed.length}.`;
  drawPrediction(b);
  drawAssigned(b);
  drawOverlay();
  drawPatch();
  if (find("strips")) drawGates(b);
}

function bar(share, most = 1) {
  const track = element("span", { class: "track", "aria-hidden": "true" });
  track.append(element("i", { style: `width: ${((100 * share) / most).toFixed(2)}%`, "data-value": share.toFixed(4) }));
  return track;
}

function drawPrediction(b) {
  const rows = checkpoint().top[b].map(([k, probability], rank) => {
    const verdict = rank ? "" : label(b) < 0 ? "predicted" : wrong(b) ? "predicted, wrong" : "predicted, correct";
    const note = verdict || (k === label(b) ? "true class" : "");
    return element("tr", { class: k === label(b) ? "true" : null },
      element("th", { scope: "row" }, data.classes[k], note ? element("span", { class: `note${rank || !wrong(b) ? "" : " bad"}` }, note) : null),
      element("td", {}, percent(probability)), element("td", { class: "bar" }, bar(probability)));
  });
  if (label(b) >= 0 && !checkpoint().top[b].some(([k]) => k === label(b))) {
    rows.push(element("tr", { class: "true" }, element("th", { scope: "row" }, data.classes[label(b)],
      element("span", { class: "note" }, "true class")), element("td", {}, "less"), element("td", {})));
  }
  find("prediction").replaceChildren(...rows);
}

// the experts of a whole image
function drawAssigned(b) {
  const box = find("assigned");
  if (!box) return;
  if (isMap()) return box.replaceChildren(...prefixed(b));
  if (layer().kind === "channel") return box.replaceChildren();
  if (layer().kind === "token") return box.replaceChildren(tokensOf(b));
  const rows = selections(b).map(({ expert, gate }) => element("tr", { "data-expert": expert, "data-gate": gate.toFixed(4) },
    element("th", { scope: "row" }, swatch(expert), `expert ${expert}`), element("td", {}, brief(gate)),
    element("td", { class: "bar" }, bar(Math.max(gate, 0), Math.max(routed().gate.most, 1)))));
  return box.replaceChildren(element("table", { class: "bars" }, element("caption", {}, "Experts that the image is sent to, and their gates"), element("tbody", {}, ...rows)));
}

// the experts of tokens that have no place in the image
function prefixed(b) {
  const every = layer().prefix ? routes(b).filter(({ patch }) => patch < 0) : [];
  return Array.from({ length: layer().prefix }, (_, n) => {
    const own = every.filter(({ patch }) => patch === n - layer().prefix);
    const experts = own.flatMap(({ expert, gate }, i) => [i ? ", " : "", element("span", { class: "to", "data-expert": expert, "data-token": n, "data-gate": gate.toFixed(4) }, swatch(expert), `expert ${expert} gate ${brief(gate)}`)]);
    return element("p", { class: "prefix" }, element("strong", {}, `${capital(tokenName(n))}: `), ...(experts.length ? experts : ["no expert"]));
  });
}

// tokens without a grid: how many of them each expert processes
function tokensOf(b) {
  const counts = Array.from({ length: layer().experts }, () => 0);
  for (const { expert } of routes(b)) counts[expert] += 1;
  const rows = counts.map((own, e) => element("tr", {}, element("th", { scope: "row" }, swatch(e), `expert ${e}`), element("td", {}, String(own)), element("td", { class: "bar" }, bar(own, total()))));
  const what = layer().chooser === "soft" ? "with a weight above the mean, for each expert" : "of each expert";
  return element("table", { class: "bars" }, element("caption", {}, `Tokens ${what}, of ${total()} in the image; they have no grid, so none is drawn`), element("tbody", {}, ...rows));
}

function drawOverlay() {
  const b = state.image;
  const [width, height] = data.images.size[b];
  const seen = square(b);
  const overlay = find("overlay");
  overlay.setAttribute("viewBox", `0 0 ${width} ${height}`);
  overlay.replaceChildren();
  find("targets").replaceChildren();
  // what the network does not see
  overlay.append(shape("path", {
    d: `M0 0H${width}V${height}H0ZM${seen.x} ${seen.y}V${seen.y + seen.side}H${seen.x + seen.side}V${seen.y}Z`,
    fill: VEIL, "fill-opacity": 0.72, "fill-rule": "evenodd",
  }));
  if (!isMap()) return;
  const { filled } = layer();
  const chosen = visible(b);
  const patches = byPatch(chosen);
  const experts = new Set(chosen.map(({ expert }) => expert));
  const single = experts.size === 1 && state.hidden.size > 0;
  const most = Math.max(...selections(b).map(({ gate }) => gate), 1e-12);
  const cell = Math.min(seen.side / filled[0], seen.side / filled[1]);
  const deepest = Math.max(1, ...[...patches.values()].map((each) => each.length));
  const pitch = Math.min(0.1 * cell, (0.34 * cell) / deepest, 0.0095 * seen.side);
  for (let n = 0; n < layer().units; n += 1) {
    const at = rectangle(n, seen, layer());
    if (at.width <= 0 || at.height <= 0) continue;
    const gates = (patches.get(n) ?? []).map(({ gate }) => gate);
    const clear = gates.length ? (state.shade ? Math.max(...gates) / most : 1) : 0;
    const veil = (1 - clear) * (single || state.shade ? 0.74 : 0.42);
    if (veil > 0.005) overlay.append(shape("rect", { ...at, fill: VEIL, "fill-opacity": veil.toFixed(3), "data-veil": n }));
  }
  for (const [n, each] of patches) {
    const at = rectangle(n, seen, layer());
    each.forEach(({ expert, gate }, depth) => {
      const inset = (depth + 0.5) * pitch;
      const box = { x: at.x + inset, y: at.y + inset, width: Math.max(at.width - 2 * inset, 0), height: Math.max(at.height - 2 * inset, 0), fill: "none" };
      overlay.append(shape("rect", { ...box, stroke: "#ffffff", "stroke-width": 1.15 * pitch }));
      overlay.append(shape("rect", {
        ...box, stroke: colour(expert), "stroke-width": 0.8 * pitch, "data-expert": expert, "data-patch": n,
        "data-gate": gate.toFixed(4), "stroke-dasharray": dash(expert).map((part) => part * 0.8 * pitch).join(" "),
      }));
    });
    if (single) drawNumber(overlay, at, each[0], seen.side);
  }
  drawTargets(patches, seen, width, height);
}

function drawNumber(overlay, at, { expert, gate }, side) {
  const size = Math.min(0.028 * side, 0.3 * at.width, 0.4 * at.height);
  if (size < 0.017 * side) return;
  const text = brief(gate);
  const [wide, tall] = [(0.6 * text.length + 0.5) * size, 1.35 * size];
  const [left, top] = [at.x + (at.width - wide) / 2, at.y + at.height - tall];
  overlay.append(shape("rect", { x: left, y: top, width: wide, height: tall, fill: colour(expert) }));
  overlay.append(shape("text", {
    x: left + wide / 2, y: top + 0.74 * tall, "font-size": size, "text-anchor": "middle", fill: ink(parts(colour(expert))),
  }, text));
}

const inPercent = (part, whole) => `${((100 * part) / whole).toFixed(3)}%`;

function drawTargets(patches, seen, width, height) {
  const targets = [...patches.keys()].sort((a, b) => a - b).map((n) => {
    const at = rectangle(n, seen, layer());
    const who = patches.get(n).map(({ expert, gate }) => `expert ${expert} gate ${brief(gate)}`).join(", ");
    return element("button", {
      type: "button", class: "target", "data-patch": n, tabindex: -1, "aria-label": `${place(n)}: ${who}`,
      style: `left:${inPercent(at.x, width)};top:${inPercent(at.y, height)};width:${inPercent(at.width, width)};height:${inPercent(at.height, height)}`,
    });
  });
  if (targets.length) (targets.find((each) => Number(each.dataset.patch) === state.patch) ?? targets[0]).tabIndex = 0;
  find("targets").replaceChildren(...targets);
}

const target = (event) => {
  const found = event.target.closest("[data-patch]");
  return found ? Number(found.dataset.patch) : null;
};
function look(n) {
  if (n === null || n === state.patch) return;
  state.patch = n;
  drawPatch();
}
find("targets").addEventListener("mouseover", (event) => { if (!state.pinned) look(target(event)); });
find("targets").addEventListener("focusin", (event) => {
  const n = target(event);
  if (n === null) return;
  for (const each of find("targets").children) each.tabIndex = Number(each.dataset.patch) === n ? 0 : -1;
  if (event.target.matches(":focus-visible")) { state.pinned = false; look(n); }
});
find("targets").addEventListener("click", (event) => {
  const n = target(event);
  if (n === null) return;
  state.pinned = !(state.pinned && n === state.patch);
  state.patch = n;
  drawPatch();
});
find("targets").addEventListener("keydown", (event) => {
  const way = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  const from = target(event);
  if (!way || from === null) return;
  event.preventDefault();
  const wide = layer().grid[1];
  const ahead = [...find("targets").children].map((each) => {
    const n = Number(each.dataset.patch);
    const [down, right] = [Math.floor(n / wide) - Math.floor(from / wide), (n % wide) - (from % wide)];
    const along = down * way[0] + right * way[1];
    return { each, along, far: along + 2 * Math.abs(down * way[1] + right * way[0]) };
  }).filter(({ along }) => along > 0).sort((a, b) => a.far - b.far);
  if (ahead.length) ahead[0].each.focus();
});

// the top patches of an expert that are most similar to a patch; without features, those with the highest scores
function nearest(expert, b, n) {
  const candidates = routed().top[expert].filter(([image]) => image !== b).slice(0, data.candidates);
  const packed = routed().features;
  if (!packed) return candidates.slice(0, 6);
  const all = unpack(packed);
  const at = (image, patch) => (image * layer().units + patch) * packed.count;
  const far = ([image, patch]) => {
    let sum = 0;
    for (let i = 0; i < packed.count; i += 1) sum += (all[at(image, patch) + i] - all[at(b, n) + i]) ** 2;
    return sum;
  };
  return candidates.map((each) => ({ each, distance: far(each) })).sort((x, y) => x.distance - y.distance).slice(0, 6).map(({ each }) => each);
}

function drawPatch() {
  const panel = find("patch");
  if (!panel) return;
  for (const each of find("targets").children) each.classList.toggle("current", Number(each.dataset.patch) === state.patch);
  if (!isMap()) return panel.replaceChildren();
  const here = state.patch === null ? [] : selections(state.patch === null ? 0 : state.image).filter(({ patch, expert }) => patch === state.patch && !state.hidden.has(expert));
  if (!here.length) {
    return panel.replaceChildren(element("p", { class: "soft" }, `Point at a framed ${unit()}, or move to it with the arrow keys: similar ${units()} of other images appear here, among those with the highest scores of the same experts. A click keeps them here.`));
  }
  panel.replaceChildren(element("h3", {}, `${capital(unit())} in ${place(state.patch)}`), ...here.map(({ expert, gate }) => {
    const found = nearest(expert, state.image, state.patch);
    return element("div", { class: "similar" },
      element("p", {}, swatch(expert), element("strong", {}, `expert ${expert}`), ` gate ${brief(gate)}. ${routed().features ? `Most similar top ${units()} in other images:` : `Top ${units()} in other images:`}`),
      element("div", { class: "crops" }, ...found.map((each) => topPatch(each, expert, 112))));
  }), routed().features ? element("p", { class: "soft" }, `Top ${units()} are the ${data.candidates} ${units()} with an expert's highest scores, at most one of each image; the most similar ones are those whose features in front of this layer are most similar (Euclidean distance of ${plural(routed().features.count, "principal component")}).`) : "");
}

function swatch(expert) {
  const stripes = dash(expert);
  const line = shape("svg", { viewBox: "0 0 22 8", width: 22, height: 8, "aria-hidden": "true", class: "swatch" });
  line.append(shape("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: colour(expert), "stroke-width": 6, "stroke-dasharray": stripes.map((part) => 5 * part).join(" ") }));
  return line;
}

function drawExperts() {
  const box = find("experts");
  if (!box) return;
  box.hidden = !isMap();
  if (box.hidden) return;
  const chips = Array.from({ length: layer().experts }, (_, e) => {
    const check = element("input", { type: "checkbox", value: e, checked: !state.hidden.has(e) });
    return element("label", { class: "chip" }, check, swatch(e), `expert ${e}`);
  });
  find("chips").replaceChildren(...chips);
}
find("chips")?.addEventListener("input", (event) => {
  const e = Number(event.target.value);
  if (event.target.checked) state.hidden.delete(e); else state.hidden.add(e);
  drawOverlay();
  drawPatch();
});
for (const name of ["all", "none"]) {
  find(name)?.addEventListener("click", () => {
    state.hidden = new Set(name === "all" ? [] : Array.from({ length: layer().experts }, (_, e) => e));
    for (const box of find("chips").querySelectorAll("input")) box.checked = name === "all";
    drawOverlay();
    drawPatch();
  });
}
find("least")?.addEventListener("input", (event) => {
  const { least, most } = routed().gate;
  state.least = Number(event.target.value) ? least + (Number(event.target.value) / 100) * (most - least) : -Infinity;
  syncLeast();
  drawOverlay();
  drawPatch();
});
find("shade")?.addEventListener("input", (event) => { state.shade = event.target.checked; drawOverlay(); });
function syncLeast() {
  if (!find("least")) return;
  const shown = Number.isFinite(state.least) ? `at least ${brief(state.least)}` : "all";
  find("least-value").textContent = shown;
  find("least").setAttribute("aria-valuetext", shown);
}
