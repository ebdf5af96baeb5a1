// Diagrams: a page that has some loads mermaid, from beside this file, which draws them in the colours of the theme.
const MERMAID = new URL("mermaid.min.js", document.currentScript.src);

const loaded = () => new Promise((resolve, reject) => {
  document.head.append(Object.assign(document.createElement("script"), { src: MERMAID, onload: resolve, onerror: reject }));
});

async function draw(sources) {
  const dark = document.body.dataset.mdColorScheme === "slate";
  mermaid.initialize({ startOnLoad: false, theme: dark ? "dark" : "neutral", flowchart: { useMaxWidth: false } });
  for (const [index, [place, source]] of sources.entries()) {
    const { svg } = await mermaid.render(`diagram-${index}`, source);
    place.innerHTML = svg; // the source is a page's of the project
  }
}

document.addEventListener("DOMContentLoaded", async () => {
  const blocks = [...document.querySelectorAll("pre.diagram")];
  if (!blocks.length) return;
  await loaded();
  const sources = blocks.map((block) => {
    const place = Object.assign(document.createElement("div"), { className: "diagram" });
    place.addEventListener("click", () => place.classList.toggle("large"));
    block.replaceWith(place);
    return [place, block.textContent];
  });
  await draw(sources);
  const scheme = { attributes: true, attributeFilter: ["data-md-color-scheme"] };
  new MutationObserver(() => draw(sources)).observe(document.body, scheme);
});
