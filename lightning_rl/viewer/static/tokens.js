// Tokens in colour: what is trained, and what sampler and trainer said of each; the numbers of one under the pointer.

import { h, number, signed, plainText } from "./dom.js";

export const COLOURINGS = [
  ["text", "plain text"], ["mask", "loss mask"], ["advantage", "advantage"], ["logprob", "logprob of the sampler"],
  ["trainer", "logprob of the trainer"], ["difference", "trainer − sampler"], ["ratio", "ratio trainer / sampler"],
  ["entropy", "entropy"], ["version", "policy version"],
];
const STRONGEST = 0.6; // of a colour behind a token: its text stays legible, 4.5 to 1, in light and dark
const DIVERGING = new Set(["advantage", "difference", "ratio"]);

export function tokenValues(sampled, by) {
  const both = (fold) => sampled.logprob.map((logprob, index) => (logprob === null || sampled.trainer[index] === null ? null : fold(sampled.trainer[index] - logprob)));
  if (by === "difference") return both((gap) => gap);
  if (by === "ratio") return both((gap) => Math.exp(gap));
  return sampled[by] ?? sampled.id.map(() => null);
}

// The scale of a colouring: from where to where its colours go, clipped at percentiles so that one token hides no other.
export function scaleOf(values, by) {
  const known = values.filter((value) => value !== null && Number.isFinite(value)).map((value) => (by === "ratio" ? Math.log(value) : value));
  if (!known.length) return null;
  const sorted = known.map(Math.abs).sort((a, b) => a - b);
  const most = sorted[Math.min(Math.floor(sorted.length * 0.98), sorted.length - 1)];
  return { most: most || sorted.at(-1) || 1e-12, clipped: sorted.at(-1) > most && most > 0 };
}

function colourOf(value, by, scale, versions) {
  if (value === null || value === undefined) return null;
  if (by === "mask") return value ? "var(--trained)" : null;
  if (by === "version") return `var(--version-${versions.indexOf(value) % 6})`;
  if (!scale) return null;
  const size = by === "ratio" ? Math.log(value) : value;
  const share = Math.min(Math.abs(size) / scale.most, 1);
  const hue = DIVERGING.has(by) ? (size >= 0 ? "--above" : "--below") : "--strength";
  return share < 0.01 ? null : `rgb(var(${hue}) / ${(share * STRONGEST).toFixed(3)})`;
}

export function tokenBlock(columns, by, { scale = null, versions = [], picked = null, onpick = null } = {}) {
  const { prompt, sampled } = columns;
  const values = tokenValues(sampled, by), own = scale ?? scaleOf(values, by);
  const told = h("output", { class: "token-told" });
  const block = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": `tokens, coloured by ${by}; arrow keys tell each` });
  if (prompt.total > prompt.id.length && columns.start === 0) block.append(h("span", { class: "note" }, `${number(prompt.total - prompt.id.length)} tokens before `));
  prompt.id.forEach((id, index) => block.append(token(prompt.text[index] ?? `⟨${id}⟩`, "context")));
  const spans = sampled.id.map((id, index) => {
    const one = token(sampled.text[index] ?? `⟨${id}⟩`, sampled.mask[index] ? "sampled" : "sampled untrained");
    one.dataset.place = String(index);
    const colour = colourOf(values[index], by, own, versions);
    if (colour) one.style.backgroundColor = colour;
    block.append(one);
    return one;
  });
  let at = -1;
  const pick = (index) => {
    if (index < 0 || index >= spans.length) return;
    spans[at]?.classList.remove("picked");
    at = index;
    spans[at].classList.add("picked");
    told.textContent = tokenNumbers(columns, at);
  };
  const placeOf = (event) => { const found = event.target.closest?.("[data-place]"); return found ? Number(found.dataset.place) : -1; };
  block.addEventListener("pointerover", (event) => pick(placeOf(event)));
  block.addEventListener("click", (event) => { const place = placeOf(event); if (place >= 0) onpick?.(columns.start + place); });
  block.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    pick(Math.max(0, Math.min(spans.length - 1, at + step)));
  });
  if (picked !== null && picked >= columns.start) pick(picked - columns.start);
  return h("div", { class: "token-block" }, block, told);
}

function token(text, kind) {
  const shown = plainText(text).replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
  const special = /^<[|\w/][^ ]*>$/.test(text) ? " special" : "";
  return h("span", { class: `token ${kind}${special}` }, shown === "" ? "·" : shown);
}

export function tokenNumbers(columns, index) {
  const { sampled, start } = columns, parts = [`token ${start + index}`, `id ${sampled.id[index]}`, sampled.mask[index] ? "trained" : "not trained"];
  const add = (label, value) => { if (value !== null && value !== undefined) parts.push(`${label} ${value}`); };
  const logprob = sampled.logprob[index], trainer = sampled.trainer[index];
  add("sampler", logprob === null ? null : `${number(logprob, 4)} (p ${number(Math.exp(logprob), 4)})`);
  add("trainer", trainer === null ? null : number(trainer, 4));
  if (logprob !== null && trainer !== null) {
    add("difference", signed(trainer - logprob, 4));
    add("ratio", number(Math.exp(trainer - logprob), 4));
  }
  add("advantage", sampled.advantage[index] === null ? null : signed(sampled.advantage[index]));
  add("entropy", sampled.entropy?.[index] === undefined || sampled.entropy[index] === null ? null : number(sampled.entropy[index], 4));
  add("policy version", sampled.version[index]);
  return parts.join(" · ");
}

export function tokenLegend(by, scale, versions, known) {
  if (by === "text") return null;
  if (!known) return h("span", { class: "legend" }, by === "entropy" ? "this run recorded no entropy of single tokens" : "no token here has this number: it was not trained, or its engine gave none");
  if (by === "mask") return h("span", { class: "legend" }, h("i", { class: "swatch trained" }), "trained", h("i", { class: "swatch untrained" }), "sampled, not trained", h("i", { class: "swatch" }), "context");
  if (by === "version") return h("span", { class: "legend" }, versions.map((version, index) => [h("i", { class: "swatch", style: { backgroundColor: `var(--version-${index % 6})` } }), `version ${version}`]));
  if (!scale) return null;
  const ends = by === "ratio" ? [number(Math.exp(-scale.most), 4), number(Math.exp(scale.most), 4)] : DIVERGING.has(by) ? [signed(-scale.most), signed(scale.most)] : ["0", number(by === "logprob" || by === "trainer" ? -scale.most : scale.most)];
  return h("span", { class: "legend" }, ends[0], h("i", { class: `ramp ${DIVERGING.has(by) ? "diverging" : ""}` }), ends[1], scale.clipped ? "clipped at the 98th percentile" : null);
}
