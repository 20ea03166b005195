// The routing explorer: images with their selected patches, classes, experts, dispatch and channel gates.
// All data are in the page: numbers in #explorer-data, the files of images in #image-0, #image-1, …
// Text is set as text, never as markup, and colours that stand for values are the same in both themes.
"use strict";
(() => {
const data = JSON.parse(document.getElementById("explorer-data").textContent);
const root = document.getElementById("explorer");
const find = (name) => root.querySelector(`[data-part="${name}"]`);
const count = data.images.name.length;
const VEIL = "#14171a";
const OPEN = [11, 79, 138], CLOSED = [255, 255, 255];

const state = {
  view: "images", layer: 0, checkpoint: data.checkpoints.length - 1, image: 0, patch: null, pinned: false,
  hidden: new Set(), least: -Infinity, shade: false, expert: 0, class: data.present[0], map: "share",
  order: "", filter: "", verdict: "", source: "", search: "",
};

// ---------------------------------------------------------------- elements

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "style") made.style.cssText = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function shape(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const percent = (share) => {
  const value = 100 * share;
  if ((value > 0.5 && value < 99.5) || value === 0 || value === 100) return `${Math.round(value)}\u00a0%`;
  return value >= 0.1 ? `${Math.min(value, 99.9).toFixed(1)}\u00a0%` : "below 0.1\u00a0%";
};
const brief = (value) => (Math.abs(value) >= 0.01 || value === 0 ? value.toFixed(2) : value.toExponential(0));
const plural = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

// ---------------------------------------------------------------- numbers

function bytes(text) {
  const letters = atob(text);
  const made = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) made[i] = letters.charCodeAt(i);
  return made;
}

const unpacked = new Map();
function unpack(packed) {
  if (!unpacked.has(packed)) {
    const raw = bytes(packed.data);
    unpacked.set(packed, packed.bits === 16 ? new Uint16Array(raw.buffer) : raw);
  }
  return unpacked.get(packed);
}
const number = (packed, i) => {
  const steps = packed.bits === 16 ? 65535 : 255;
  return packed.least + (unpack(packed)[i] * (packed.most - packed.least)) / steps;
};

const layer = () => data.layers[state.layer];
const checkpoint = () => data.checkpoints[state.checkpoint];
const routed = () => checkpoint().layers[state.layer];
const unit = () => layer().unit;  // patch, token or sample
const units = () => (unit() === "patch" ? "patches" : `${unit()}s`);
const capital = (text) => text[0].toUpperCase() + text.slice(1);
// units in the arrays of a layer: first those without a place on the grid, such as the class token
const total = () => layer().units + layer().prefix;

// the experts and units of an image: [{expert, patch, gate}]; those without a place are below 0
function routes(b) {
  const { chooser, experts, prefix } = layer();
  const found = [];
  if (chooser === "soft") {
    const weight = routed().gate;
    for (let n = 0; n < total(); n += 1) {
      for (let e = 0; e < experts; e += 1) {
        const gate = number(weight, (b * total() + n) * experts + e);
        if (gate * total() > 1) found.push({ expert: e, patch: n - prefix, gate });
      }
    }
    return found;
  }
  const index = unpack(routed().index);
  const none = 2 ** routed().index.bits - 1;
  const [rows, places] = routed().shape;
  for (let row = 0; row < rows; row += 1) {
    for (let place = 0; place < places; place += 1) {
      const at = (b * rows + row) * places + place;
      if (index[at] === none) continue;
      const [expert, patch] = chooser === "expert" ? [row, index[at]] : [index[at], row];
      found.push({ expert, patch: patch - prefix, gate: number(routed().gate, at) });
    }
  }
  return found;
}
const selections = (b) => routes(b).filter(({ patch }) => patch >= 0);
const tokenName = (n) => (layer().prefix === 1 ? "class token" : `prefix token ${n + 1}`);

const label = (b) => data.images.label[b];
const predicted = (b) => checkpoint().top[b][0][0];
const certainty = (b) => checkpoint().top[b][0][1];
const wrong = (b) => label(b) >= 0 && label(b) !== predicted(b);
const classOf = (b) => (label(b) >= 0 ? label(b) : predicted(b));
const sentence = (b) => {
  const truth = label(b) < 0 ? "" : wrong(b) ? `, wrong: true class ${data.classes[label(b)]}` : ", correct";
  return `${data.images.name[b]}: predicted ${data.classes[predicted(b)]}, ${percent(certainty(b))}${truth}`;
};
const place = (n) => `row ${Math.floor(n / layer().grid[1]) + 1}, column ${(n % layer().grid[1]) + 1}`;

// ---------------------------------------------------------------- pictures

const addresses = new Map();
function address(name) {
  if (!addresses.has(name)) {
    const type = document.getElementById(name).dataset.type;
    const file = new Blob([bytes(document.getElementById(name).textContent)], { type });
    addresses.set(name, URL.createObjectURL(file));
  }
  return addresses.get(name);
}

const decoded = new Map();
function decode(b) {
  if (!decoded.has(b)) {
    const image = new Image();
    image.src = address(`image-${b}`);
    decoded.set(b, image.decode().then(() => image));
  }
  return decoded.get(b);
}

// the network sees the largest centred square of an image
function square(b) {
  const [width, height] = data.images.size[b];
  const side = Math.min(width, height);
  return { x: (width - side) / 2, y: (height - side) / 2, side };
}

// the rectangle of a patch, in pixels of the picture
function rectangle(n, { x, y, side }, { grid, filled }) {
  const [tall, wide] = [side / filled[0], side / filled[1]];
  const [row, column] = [Math.floor(n / grid[1]), n % grid[1]];
  return {
    x: x + column * wide, y: y + row * tall,
    width: Math.min(wide, side - column * wide), height: Math.min(tall, side - row * tall),
  };
}

const colour = (expert) => data.colours[expert % data.colours.length];
const dash = (expert) => data.dashes[Math.floor(expert / data.colours.length) % data.dashes.length];
// black or white, whichever is legible on a colour (WCAG's relative luminance)
const ink = (rgb) => {
  const [red, green, blue] = rgb.map((part) => (part <= 10 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
};
const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

// a patch with its surroundings, which are veiled
function crop({ image, patch, expert }, size) {
  const canvas = element("canvas", { width: size, height: size, "aria-hidden": "true" });
  const own = layer();
  const seen = square(image);
  const inner = rectangle(patch, seen, own);
  const around = Math.max(inner.width / 2, inner.height / 2, seen.side / 10);
  const side = Math.min(Math.max(inner.width, inner.height) + 2 * around, seen.side);
  const left = Math.min(Math.max(inner.x + inner.width / 2 - side / 2, seen.x), seen.x + seen.side - side);
  const top = Math.min(Math.max(inner.y + inner.height / 2 - side / 2, seen.y), seen.y + seen.side - side);
  decode(image).then((picture) => {
    const pen = canvas.getContext("2d");
    const scale = size / side;
    pen.imageSmoothingEnabled = scale < 3;
    pen.drawImage(picture, left, top, side, side, 0, 0, size, size);
    const frame = [(inner.x - left) * scale, (inner.y - top) * scale, inner.width * scale, inner.height * scale];
    const veil = new Path2D();
    veil.rect(0, 0, size, size);
    veil.rect(...frame);
    pen.fillStyle = "rgba(20, 23, 26, 0.45)";
    pen.fill(veil, "evenodd");
    for (const [style, width] of [["#ffffff", size / 22], [colour(expert), size / 32]]) {
      pen.strokeStyle = style;
      pen.lineWidth = width;
      if (style !== "#ffffff") pen.setLineDash(dash(expert).map((part) => part * width));
      pen.strokeRect(...frame);
    }
  }, () => {});
  return canvas;
}

function favourite(each, expert, size) {
  const [image, patch, score, gate] = each;
  const about = `${sentence(image)}; ${place(patch)}, score ${brief(score)}, gate ${brief(gate)}`;
  return element("button", {
    type: "button", class: "crop", title: about, "aria-label": `Expert ${expert}, ${about}. Open this image`,
    onclick: () => open(image, patch),
  }, crop({ image, patch, expert }, size), element("span", { "aria-hidden": "true" }, data.classes[classOf(image)]));
}

// ---------------------------------------------------------------- the list of images

const ORDERS = {
  mistakes: (a, b) => own(b) - own(a) || wrong(b) - wrong(a) || (wrong(a) ? certainty(b) - certainty(a) : certainty(a) - certainty(b)),
  class: (a, b) => classOf(a) - classOf(b) || wrong(b) - wrong(a) || a - b,
  uncertain: (a, b) => certainty(a) - certainty(b),
  certain: (a, b) => certainty(b) - certainty(a),
  cheap: (a, b) => checkpoint().cost[a] - checkpoint().cost[b],
  expensive: (a, b) => checkpoint().cost[b] - checkpoint().cost[a],
  given: (a, b) => a - b,
};
const own = (b) => (b < data.images.own ? 1 : 0);

function matching() {
  const asked = state.search.toLowerCase();
  return Array.from({ length: count }, (_, b) => b)
    .filter((b) => !state.filter || classOf(b) === Number(state.filter))
    .filter((b) => !state.verdict || (label(b) >= 0 && wrong(b) === (state.verdict === "wrong")))
    .filter((b) => !state.source || own(b) === Number(state.source))
    .filter((b) => !asked || data.images.name[b].toLowerCase().includes(asked))
    .sort((a, b) => ORDERS[state.order](a, b) || a - b);
}

const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    target.src = address(`image-${target.dataset.image}`);
    watcher.unobserve(target);
  }
}, { root: find("gallery"), rootMargin: "300px" });

