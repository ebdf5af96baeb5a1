// One rollout: its conversation down to each token, its forest, where its reward went, its time, its error.

import { h, replaced, chip, number, signed, duration, shortId, plainText, copyButton, empty, select } from "./dom.js";
import { ask, holds, isReport, link, ofRun } from "./data.js";
import { COLOURINGS, scaleOf, tokenBlock, tokenLegend, tokenValues } from "./tokens.js";
import { forestPicture, forkList, waterfall, whyNotTrained } from "./forest.js";
import { messageBlock } from "./conversation.js";

const CALLS_AT_ONCE = 40;

export async function rolloutView(place, { run, name, query, go }) {
  const rollout = await ask(ofRun(run, `rollouts/${encodeURIComponent(name)}`));
  const wanted = Number(query.attempt) || rollout.attempts.find((each) => each.attempt_id === rollout.counting_attempt_id)?.sequence || rollout.attempts.at(-1)?.sequence;
  const attempt = rollout.attempts.find((each) => each.sequence === wanted);
  replaced(place, headOf(run, rollout), siblings(run, rollout));
  if (!attempt) {
    place.append(taskBlock(rollout.task), empty(rollout.status === "queued" ? "No runner has taken this rollout yet." : "There is no attempt to show."));
    return { rollout };
  }
  const state = { run, rollout, attempt, by: query.colour ?? "text", token: query.token ? Number(query.token) : null, chosen: Number(query.call) || null, model: "", models: [...new Set(attempt.calls.map((call) => call.model))], columns: new Map(), parts: new Map() };
  const talk = h("section", { class: "talk" });
  const aside = h("aside", {}, attemptPicker(state, go), h("h3", {}, "Forest"), null);
  const choose = (number_) => {
    state.chosen = number_;
    go({ ...query, attempt: String(attempt.sequence), call: String(number_), colour: state.by === "text" ? null : state.by }, true);
    drawForest();
    if (state.model && modelOf(attempt, number_) !== state.model) show("");
    state.parts.get(number_)?.scrollIntoView({ block: "start" });
  };
  const forest = h("div", {});
  const drawForest = () => replaced(forest, forestPicture(attempt, { chosen: state.chosen, onchoose: choose }), forkList(attempt));
  drawForest();
  const details = detailsOf(state, choose, forest);
  replaced(aside, details);
  const colour = (by) => { state.by = by; go({ ...query, colour: by === "text" ? null : by }, true); drawTalk(); };
  const show = (model) => { state.model = model; drawTalk(); };
  const drawTalk = () => replaced(talk, toolbar(state, colour, show), conversation(state));
  drawTalk();
  place.append(h("div", { class: "two" }, talk, aside));
  if (state.chosen) requestAnimationFrame(() => state.parts.get(state.chosen)?.scrollIntoView({ block: "start" }));
  const open = ["queued", "running"].includes(rollout.status); // what is over does not change
  return { rollout, colour, refresh: open ? () => rolloutView(place, { run, name, query, go }) : undefined };
}

function headOf(run, rollout) {
  const why = rollout.attempts.find((each) => each.attempt_id === rollout.counting_attempt_id)?.excluded;
  return h("header", { class: "rollout-head" },
    h("h2", { title: rollout.rollout_id }, shortId(rollout.rollout_id)),
    chip(rollout.status, rollout.status), chip(rollout.mode),
    rollout.metadata?.step !== undefined ? chip(`step ${rollout.metadata.step}`) : null,
    rollout.agent ? chip(rollout.agent) : null,
    h("span", { class: "big" }, "reward ", h("b", {}, number(rollout.reward))),
    Object.entries(rollout.rewards ?? {}).filter(([name]) => name !== "reward").map(([name, value]) => chip(`${plainText(name)} ${number(value)}`)),
    rollout.training ? stepChip(rollout) : null,
    rollout.training?.left_out ? chip(`left out: ${rollout.training.left_out}`, "warn") : why ? chip(`not trained: ${why}`, "warn") : null,
    h("span", { class: "spacer" }),
    isReport() ? null : copyButton("copy link", () => location.href),
    copyButton("copy JSON", () => JSON.stringify(rollout, null, 1)));
}

// Of a rollout without calls, or whose calls are all left out, nothing was trained: its reward counted in its group.
function stepChip(rollout) {
  const trained = rollout.attempts.some((attempt) => attempt.calls.some((call) => call.training?.trained_tokens));
  return trained ? chip(`trained in step ${rollout.training.step}`, "trained") : chip(`counted in step ${rollout.training.step}`);
}

