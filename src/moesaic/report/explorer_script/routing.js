// Numbers of the page: selections, gates and predictions of images.

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
