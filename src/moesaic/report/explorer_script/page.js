// The data of the page, what its controls are set to, and the elements that are made from both.
// All data are in the page: numbers in #explorer-data, the files of images in #image-0, #image-1, …
// Text is set as text, never as markup, and colours that stand for values are the same in both themes.

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