function siblings(run, rollout) {
  if (!rollout.group?.length || rollout.group.length < 2) return null;
  return h("nav", { class: "siblings", "aria-label": "the group" }, isReport() ? h("span", {}, "its group") : h("a", { href: link(run, "group", rollout.group_id) }, `group of ${rollout.group.length}`),
    rollout.group.map((each) => {
      const words = `${number(each.reward, 2)}${each.advantage === null ? "" : ` (${signed(each.advantage, 2)})`}`;
      const here = each.rollout_id === rollout.rollout_id;
      const told = `${shortId(each.rollout_id)}: reward ${number(each.reward)}, advantage ${signed(each.advantage)}`;
      if (here || !holds(ofRun(run, `rollouts/${encodeURIComponent(each.rollout_id)}`))) return h("span", { class: `sibling${here ? " here" : ""}`, title: told, "aria-current": here ? "true" : null }, words);
      return h("a", { class: "sibling", href: link(run, "rollout", each.rollout_id), title: told }, words);
    }));
}

function attemptPicker(state, go) {
  const { attempts } = state.rollout;
  if (attempts.length < 2) return null;
  return select("attempt", attempts.map((each) => [each.sequence, `${each.sequence}: ${each.status}${each.excluded ? `, ${each.excluded}` : ", counts"}`]), state.attempt.sequence, (value) => go({ attempt: value }));
}

function toolbar(state, changed, show) {
  const legend = h("span", { class: "legend-place", "aria-live": "polite" });
  state.legend = legend;
  return h("div", { class: "toolbar" }, select("colour", COLOURINGS, state.by, changed), modelPicker(state, show), legend);
}

// Of an agent that asks several models, such as the policies of a run, the calls of one.
function modelPicker(state, show) {
  return state.models.length < 2 ? null : select("model", [["", "all models"], ...state.models.map((model) => [model, plainText(model)])], state.model, show);
}

const modelOf = (attempt, number_) => attempt.calls.find((call) => call.number === number_)?.model;

function conversation(state) {
  const { attempt } = state;
  if (!attempt.calls.length) return [taskBlock(state.rollout.task), empty("The agent made no call in this attempt.", attempt.error ? ` It failed: ${firstWords(plainText(attempt.error))}` : "")];
  const list = h("div", { class: "calls" });
  const calls = state.model ? attempt.calls.filter((call) => call.model === state.model) : attempt.calls;
  state.parts.clear();
  let shown = 0;
  const more = h("button", { type: "button", onclick: () => add() });
  const add = () => {
    const part = calls.slice(shown, shown + Math.max(CALLS_AT_ONCE, (state.chosen ?? 0) - shown));
    part.forEach((call) => { const card = callCard(state, call); state.parts.set(call.number, card); list.append(card); });
    shown += part.length;
    more.textContent = `${calls.length - shown} more calls`;
    more.hidden = shown >= calls.length;
  };
  add();
  return [taskBlock(state.rollout.task), list, more];
}

const firstWords = (text) => text.length > 200 ? `${text.slice(0, 200)}…` : text; // the whole error stands beside it

function taskBlock(task) {
  return h("details", { class: "task" }, h("summary", {}, "task"), h("div", { class: "text mono" }, plainText(typeof task === "string" ? task : JSON.stringify(task, null, 1))));
}

function callCard(state, call) {
  const { run, rollout, attempt } = state, where = { run, rollout: rollout.rollout_id };
  const why = whyNotTrained(call, attempt), training = call.training;
  const said = h("div", { class: "said" });
  const answers = h("div", { class: `message answer role-assistant${why ? "" : " is-trained"}` }, h("div", { class: "role" }, "model"), said);
  const asTokens = state.by !== "text" && call.sampled_tokens > 0; // then the prompt's tokens say what its messages say
  const asked = asTokens ? call.messages.filter((message) => Array.isArray(message.content)) : call.messages;
  const body = h("div", { class: "call-body" }, asked.map((message) => messageBlock(message, where)), answers);
  const card = h("article", { class: "call", id: `call-${call.number}` },
    h("header", {}, h("b", {}, `#${call.number}`), call.continues === null ? h("span", { class: "note" }, "begins") : h("span", { class: "note" }, `after #${call.continues}`),
      call.agent ? chip(plainText(call.agent), "info") : null,
      call.model !== call.agent && state.models.length > 1 ? chip(plainText(call.model)) : null,
      h("span", { class: "note" }, `${number(call.prompt_tokens)} + ${number(call.sampled_tokens)} tokens`),
      call.policy_versions.length ? h("span", { class: "note" }, `version ${call.policy_versions.join(", ")}`) : null,
      call.finish_reason !== "stop" ? chip(call.finish_reason, call.finish_reason === "length" ? "warn" : "") : null,
      training && training.trained_tokens ? h("span", { class: "advantage" }, `advantage ${signed(training.advantage)}`) : null,
      why ? chip(`not trained: ${why.replaceAll("_", " ")}`, "warn") : null,
      h("span", { class: "spacer" }),
      callButtons(state, call)), body);
  if (!asTokens) replaced(said, call.answer.length ? call.answer.flatMap((message) => [...messageBlock(message, where, { answer: true }).querySelector(".said").childNodes]) : h("span", { class: "note" }, "(no answer was recorded)"));
  else whenSeen(card, () => drawTokens(state, call, said));
  return card;
}