// The list has as many thumbnails as were scrolled to: a thousand of them make every click slow.
const thumbnails = new Map();
const CHUNK = 72;
function thumbnail(b) {
  if (!thumbnails.has(b)) {
    const small = Math.max(...data.images.size[b]) < 100;
    const image = element("img", { alt: "", "data-image": b, class: small ? "small" : null });
    thumbnails.set(b, element("div", { role: "option", class: "thumbnail", "data-image": b, id: `option-${b}` }, image));
    watcher.observe(image);
  }
  const option = thumbnails.get(b);
  option.classList.toggle("wrong", wrong(b));
  option.setAttribute("aria-label", sentence(b));
  option.title = sentence(b);
  return option;
}

let listed = [];
const gallery = find("gallery");
// adds thumbnails to the list, up to this number
function extend(to) {
  const from = gallery.childElementCount;
  const added = listed.slice(from, to).map((b, i) => {
    const option = thumbnail(b);
    option.setAttribute("aria-posinset", from + i + 1);
    option.setAttribute("aria-setsize", listed.length);
    setSelected(option, b === state.image);
    return option;
  });
  gallery.append(...added);
}
function fill() {
  const near = gallery.scrollTop + gallery.clientHeight > gallery.scrollHeight - 300;
  if (gallery.clientHeight && near && gallery.childElementCount < listed.length) {
    extend(gallery.childElementCount + CHUNK);
    requestAnimationFrame(fill);
  }
}
gallery.addEventListener("scroll", fill, { passive: true });
new ResizeObserver(fill).observe(gallery);

