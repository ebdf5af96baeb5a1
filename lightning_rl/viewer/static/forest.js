// An attempt's forest as a picture, and the time it took: which call continues which, where it forked and why, who worked when.

import { h, s, chip, duration, number, plainText, signed } from "./dom.js";

const NODE = { width: 112, height: 36, right: 34, below: 12 };
const MOST_LANES = 400; // of a waterfall

const CAUSES = {
  new_conversation: "a new conversation (a sub-agent, a title): nothing went wrong",
  edited_text: "a message reads otherwise than it was recorded",
  tool_call_changed: "an answer's tool calls came back changed",
  system_changed: "the system message changed",
  tools_changed: "the tools on offer changed",
  truncated_by_client: "earlier messages are gone: the client cut them",
  reasoning_stripped: "the chat format drops the reasoning of earlier turns",
  not_append_only: "the chat format writes the same history in other tokens",
};

export function callState(call, attempt) {
  if (attempt.excluded) return "excluded";
  if (call.marks.length) return "excluded";
  return call.trained ? "trained" : "excluded";
}

export function whyNotTrained(call, attempt) {
  if (attempt.excluded) return attempt.excluded;
  if (call.training?.left_out) return call.training.left_out;
  if (call.marks.length) return call.marks.join(", ");
  const row = attempt.rows.find((each) => each.calls.some((part) => part.number === call.number && part.part !== "context"));
  return row?.excluded ?? (call.trained ? null : "not trained");
}

function layoutOf(calls) {
  const children = new Map(), roots = [], places = new Map();
  for (const call of calls) {
    if (call.continues === null) roots.push(call);
    else children.set(call.continues, [...(children.get(call.continues) ?? []), call]);
  }
  let lane = 0;
  const stack = roots.map((call) => [call, 0, null]).reverse();
  while (stack.length) {
    const [call, depth, given] = stack.pop();
    const own = given ?? lane++;
    places.set(call.number, { depth, lane: own });
    const next = children.get(call.number) ?? [];
    next.slice(1).reverse().forEach((child) => stack.push([child, depth + 1, null]));
    if (next.length) stack.push([next[0], depth + 1, own]); // the first child goes on in its parent's lane
  }
  return { places, lanes: lane, depth: Math.max(0, ...[...places.values()].map((place) => place.depth)) + 1 };
}

export function forestPicture(attempt, { chosen = null, onchoose = () => {} } = {}) {
  const { calls } = attempt;
  if (!calls.length) return h("p", { class: "empty" }, "This attempt made no call.");
  const { places, lanes, depth } = layoutOf(calls);
  const causes = new Map(attempt.forks.filter((fork) => fork.cause).map((fork) => [fork.calls[0], fork]));
  const width = depth * (NODE.width + NODE.right) + 8, height = lanes * (NODE.height + NODE.below + (causes.size ? 12 : 0)) + 14;
  const step = NODE.height + NODE.below + (causes.size ? 12 : 0);
  const at = (number_) => { const place = places.get(number_); return [4 + place.depth * (NODE.width + NODE.right), 14 + place.lane * step]; };
  const edges = calls.filter((call) => call.continues !== null).map((call) => {
    const [x1, y1] = at(call.continues), [x2, y2] = at(call.number), middle = x2 - NODE.right / 2;
    return s("path", { class: "edge", d: `M${x1 + NODE.width},${y1 + NODE.height / 2} H${middle} V${y2 + NODE.height / 2} H${x2}` });
  });
  const nodes = calls.map((call) => {
    const [x, y] = at(call.number), fork = causes.get(call.number), state = callState(call, attempt);
    const why = whyNotTrained(call, attempt);
    const words = [`call ${call.number}`, call.agent, call.continues === null ? "begins a tree" : `continues call ${call.continues}`, why ? `not trained: ${why}` : "trained", fork ? `fork: ${CAUSES[fork.cause] ?? fork.cause}` : null].filter(Boolean).join(", ");
    const node = s("g", { class: `node ${state}${chosen === call.number ? " chosen" : ""}`, tabindex: 0, role: "button", "aria-label": words, transform: `translate(${x} ${y})`, onclick: () => onchoose(call.number), onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); onchoose(call.number); } } },
      s("title", {}, words),
      fork ? s("text", { class: "cause", x: 0, y: -3 }, `fork: ${fork.cause.replaceAll("_", " ")}`) : null,
      s("rect", { width: NODE.width, height: NODE.height, rx: 4 }),
      s("text", { x: 8, y: 15 }, `#${call.number}${call.agent ? ` ${plainText(call.agent).slice(0, 11)}` : ""}`),
      s("text", { class: "small", x: 8, y: 29 }, `${number(call.prompt_tokens)} + ${number(call.sampled_tokens)}`),
      call.training && call.training.trained_tokens ? s("text", { class: "small", x: NODE.width - 7, y: 15, "text-anchor": "end" }, signed(call.training.advantage, 2)) : null);
    return node;
  });
  return h("div", { class: "forest" }, s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `the forest: ${calls.length} calls in ${lanes} branches` }, edges, nodes));
}