// Tokens are asked for when their call comes into view: a long rollout costs what is looked at.
function whenSeen(element, act) {
  const watch = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) { watch.disconnect(); act(); }
  }, { rootMargin: "400px" });
  watch.observe(element);
}

async function detailOf(state, call, start = 0) {
  const key = `${call.number}/${start}`;
  if (!state.columns.has(key)) {
    const path = `rollouts/${encodeURIComponent(state.rollout.rollout_id)}/calls/${state.attempt.sequence}/${call.number}`;
    state.columns.set(key, ask(ofRun(state.run, path), start ? { start: String(start) } : {}));
  }
  return state.columns.get(key);
}

async function drawTokens(state, call, said, start = 0) {
  replaced(said, h("span", { class: "note" }, "tokens…"));
  try {
    const detail = await detailOf(state, call, start), columns = detail.tokens;
    const versions = state.attempt.versions, values = tokenValues(columns.sampled, state.by);
    const scale = scaleOf(values, state.by), known = values.some((value) => value !== null);
    if (state.legend && (known || !state.legend.childNodes.length)) replaced(state.legend, tokenLegend(state.by, scale, versions, known), detail.sampler_is_old && ["difference", "ratio", "trainer"].includes(state.by) ? h("span", { class: "note" }, " this run took the sampler's logprobs for the trainer's (bypass_mode), so the two are equal") : null);
    const block = tokenBlock(columns, state.by, { scale, versions, picked: state.chosen === call.number ? state.token : null, onpick: (token) => noteToken(call.number, token) });
    const pages = columns.total > columns.sampled.id.length ? h("p", {}, `tokens ${columns.start} to ${columns.start + columns.sampled.id.length - 1} of ${number(columns.total)} `,
      columns.start ? h("button", { type: "button", onclick: () => drawTokens(state, call, said, Math.max(columns.start - 4096, 0)) }, "before") : null,
      columns.start + columns.sampled.id.length < columns.total ? h("button", { type: "button", onclick: () => drawTokens(state, call, said, columns.start + 4096) }, "next") : null) : null;
    replaced(said, columns.total ? block : h("span", { class: "note" }, "its token ids are not known"), pages);
  } catch (error) {
    replaced(said, h("p", { class: "problem" }, error.message));
  }
}

// A token that was clicked stands in the address, so that a link leads to it.
function noteToken(call, token) {
  if (isReport()) return;
  const [path, words] = location.hash.split("?"), query = new URLSearchParams(words);
  query.set("call", String(call));
  query.set("token", String(token));
  history.replaceState(null, "", `${path}?${query}`);
}

function callButtons(state, call) {
  const path = ofRun(state.run, `rollouts/${encodeURIComponent(state.rollout.rollout_id)}/calls/${state.attempt.sequence}/${call.number}`);
  if (!holds(path)) return null;
  return [
    copyButton("curl", async () => curlOf((await detailOf(state, call)).request)),
    copyButton("JSON", async () => JSON.stringify(await detailOf(state, call), null, 1)),
    isReport() ? null : copyButton("link", () => { const [place, words] = location.href.split("?"), query = new URLSearchParams(words ?? ""); query.set("attempt", state.attempt.sequence); query.set("call", call.number); return `${place}?${query}`; }),
  ];
}

export function curlOf(request) {
  const body = JSON.stringify(request, null, 1).replaceAll("'", "'\\''");
  return `curl "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" -d '${body}'`;
}

