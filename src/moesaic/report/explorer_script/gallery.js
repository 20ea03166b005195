// The list of images: search, order, thumbnails, selection by mouse and keyboard.

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