export function forkList(attempt) {
  if (!attempt.forks.length) return null;
  return h("ul", { class: "plain" }, attempt.forks.map((fork) => h("li", {}, fork.cause
    ? [chip(fork.cause.replaceAll("_", " "), "warn"), ` call ${fork.calls[0]} began anew: ${CAUSES[fork.cause] ?? fork.cause}`, fork.at ? ` (at ${Object.entries(fork.at).map(([name, value]) => `${name} ${value}`).join(", ")})` : ""]
    : [chip(fork.same_prompt ? "samples" : "branches", "info"), ` calls ${fork.calls.join(", ")} all continue call ${fork.after}`, fork.same_prompt ? ": several samples of one prompt" : ""])));
}

export function waterfall(rollout, attempt, onchoose = () => {}) {
  const lanes = lanesOf(attempt);
  const begin = Math.min(...lanes.map((lane) => lane.start)), end = Math.max(...lanes.map((lane) => lane.end));
  const span = end - begin || 1e-9;
  const left = (time) => `${(((time - begin) / span) * 100).toFixed(3)}%`;
  const bar = (kind, from, to) => h("i", { class: `bar ${kind}`, style: { left: left(from), width: `max(2px, ${(((to - from) / span) * 100).toFixed(3)}%)` } });
  const rows = lanes.slice(0, MOST_LANES).map((lane) => h("div", { class: "lane", title: `${lane.name}: ${duration(lane.end - lane.start)}, from ${duration(lane.start - begin)} on${lane.engine ? `; engine ${duration(lane.engine[1] - lane.engine[0])}, asked after ${duration(lane.engine[0] - lane.start)}` : ""}` },
    lane.call ? h("button", { type: "button", class: "lane-name link", onclick: () => onchoose(lane.call) }, lane.name) : h("span", { class: "lane-name" }, lane.name),
    h("span", { class: "lane-bar" }, bar(lane.kind, lane.start, lane.end), lane.engine ? bar("engine", ...lane.engine) : null),
    h("span", { class: "lane-time" }, duration(lane.end - lane.start))));
  const total = (kind) => lanes.filter((lane) => lane.kind === kind).reduce((sum, lane) => sum + lane.end - lane.start, 0);
  const ofCalls = lanes.filter((lane) => lane.kind === "call");
  const inCalls = covered(ofCalls), whole = total("attempt");
  const inEngine = covered(ofCalls.filter((lane) => lane.engine).map(({ engine: [start, end] }) => ({ start, end })));
  const model = inEngine ? `engine ${duration(inEngine)}, gateway and waiting for a place ${duration(Math.max(inCalls - inEngine, 0))}` : `model ${duration(inCalls)}`;
  return h("div", { class: "waterfall" }, rows,
    lanes.length > MOST_LANES ? h("p", { class: "note" }, `${lanes.length - MOST_LANES} more are not drawn`) : null,
    h("p", { class: "note" }, `${model}, agent and tools ${duration(Math.max(whole - inCalls, 0))}, in the queue before ${duration(Math.max(attempt.started_at - rollout.created_at, 0))}`));
}

function lanesOf(attempt) {
  const now = Math.max(...attempt.calls.map((call) => call.end), attempt.started_at);
  const lanes = [{ name: "agent", kind: "attempt", start: attempt.started_at, end: attempt.ended_at ?? now }];
  const inside = attempt.calls.map((call) => ({ name: `call ${call.number}${call.agent ? ` ${call.agent}` : ""}`, kind: "call", start: call.start, end: call.end, call: call.number, engine: call.engine }));
  const own = attempt.spans.map((span) => ({ name: span.attributes["lightning_rl.operation.name"] ?? span.name.replace("lightning_rl.", ""), kind: "tool", start: span.start, end: span.end }));
  return [...lanes, ...[...inside, ...own].sort((a, b) => a.start - b.start)];
}

function covered(lanes) {
  let sum = 0, until = -Infinity;
  for (const lane of [...lanes].sort((a, b) => a.start - b.start)) {
    sum += Math.max(0, lane.end - Math.max(lane.start, until));
    until = Math.max(until, lane.end);
  }
  return sum;
}
