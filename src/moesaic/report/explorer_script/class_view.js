// Maps of a class: where experts select, and examples.

const CLASS_MAPS = {
  share: "share of images", difference: "difference to the other classes", gate: "mean gate",
};

// where an array of rows, experts and units has a unit of the grid; those in front of it are below 0
const cellOf = (r, e, n) => (r * layer().experts + e) * total() + layer().prefix + n;

function classValues(k, expert) {
  const { experts } = layer();
  const row = data.present.indexOf(k);
  const share = routed().share;
  return Array.from({ length: layer().units }, (_, n) => {
    if (expert === null) {  // the total gate that the experts give to the patch, of an image of the class
      let sum = 0;
      for (let e = 0; e < experts; e += 1) {
        sum += number(share, cellOf(row, e, n)) * (layer().chooser === "soft" ? 1 : number(routed().mean_gate, cellOf(row, e, n)));
      }
      return sum;
    }
    const value = number(share, cellOf(row, expert, n));
    if (state.map === "share") return value;
    if (state.map === "gate") return value >= 0.05 || layer().chooser === "soft" ? number(routed().mean_gate, cellOf(row, expert, n)) : 0;
    let others = 0;
    for (let r = 0; r < data.present.length; r += 1) if (r !== row) others += number(share, cellOf(r, expert, n));
    return value - others / Math.max(1, data.present.length - 1);
  });
}

function drawMap(values, most, { title: name, expert, background, kind }) {
  const own = layer();
  const seen = { x: 0, y: 0, side: 100 };
  const written = (value) => (kind === "gate" || kind === "total" ? brief(value) : `${kind === "difference" && value > 0 ? "+" : ""}${Math.round(100 * value)}`.replace("-", "−"));
  const suffix = kind === "share" ? " %" : kind === "difference" ? " points" : "";
  const best = values.reduce((top, value, n) => (Math.abs(value) > Math.abs(values[top]) ? n : top), 0);
  const drawing = shape("svg", { viewBox: "0 0 100 100", role: "img", "aria-label": `${name}: strongest in ${place(best)}, ${written(values[best])}${suffix}` });
  if (background) drawing.append(shape("image", { href: address(background), width: 100, height: 100, preserveAspectRatio: "none", style: "image-rendering: auto" }));
  const cell = 100 / Math.max(...own.filled);
  const hue = kind === "total" ? "#d55e00" : kind === "difference" ? "#e69f00" : colour(expert ?? 0);
  const cells = shape("g", { fill: hue, stroke: "#ffffff", "stroke-opacity": 0.35, "stroke-width": 0.25 });
  const texts = shape("g", { class: "on-map", "font-size": Math.min(5, 0.36 * cell), "text-anchor": "middle" });
  const title = shape("title", {});
  values.forEach((value, n) => {
    const at = rectangle(n, seen, own);
    if (at.width <= 0 || at.height <= 0) return;
    const strength = Math.min(1, Math.abs(value) / (most || 1));
    const box = shape("rect", { ...at, "fill-opacity": (0.82 * strength).toFixed(3), "data-value": value.toFixed(4), "data-patch": n });
    if (value < 0) box.setAttribute("fill", "#0072b2");
    cells.append(box);
    if (cell >= 9 && strength > 0.12) texts.append(shape("text", { x: at.x + at.width / 2, y: at.y + at.height / 2 + 1.4 }, written(value)));
  });
  cells.addEventListener("mouseover", ({ target: { dataset } }) => {
    if (dataset.patch) title.textContent = `${place(Number(dataset.patch))}: ${written(values[dataset.patch])}${suffix}`;
  });
  cells.append(title);
  drawing.append(cells, texts);
  return drawing;
}

function drawClass() {
  const k = state.class;
  const parts = [];
  const members = Array.from({ length: count }, (_, b) => b).filter((b) => classOf(b) === k);
  const examples = members.sort((a, b) => wrong(b) - wrong(a) || certainty(b) - certainty(a));
  const wrongs = examples.filter(wrong);
  const right = examples.filter((b) => !wrong(b));
  if (layer().kind === "channel") parts.push(...classGates(k));
  else if (isMap()) {
    const background = `mean-${data.present.indexOf(k)}`;
    const summed = classValues(k, null);
    const experts = Array.from({ length: layer().experts }, (_, e) => e);
    const values = experts.map((e) => classValues(k, e));
    const most = Math.max(...values.flat().map(Math.abs), 1e-9);
    const name = data.classes[k];
    parts.push(element("div", { class: "evidence" },
      element("figure", {}, drawMap(summed, Math.max(...summed), { title: `Mean total gate of each ${unit()} in images of ${name}`, background, kind: "total" }),
        element("figcaption", {}, element("strong", {}, "All experts: "), `the mean of the gates that a ${unit()} gets in an image of “${name}”. The background is the mean image of the class.`), ...prefixShares(data.present.indexOf(k))),
      element("div", {}, element("h3", {}, "Examples"), exampleRow("wrong", wrongs.slice(0, 6)), exampleRow(wrongs.length ? "correct" : "", right.slice(0, 6)))));
    parts.push(element("p", { class: "soft" }, {
      share: `How often each expert selects a ${unit()}, in percent of the images of “${name}”; the strongest colour is ${percent(most)}.`,
      difference: `Percentage points by which an expert selects a ${unit()} more often (orange) or less often (blue) in images of “${name}” than in those of the other classes; the strongest colour is ${Math.round(100 * most)}.`,
      gate: `The mean gate of a ${unit()} in the images of “${name}” in which the expert selects it, from 5 % of the images on; the strongest colour is ${brief(most)}.`,
    }[state.map]));
    parts.push(element("div", { class: "maps" }, ...experts.map((e) => element("figure", {},
      drawMap(values[e], most, { title: `Expert ${e}, ${name}, ${CLASS_MAPS[state.map]}`, expert: e, background, kind: state.map }),
      element("figcaption", {}, swatch(e), `expert ${e}`)))));
  } else {
    parts.push(...classDispatch(k));
  }
  if (layer().kind === "channel" || !isMap()) {
    parts.push(element("h3", {}, "Examples"), exampleRow("wrong", wrongs.slice(0, 8)), exampleRow(wrongs.length ? "correct" : "", right.slice(0, 8)));
  }
  find("class").replaceChildren(...parts.filter(Boolean));
}

// the experts that get the tokens without a place, in images of a class
function prefixShares(row) {
  return Array.from({ length: layer().chooser === "soft" ? 0 : layer().prefix }, (_, n) => {
    const shares = Array.from({ length: layer().experts }, (_e, e) => number(routed().share, cellOf(row, e, n - layer().prefix)));
    const most = shares.map((share, e) => ({ share, e })).filter(({ share }) => share > 0.005).sort((a, b) => b.share - a.share || a.e - b.e).slice(0, 4);
    return element("p", { class: "prefix" }, element("strong", {}, `${capital(tokenName(n))}: `), most.map(({ share, e }) => `expert ${e} in ${percent(share)} of the images`).join(", ") || "no expert");
  });
}

function exampleRow(title, images) {
  if (!images.length) return null;
  const shown = images.map((b) => {
    const picture = element("img", { src: address(`image-${b}`), alt: "" });
    return element("button", { type: "button", class: `example${wrong(b) ? " wrong" : ""}`, title: sentence(b), "aria-label": `${sentence(b)}. Open this image`, onclick: () => open(b, null) }, picture);
  });
  return element("div", { class: "examples" }, title ? element("p", { class: "soft" }, title) : null, element("div", {}, ...shown));
}
