// A call as a conversation: what was said to the model, what it answered, its tools, its reasoning, its images.

import { h, chip, number, plainText, replaced } from "./dom.js";
import { ask, ofRun } from "./data.js";

const FOLDED_LINES = 24;

export function messageBlock(message, where, { answer = false } = {}) {
  const role = plainText(message.role ?? "?");
  const parts = [];
  const reasoning = message.reasoning_content ?? message.reasoning ?? message.thinking;
  if (reasoning) parts.push(h("details", { class: "reasoning", open: true }, h("summary", {}, "reasoning"), textBlock(asText(reasoning))));
  parts.push(...contentBlocks(message.content, where));
  for (const call of message.tool_calls ?? []) parts.push(toolCall(call.function ?? call, call.id));
  if (message.refusal) parts.push(textBlock(message.refusal));
  if (!parts.length) parts.push(h("span", { class: "note" }, "(says nothing)"));
  const name = message.name ?? message.tool_call_id;
  return h("div", { class: `message ${answer ? "answer" : ""} role-${/^[a-z]+$/.test(role) ? role : "other"}` },
    h("div", { class: "role" }, answer && role === "assistant" ? "model" : role, name ? h("span", { class: "note" }, ` ${plainText(name)}`) : null), h("div", { class: "said" }, parts));
}

function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1);
}

function contentBlocks(content, where) {
  if (content === null || content === undefined || content === "") return [];
  if (typeof content === "string") return [textBlock(content)];
  if (!Array.isArray(content)) return [textBlock(JSON.stringify(content, null, 1))];
  return content.map((part) => {
    if (part?.type === "image_url" || part?.type === "image" || part?.image_url) return imageBlock(part, where);
    if (part?.type === "tool_use") return toolCall({ name: part.name, arguments: part.input }, part.id);
    if (part?.type === "thinking" || part?.type === "reasoning") return h("details", { class: "reasoning", open: true }, h("summary", {}, "reasoning"), textBlock(asText(part.thinking ?? part.text ?? part)));
    if (typeof part?.text === "string") return textBlock(part.text);
    return textBlock(JSON.stringify(part, null, 1));
  });
}

function textBlock(text) {
  const said = h("div", { class: "text" }, plainText(text));
  if (String(text).split("\n").length <= FOLDED_LINES && text.length < 4000) return said;
  said.classList.add("folded");
  const button = h("button", { type: "button", class: "quiet", onclick: () => {
    const folded = said.classList.toggle("folded");
    button.textContent = folded ? `all ${number(text.length)} characters` : "less";
  } }, `all ${number(text.length)} characters`);
  return h("div", {}, said, button);
}

function toolCall(call, id) {
  let written = call.arguments;
  if (typeof written === "string") { try { written = JSON.parse(written); } catch { /* shown as it was sampled */ } }
  const body = typeof written === "string" ? written : JSON.stringify(written, null, 1);
  return h("div", { class: "tool-call" }, h("div", { class: "tool-name" }, chip("tool call", "info"), " ", plainText(call.name ?? "?"), id ? h("span", { class: "note" }, ` ${plainText(id)}`) : null), h("div", { class: "text mono" }, plainText(body ?? "")));
}

// Images come as `data:` URLs of raster formats, made on the server from recorded bytes; a URL of an agent's is only named.
function imageBlock(part, where) {
  const url = String(part.image_url?.url ?? part.image_url ?? part.source?.url ?? "");
  const digest = /^sha256:([0-9a-f]{64})$/.exec(url)?.[1];
  if (!digest || !where) return h("div", { class: "text note" }, `image: ${plainText(url).slice(0, 200) || "(no address)"}`);
  const place = h("div", { class: "image" }, h("span", { class: "note" }, "image…"));
  ask(ofRun(where.run, `rollouts/${encodeURIComponent(where.rollout)}/images/${digest}`)).then(
    (data) => {
      if (!/^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/.test(data)) throw new Error("not a raster image");
      replaced(place, h("img", { src: data, alt: `image ${digest.slice(0, 8)} that the model was shown`, loading: "lazy" }));
    },
  ).catch((error) => replaced(place, h("span", { class: "note" }, `image ${digest.slice(0, 8)}: ${error.message}`)));
  return place;
}

export function answerText(call) {
  const first = call.answer?.[0];
  if (!first) return "";
  const calls = (first.tool_calls ?? []).map((each) => `${each.function?.name}(${each.function?.arguments})`);
  return [typeof first.content === "string" ? first.content : first.content ? JSON.stringify(first.content) : "", ...calls].filter(Boolean).join("\n");
}

// Which words of two texts are the same, by their longest common subsequence.
export function wordDifference(before, after) {
  const a = before.split(/(\s+)/).slice(0, 600), b = after.split(/(\s+)/).slice(0, 600);
  const table = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) for (let j = b.length - 1; j >= 0; j -= 1) table[i][j] = a[i] === b[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
  const left = [], right = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { left.push([a[i], true]); right.push([b[j], true]); i += 1; j += 1; }
    else if (j >= b.length || (i < a.length && table[i + 1][j] >= table[i][j + 1])) { left.push([a[i], false]); i += 1; }
    else { right.push([b[j], false]); j += 1; }
  }
  return [left, right];
}

export function marked(words, kind) {
  return h("div", { class: "text" }, words.map(([word, same]) => (same || !word.trim() ? plainText(word) : h("mark", { class: kind }, plainText(word)))));
}
