// Pictures and parts of them: patches, crops and colours of experts.

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

function topPatch(each, expert, size) {
  const [image, patch, score, gate] = each;
  const about = `${sentence(image)}; ${place(patch)}, score ${brief(score)}, gate ${brief(gate)}`;
  return element("button", {
    type: "button", class: "crop", title: about, "aria-label": `Expert ${expert}, ${about}. Open this image`,
    onclick: () => open(image, patch),
  }, crop({ image, patch, expert }, size), element("span", { "aria-hidden": "true" }, data.classes[classOf(image)]));
}