function detailsOf(state, choose, forest) {
  const { rollout, attempt } = state;
  const log = attempt.log ?? {};
  const section = (title, ...body) => [h("h3", {}, title), body];
  return [
    attempt.error || rollout.error ? section("Error", h("div", { class: "text mono problem" }, plainText(attempt.error ?? rollout.error))) : null,
    log.traceback ? h("details", { open: true }, h("summary", {}, "traceback"), h("div", { class: "text mono log" }, plainText(log.traceback))) : null,
    rollout.attempts.length > 1 ? h("p", {}, attemptLinks(state)) : null,
    section("Forest", forest),
    section("Credit", creditTable(state, choose)),
    section("Time", waterfall(rollout, attempt, choose)),
    log.stdout ? section("Printed", h("div", { class: "text mono log" }, plainText(log.stdout))) : null,
    log.stderr ? section("Standard error", h("div", { class: "text mono log" }, plainText(log.stderr))) : null,
    section("Rows", rowTable(attempt)),
    attempt.spans.length ? section("What the agent told", spanList(attempt)) : null,
  ];
}

function attemptLinks(state) {
  return state.rollout.attempts.map((each) => [each.sequence === state.attempt.sequence ? h("b", {}, `attempt ${each.sequence}`) : isReport() ? `attempt ${each.sequence}` : h("a", { href: link(state.run, "rollout", state.rollout.rollout_id, { attempt: each.sequence }) }, `attempt ${each.sequence}`), ` ${each.status}${each.excluded ? ` (${each.excluded})` : ""}  `]);
}

function creditTable(state, choose) {
  const { rollout, attempt } = state, training = rollout.training;
  const given = Object.entries(attempt.returned ?? {}).map(([name, value]) => `${plainText(name)} ${number(value)}`).join(", ") || "none";
  const ofCalls = attempt.rewards.filter((reward) => reward.call_id);
  const intro = h("p", { class: "note" }, `Rewards of the attempt: ${given}.`,
    ofCalls.length ? ` Of single calls: ${ofCalls.map((reward) => `${plainText(reward.name)} ${number(reward.value)}`).join(", ")}.` : "",
    training ? ` Step ${training.step} counted it with ${number(training.reward)}; rule ${training.rule}.` : rollout.not_recorded ? ` ${plainText(rollout.not_recorded)}.` : rollout.mode === "train" ? " No step's record tells what training made of it." : "",
    training?.overlong_penalty ? ` Penalty for its length: ${signed(training.overlong_penalty)}.` : "",
    training?.kl_penalty ? ` For its distance from the reference: ${signed(training.kl_penalty)}.` : "");
  const made = attempt.calls.filter((call) => call.training);
  if (!made.length) return intro;
  return [intro, h("table", { class: "narrow" }, h("thead", {}, h("tr", {}, ["call", "credit", "baseline", "advantage", "tokens"].map((name) => h("th", {}, name)))),
    h("tbody", {}, made.slice(0, 200).map(({ number: one, training: each }) => h("tr", { title: `credit by ${each.rule}, compared with ${each.compared_with ?? "nobody"}; (credit − baseline) / ${number(each.scale, 4)} by ${each.estimator}; weight ${number(each.weight, 5)} in mini-batch ${each.mini_batch ?? "–"}` },
      h("td", {}, h("button", { type: "button", class: "link", onclick: () => choose(one) }, `#${one}`)), h("td", {}, number(each.credit)), h("td", {}, number(each.baseline)), h("td", {}, signed(each.advantage)), h("td", {}, each.trained_tokens || (each.left_out ?? "0"))))))];
}

function rowTable(attempt) {
  if (!attempt.rows.length) return h("p", { class: "note" }, "no rows");
  return h("table", { class: "narrow" }, h("thead", {}, h("tr", {}, ["row", "calls", "tokens", "trained"].map((name) => h("th", {}, name)))),
    h("tbody", {}, attempt.rows.slice(0, 100).map((row) => h("tr", {}, h("td", {}, row.number), h("td", {}, row.calls.map((part) => [h("span", { class: part.part === "trained" ? "part-trained" : "part-context", title: part.part }, `#${part.number}`), " "])), h("td", {}, number(row.tokens)), h("td", {}, row.excluded ?? number(row.trained))))));
}

function spanList(attempt) {
  return [h("ul", { class: "plain" }, attempt.spans.slice(0, 60).map((span) => h("li", {}, h("details", {}, h("summary", {}, plainText(span.attributes["lightning_rl.operation.name"] ?? span.name)), h("div", { class: "text mono" }, plainText(JSON.stringify(span.attributes, null, 1))))))),
    attempt.spans.length > 60 || attempt.spans_left_out ? h("p", { class: "note" }, `${attempt.spans.length - Math.min(60, attempt.spans.length) + attempt.spans_left_out} more are not shown`) : null];
}
