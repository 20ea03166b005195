// What is wrong with a page for people who do not see it, or not well: [faults, number of texts that were looked at].
() => {
  const visible = (each) => each.checkVisibility({ visibilityProperty: true });
  const start = (each) => each.outerHTML.slice(0, 100);
  const faults = [];
  const expect = (selector, what, holds) => {
    for (const each of document.querySelectorAll(selector)) {
      if (visible(each) && !holds(each)) faults.push(`${what}: ${start(each)}`);
    }
  };
  const name = (each) => each.ariaLabel ?? each.labels?.[0]?.innerText ?? each.innerText;
  expect("button, select, input, a, summary, [role=option], [role=tab]", "no name", (each) => name(each).trim());
  expect("img", "no alternative text", (each) => each.hasAttribute("alt"));
  expect("[role=img], [role=listbox], [role=tablist], [role=group]", "no label", (each) => each.ariaLabel);
  expect("[tabindex]", "out of order", (each) => each.tabIndex <= 0);

  const linear = (part) => (part <= 10 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = (colour) => {
    const [red, green, blue] = colour.match(/[\d.]+/g).map(Number).map(linear);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = (each) => {
    for (let box = each; box; box = box.parentElement) {
      const colour = getComputedStyle(box).backgroundColor;
      if (!/^rgba\(.*, 0\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const hasText = (each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const texts = [...document.querySelectorAll("main *")].filter((each) => !each.closest("svg") && hasText(each) && visible(each));
  for (const each of texts) {
    const [low, high] = [luminance(getComputedStyle(each).color), luminance(ground(each))].sort((a, b) => a - b);
    if ((high + 0.05) / (low + 0.05) < 4.5) faults.push(`contrast: ${start(each)}`);
  }
  return [faults, texts.length];
}