function list() {
  listed = matching();
  if (listed.length && !listed.includes(state.image)) state.image = listed[0];
  gallery.scrollTop = 0;
  gallery.replaceChildren();
  extend(Math.max(CHUNK, listed.indexOf(state.image) + 1));
  marked = state.image;
  const wrongs = listed.filter(wrong).length;
  const images = listed.length === count ? plural(count, "image") : `${listed.length.toLocaleString("en")} of ${plural(count, "image")}`;
  find("count").textContent = `${images}${data.labelled ? `, ${wrongs.toLocaleString("en")} wrong` : ""}`;
  find("viewer").hidden = !listed.length;
}

let marked = null;
function setSelected(option, selected) {
  option.setAttribute("aria-selected", String(selected));
  option.tabIndex = selected ? 0 : -1;
}
function mark() {
  extend(listed.indexOf(state.image) + 1);
  for (const [b, selected] of [[marked, false], [state.image, true]]) {
    if (thumbnails.has(b)) setSelected(thumbnails.get(b), selected);
  }
  marked = state.image;
}

function select(b, focus) {
  state.image = b;
  state.patch = null;
  state.pinned = false;
  mark();
  if (focus) {
    const option = thumbnails.get(b);
    option.focus({ preventScroll: true });
    within(gallery, option);
  }
  drawImage();
}

