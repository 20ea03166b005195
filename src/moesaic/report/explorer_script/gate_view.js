// Channel gates of an image or a class, and their cost.

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
