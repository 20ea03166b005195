// One expert: its facts, and the patches with its highest scores.

function drawExpertView() {
  const e = state.expert;
  const facts = layer().facts?.[e] ?? [];
  const parts = [element("dl", { class: "facts" }, ...facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]))];
  const top = (routed().top?.[e] ?? []).slice(0, data.top_patches);
  if (isMap()) {
    const mean = Array.from({ length: layer().units }, (_, n) => data.present.reduce((sum, _k, r) => sum + data.present_share[r] * number(routed().share, cellOf(r, e, n)), 0));
    parts.unshift(element("figure", { class: "where" }, drawMap(mean, Math.max(...mean), { title: `Expert ${e}, all classes, share of images`, expert: e, background: null, kind: "share" }),
      element("figcaption", {}, `How often expert ${e} selects each ${unit()}, in percent of all images.`)));
    const box = element("div", { class: "about" }, ...parts);
    const crops = top.length ? element("div", { class: "crops large" }, ...top.map((each) => topPatch(each, e, 224))) : element("p", {}, `Expert ${e} selects no ${unit()} of these images.`);
    find("expert").replaceChildren(box, element("h3", {}, `The ${units()} with the highest scores of expert ${e}, at most one of each image`), crops);
  } else {
    const gateOf = (b) => Math.max(...routes(b).filter(({ expert }) => expert === e).map(({ gate }) => gate));
    const mine = Array.from({ length: count }, (_, b) => ({ b, gate: gateOf(b) }))
      .filter(({ gate }) => gate > -Infinity).sort((x, y) => y.gate - x.gate).map(({ b }) => b);
    const what = layer().kind === "token" ? "with tokens of this expert" : "of this expert";
    find("expert").replaceChildren(...parts, element("h3", {}, `${plural(mine.length, "image")} ${what}, the largest gates first`),
      exampleRow("", mine.slice(0, 24)) ?? element("p", {}, `Expert ${e} gets none of these images.`));
  }
}