// scroll a list, but not the page
function within(box, item) {
  const [outer, inner] = [box.getBoundingClientRect(), item.getBoundingClientRect()];
  if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top + 8;
  else if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + 8;
}

function step(by) {
  const at = listed.indexOf(state.image);
  const to = Math.min(Math.max(at + by, 0), listed.length - 1);
  if (to !== at) select(listed[to], false);
  within(gallery, thumbnails.get(state.image));
}

function open(b, patch) {
  if (!listed.includes(b)) {
    Object.assign(state, { filter: "", verdict: "", source: "", search: "" });
    syncControls();
    state.image = b;
    list();
  }
  show("images");
  select(b, true);
  if (patch !== null && patch !== undefined) {
    state.patch = patch;
    state.pinned = true;
    drawPatch();
  }
  find("viewer").scrollIntoView({ block: "nearest" });
}

const columns = () => {
  const options = [...gallery.children];
  const next = options.findIndex((option) => option.offsetTop > options[0].offsetTop);
  return next < 1 ? options.length : next;
};

gallery.addEventListener("click", (event) => {
  const option = event.target.closest("[data-image]");
  if (option) select(Number(option.dataset.image), true);
});
gallery.addEventListener("keydown", (event) => {
  const at = listed.indexOf(state.image);
  const wanted = {
    ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: listed.length - 1,
    ArrowDown: () => at + columns(), ArrowUp: () => at - columns(),
    PageDown: () => at + 4 * columns(), PageUp: () => at - 4 * columns(),
  }[event.key];
  if (wanted === undefined) return;
  event.preventDefault();
  const to = Math.min(Math.max(typeof wanted === "function" ? wanted() : wanted, 0), listed.length - 1);
  select(listed[to], true);
});

// ---------------------------------------------------------------- one image

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

// the favourites of an expert that are most similar to a patch; without features, those with the highest scores
function nearest(expert, b, n) {
  const liked = routed().top[expert].filter(([image]) => image !== b).slice(0, data.favourites);
  const packed = routed().features;
  if (!packed) return liked.slice(0, 6);
  const all = unpack(packed);
  const at = (image, patch) => (image * layer().units + patch) * packed.count;
  const far = ([image, patch]) => {
    let sum = 0;
    for (let i = 0; i < packed.count; i += 1) sum += (all[at(image, patch) + i] - all[at(b, n) + i]) ** 2;
    return sum;
  };
  return liked.map((each) => ({ each, distance: far(each) })).sort((x, y) => x.distance - y.distance).slice(0, 6).map(({ each }) => each);
}

