// Dispatch of samples: the share of each class that each expert gets.

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
