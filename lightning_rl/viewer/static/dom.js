// Elements from data. Every text becomes a text node: nothing that an agent wrote is ever read as HTML.

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

export function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value" && "value" in element) element.value = value;
    else if (name === "href" && !/^#/.test(value)) continue; // links lead to places of this page alone
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function replaced(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(Math.max(digits - 2, 1));
  return value.toFixed(size >= 100 ? 1 : digits);
}

export function signed(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : value < 0 ? "−" : "") + number(Math.abs(value), digits);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function shortId(id) {
  const dot = (id ?? "").lastIndexOf(".");
  return dot > 0 ? id.slice(0, dot) : id ?? "–";
}

// Characters that turn or hide text around them are shown as what they are.
export function plainText(text) {
  return String(text ?? "").replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]/g,
    (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

export function taskText(task) {
  let value = task;
  if (typeof value === "string") {
    try { value = JSON.parse(value); } catch { return plainText(value); }
  }
  if (value && typeof value === "object" && !Array.isArray(value)) {
    const asked = ["question", "q", "prompt", "input", "task", "query"].map((name) => value[name]).find((one) => typeof one === "string");
    if (asked) return plainText(asked);
  }
  return plainText(typeof value === "string" ? value : JSON.stringify(value));
}

const METRIC_NAMES = {
  "critic/score/mean": "reward", "val/reward": "held-out reward", "tune/reward": "tuning reward", "actor/entropy": "entropy",
  "response_length/mean": "sampled tokens of a rollout", "num_turns/mean": "calls of a rollout", "actor/ppo_kl": "KL of the update", "actor/grad_norm": "gradient norm",
  "training/rollout_probs_diff_mean": "distance of sampler and trainer", "actor/pg_clipfrac": "share of clipped tokens", "timing_s/step": "seconds of a step", "perf/tokens_per_s": "tokens a second",
};

export function metricName(name) {
  return name in METRIC_NAMES ? `${METRIC_NAMES[name]} (${name})` : name;
}

export function chip(text, kind, title) {
  return h("span", { class: `chip ${kind ?? ""}`, title }, text);
}

export function copyButton(label, text) {
  const button = h("button", { type: "button", class: "quiet", onclick: async () => {
    const value = await text();
    let done = true;
    try { await navigator.clipboard.writeText(value); } catch { done = copiedBySelection(value); }
    button.textContent = done ? "copied" : "not copied";
    setTimeout(() => { button.textContent = label; }, 1200);
  } }, label);
  return button;
}

function copiedBySelection(value) {
  const field = h("textarea", { class: "offscreen" });
  field.value = value;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

export function empty(...words) {
  return h("p", { class: "empty" }, words);
}

export function select(label, options, chosen, changed, kind = "") {
  const field = h("select", { "aria-label": label, class: kind, onchange: () => changed(field.value) },
    options.map(([value, text]) => h("option", { value, selected: String(value) === String(chosen ?? "") }, text ?? value)));
  return h("label", { class: "field" }, h("span", {}, label), field);
}