function drawPatch() {
  const panel = find("patch");
  if (!panel) return;
  for (const each of find("targets").children) each.classList.toggle("current", Number(each.dataset.patch) === state.patch);
  if (!isMap()) return panel.replaceChildren();
  const here = state.patch === null ? [] : selections(state.patch === null ? 0 : state.image).filter(({ patch, expert }) => patch === state.patch && !state.hidden.has(expert));
  if (!here.length) {
    return panel.replaceChildren(element("p", { class: "soft" }, `Point at a framed ${unit()}, or move to it with the arrow keys: of the ${units()} that its experts like best in other images, those most similar to it appear here. A click keeps them.`));
  }
  panel.replaceChildren(element("h3", {}, `${capital(unit())} in ${place(state.patch)}`), ...here.map(({ expert, gate }) => {
    const liked = nearest(expert, state.image, state.patch);
    return element("div", { class: "liked" },
      element("p", {}, swatch(expert), element("strong", {}, `expert ${expert}`), ` gate ${brief(gate)}. ${routed().features ? "Its nearest favourites in other images:" : "It likes best elsewhere:"}`),
      element("div", { class: "crops" }, ...liked.map((each) => favourite(each, expert, 112))));
  }), routed().features ? element("p", { class: "soft" }, `Favourites are the ${data.favourites} ${units()} with an expert's highest scores, one of an image; the nearest are those whose features in front of this layer are most similar (Euclidean distance of ${plural(routed().features.count, "principal component")}).`) : "");
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

// ---------------------------------------------------------------- maps of classes

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

// ---------------------------------------------------------------- experts

function drawExpertView() {
  const e = state.expert;
  const facts = layer().facts?.[e] ?? [];
  const parts = [element("dl", { class: "facts" }, ...facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]))];
  const liked = (routed().top?.[e] ?? []).slice(0, data.top_patches);
  if (isMap()) {
    const mean = Array.from({ length: layer().units }, (_, n) => data.present.reduce((sum, _k, r) => sum + data.present_share[r] * number(routed().share, cellOf(r, e, n)), 0));
    parts.unshift(element("figure", { class: "where" }, drawMap(mean, Math.max(...mean), { title: `Expert ${e}, all classes, share of images`, expert: e, background: null, kind: "share" }),
      element("figcaption", {}, `How often it selects each ${unit()}, in percent of all images.`)));
    const box = element("div", { class: "about" }, ...parts);
    const crops = liked.length ? element("div", { class: "crops large" }, ...liked.map((each) => favourite(each, e, 224))) : element("p", {}, `It selects no ${unit()} of these images.`);
    find("expert").replaceChildren(box, element("h3", {}, `The ${units()} with its highest scores, at most one of each image`), crops);
  } else {
    const gateOf = (b) => Math.max(...routes(b).filter(({ expert }) => expert === e).map(({ gate }) => gate));
    const mine = Array.from({ length: count }, (_, b) => ({ b, gate: gateOf(b) }))
      .filter(({ gate }) => gate > -Infinity).sort((x, y) => y.gate - x.gate).map(({ b }) => b);
    const what = layer().kind === "token" ? "with tokens of this expert" : "of this expert";
    find("expert").replaceChildren(...parts, element("h3", {}, `${plural(mine.length, "image")} ${what}, the largest gates first`),
      exampleRow("", mine.slice(0, 24)) ?? element("p", {}, "It gets none of these images."));
  }
}

// ---------------------------------------------------------------- dispatch of samples

function dispatch(c) {
  const { experts } = layer();
  const share = c.layers[state.layer].share;
  return data.present.map((_k, r) => {
    const row = Array.from({ length: experts }, (_, e) => {
      let sum = 0;
      for (let n = 0; n < total(); n += 1) sum += number(share, (r * experts + e) * total() + n);
      return sum;
    });
    const sum = row.reduce((a, b) => a + b, 0) || 1;
    return row.map((value) => value / sum);
  });
}

function dispatchTable(c, caption) {
  const shares = dispatch(c);
  const head = element("tr", {}, element("th", { scope: "col" }, data.by === "label" ? "class" : "predicted class"), ...shares[0].map((_, e) => element("th", { scope: "col", class: "cell" }, String(e))));
  const body = data.present.map((k, r) => element("tr", {}, element("th", { scope: "row" }, data.classes[k]), ...shares[r].map((share) => heat(share))));
  return element("table", { class: "dispatch" }, element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...body));
}

// the colour of a share is the same in both themes
function heat(share) {
  const mix = CLOSED.map((low, i) => Math.round(low + share * (OPEN[i] - low)));
  return element("td", { class: "cell", style: `background:rgb(${mix.join(",")});color:${ink(mix)}`, "data-value": share.toFixed(4) }, String(Math.round(100 * share)));
}

function drawDispatch() {
  const every = data.checkpoints;
  const now = element("div", { class: "card scroll" }, dispatchTable(checkpoint(), `${every.length > 1 ? `${checkpoint().name}: ` : ""}percent of the ${layer().kind === "sample" ? "images" : "selections"} of a class that go to each expert`));
  const parts = [now];
  if (every.length > 1) {
    parts.push(element("h3", {}, "Over training"), element("div", { class: "over" }, ...every.map((c, i) => element("div", { class: i === state.checkpoint ? "now" : null }, dispatchTable(c, c.name)))));
  }
  find("dispatch").replaceChildren(...parts);
}

function classDispatch(k) {
  const row = dispatch(checkpoint())[data.present.indexOf(k)];
  return [element("p", {}, `Where the router sends the ${layer().kind === "token" ? "tokens of the images" : "images"} of “${data.classes[k]}”:`),
    element("table", { class: "bars" }, element("tbody", {}, ...row.map((share, e) => element("tr", {}, element("th", { scope: "row" }, `expert ${e}`), element("td", {}, percent(share)), element("td", { class: "bar" }, bar(share))))))];
}

