// Replaces the content of a page of moesaic view when its files change; folds stay open and the scroll position stays.
(() => {
  const wait = 2000;
  const note = document.querySelector(".live");
  const say = (text) => { note.textContent = text; note.hidden = !text; };
  const folds = () => [...document.querySelectorAll("main details")];
  const summary = (fold) => fold.querySelector("summary").textContent;

  async function replace() {
    const text = await (await fetch("/", { cache: "no-store" })).text();
    const next = new DOMParser().parseFromString(text, "text/html");
    const main = next.querySelector("main[data-version]");
    if (!main) { location.reload(); return; }
    const open = new Set(folds().filter((fold) => fold.open).map(summary));
    const focus = folds().findIndex((fold) => fold.querySelector("summary") === document.activeElement);
    document.querySelector("main").replaceWith(main);
    document.title = next.title;
    for (const fold of folds()) { if (open.has(summary(fold))) fold.open = true; }
    folds()[focus]?.querySelector("summary").focus({ preventScroll: true });
  }

  async function look() {
    const main = document.querySelector("main");
    try {
      const answer = await fetch("/version", { cache: "no-store" });
      const { version, fault } = await answer.json();
      say(fault);
      if (!fault && version !== main.dataset.version) await replace();
    } catch {
      say("moesaic view has ended: this page is no longer updated");
    }
    setTimeout(look, document.hidden ? 5 * wait : wait);
  }

  setTimeout(look, wait);
})();