// ---------------------------------------------------------------- channel gates

const isOpen = (l, b, e) => {
  const own = checkpoint().layers[l];
  return (unpack(own.open)[b * own.row + (e >> 3)] >> (7 - (e & 7))) & 1;
};
const classShare = (l, k, e) => number(checkpoint().layers[l].share, data.present.indexOf(k) * data.layers[l].experts + e);

const orders = new Map();
function gateOrder(l) {
  const key = `${l} ${state.checkpoint}`;
  if (!orders.has(key)) {
    const mean = Array.from({ length: data.layers[l].experts }, (_, e) => data.present.reduce((sum, k, r) => sum + data.present_share[r] * classShare(l, k, e), 0));
    const rank = mean.map((share) => Math.round(1e4 * share));  // numbers are packed: equal shares may differ a little
    orders.set(key, { mean, order: mean.map((_, e) => e).sort((a, b) => rank[b] - rank[a] || a - b) });
  }
  return orders.get(key);
}

// a row of gates, as wide as the page: white closed, blue open
function strip(values, title) {
  const canvas = element("canvas", { width: values.length, height: 1, class: "strip", role: "img", "aria-label": title });
  const pen = canvas.getContext("2d");
  const pixels = pen.createImageData(values.length, 1);
  values.forEach((value, i) => {
    CLOSED.forEach((low, c) => { pixels.data[4 * i + c] = Math.round(low + value * (OPEN[c] - low)); });
    pixels.data[4 * i + 3] = 255;
  });
  pen.putImageData(pixels, 0, 0);
  return canvas;
}

function gateRows(rows) {
  const [gated, parts] = [data.layers.map((_, l) => l).filter((l) => data.layers[l].kind === "channel"), []];
  for (const l of gated) {
    const { order } = gateOrder(l);
    const body = rows.map(({ name, at }) => {
      const values = order.map((e) => at(l, e));
      const share = values.reduce((a, b) => a + b, 0) / values.length;
      return element("div", { class: "row" }, element("span", {}, name), strip(values, `${name}: ${percent(share)} of the gates of ${data.layers[l].name} are open`), element("span", { class: "value" }, percent(share)));
    });
    parts.push(element("div", { class: "gates" }, element("p", {}, element("code", {}, data.layers[l].name || "the network itself"), ` ${plural(data.layers[l].experts, "gate")}`), ...body));
  }
  return parts;
}

function costRows(rows) {
  if (!checkpoint().cost) return null;
  return element("table", { class: "bars" }, element("caption", {}, "Cost in percent of the dense network's multiply-adds"),
    element("tbody", {}, ...rows.map(([name, cost]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, `${cost.toFixed(1)}\u00a0%`), element("td", { class: "bar" }, bar(cost / 100))))));
}
const meanCost = (images) => images.reduce((sum, b) => sum + checkpoint().cost[b], 0) / Math.max(1, images.length);
const everyone = Array.from({ length: count }, (_, b) => b);

function drawGates(b) {
  const k = classOf(b);
  const known = data.present.includes(k);
  const rows = [{ name: "this image", at: (l, e) => isOpen(l, b, e) }];
  if (known) rows.push({ name: "class mean", at: (l, e) => classShare(l, k, e) });
  rows.push({ name: "all images", at: (l, e) => gateOrder(l).mean[e] });
  const costs = checkpoint().cost ? [["this image", checkpoint().cost[b]], [`mean of “${data.classes[k]}”`, meanCost(everyone.filter((i) => classOf(i) === k))], ["mean of all images", meanCost(everyone)]] : [];
  find("cost")?.replaceChildren(costRows(costs) ?? "");
  find("strips").replaceChildren(...gateRows(rows));
}

function classGates(k) {
  const costs = checkpoint().cost ? [[`mean of “${data.classes[k]}”`, meanCost(everyone.filter((i) => classOf(i) === k))], ["mean of all images", meanCost(everyone)]] : [];
  return [costRows(costs), element("div", { class: "strips" }, ...gateRows([{ name: data.classes[k], at: (l, e) => classShare(l, k, e) }, { name: "all images", at: (l, e) => gateOrder(l).mean[e] }]))];
}

// ---------------------------------------------------------------- views and controls

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
})();
