// Answers side by side: a group's n answers to one task, and one task early and late in training.

import { h, replaced, chip, number, signed, shortId, taskText, plainText, select, empty } from "./dom.js";
import { ask, holds, link, ofRun } from "./data.js";
import { answerText, marked, messageBlock, wordDifference } from "./conversation.js";

const SIDE_BY_SIDE = 6;

export async function groupsView(place, { run, query, go }) {
  const found = await ask(ofRun(run, "groups"), query.step ? { step: query.step } : {});
  if (!found.groups.length) return replaced(place, empty("No rollouts of this run form groups: training asks for n rollouts of each task (actor_rollout_ref.rollout.n)."));
  const at = found.steps.indexOf(found.step);
  const step = (index) => h("button", { type: "button", disabled: !(index in found.steps), onclick: () => go({ step: String(found.steps[index]) }) }, index < at ? "‹ step before" : "next step ›");
  replaced(place, h("div", { class: "filters" }, select("step", found.steps.map((each) => [each, `step ${each}`]), found.step, (value) => go({ step: value })), step(at - 1), step(at + 1),
    h("span", { class: "note" }, `${found.groups.length} groups; those whose rewards differ most come first`)),
  h("table", { class: "list" }, h("thead", {}, h("tr", {}, ["task", "mode", "answers", "mean", "lowest", "highest", "trained tokens"].map((name, index) => h("th", { class: index > 1 ? "right" : "" }, name)))),
    h("tbody", {}, found.groups.map((each) => h("tr", {}, h("td", { class: "wide" }, h("a", { href: link(run, "group", each.group_id) }, taskText(each.task))), h("td", {}, each.mode), h("td", { class: "right" }, each.n), h("td", { class: "right" }, number(each.mean)), h("td", { class: "right" }, number(each.low)), h("td", { class: "right" }, number(each.high)), h("td", { class: "right" }, number(each.trained)))))));
  return {};
}

export async function groupView(place, { run, name }) {
  const { rollouts } = await ask(ofRun(run, `groups/${encodeURIComponent(name)}`));
  if (!rollouts.length) return replaced(place, empty("There is no such group."));
  const columns = h("div", { class: "columns" }), rest = rollouts.slice();
  const more = h("button", { type: "button", onclick: () => add() });
  const add = () => {
    const part = rest.splice(0, SIDE_BY_SIDE);
    part.forEach((row) => columns.append(answerColumn(run, row)));
    more.hidden = !rest.length;
    more.textContent = `${rest.length} more answers`;
  };
  const rewards = rollouts.map((row) => row.reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / (rewards.length || 1);
  replaced(place, h("header", { class: "rollout-head" }, h("h2", {}, taskText(rollouts[0].task)), chip(rollouts[0].mode), rollouts[0].step === null ? null : chip(`step ${rollouts[0].step}`), h("span", { class: "big" }, `mean reward `, h("b", {}, number(mean))), h("span", { class: "note" }, `${rollouts.length} answers, the best first`)),
    rewardStrip(run, rollouts), columns, more);
  add();
  return {};
}

function rewardStrip(run, rollouts) {
  const most = Math.max(...rollouts.map((row) => Math.abs(row.advantage ?? 0))) || 1;
  return h("div", { class: "strip" }, rollouts.map((row) => h("a", { href: link(run, "rollout", row.rollout_id), title: shortId(row.rollout_id), class: "strip-item" },
    h("i", { class: `bar ${(row.advantage ?? 0) < 0 ? "below" : "above"}`, style: { height: `${Math.round((Math.abs(row.advantage ?? 0) / most) * 30) + 2}px` } }), h("span", {}, number(row.reward, 2)), h("span", { class: "note" }, signed(row.advantage, 2)))));
}

function answerColumn(run, row) {
  const body = h("div", { class: "column-body" }, h("p", { class: "note" }, "reading…"));
  ask(ofRun(run, `rollouts/${encodeURIComponent(row.rollout_id)}`)).then((rollout) => replaced(body, talkOf(run, rollout)), (error) => replaced(body, h("p", { class: "problem" }, error.message)));
  return h("section", { class: "column" }, columnHead(run, row), body);
}

function columnHead(run, row, label) {
  return h("header", {}, label ? h("b", {}, label) : null, h("a", { href: link(run, "rollout", row.rollout_id) }, shortId(row.rollout_id)), h("span", {}, "reward ", h("b", {}, number(row.reward))), row.advantage === null || row.advantage === undefined ? null : h("span", {}, `advantage ${signed(row.advantage)}`), row.status === "succeeded" ? null : chip(row.status, row.status));
}

function countingAttempt(rollout) {
  return rollout.attempts.find((each) => each.attempt_id === rollout.counting_attempt_id) ?? rollout.attempts.at(-1);
}

function talkOf(run, rollout) {
  const attempt = countingAttempt(rollout), where = { run, rollout: rollout.rollout_id };
  if (!attempt?.calls.length) return empty("no call");
  const shown = attempt.calls.slice(0, 12);
  return [shown.flatMap((call, index) => [...(index ? call.messages : call.messages.slice(-1)).map((message) => messageBlock(message, where)), ...call.answer.slice(0, 1).map((message) => messageBlock(message, where, { answer: true }))]),
    attempt.calls.length > shown.length ? h("p", { class: "note" }, `${attempt.calls.length - shown.length} more calls`) : null,
    attempt.error ? h("div", { class: "text mono problem" }, plainText(attempt.error)) : null];
}

export async function tasksView(place, { run, query, go }) {
  const found = await ask(ofRun(run, "tasks"), query.mode ? { mode: query.mode } : {});
  const modes = found.modes.length > 1 ? select("mode", found.modes.map((mode) => [mode, mode]), found.mode, (mode) => go({ mode })) : null;
  if (!found.tasks.length) return replaced(place, modes, empty("No task was rolled out in two steps yet. Validation (trainer.test_freq) asks the same tasks again and again."));
  replaced(place, h("div", { class: "filters" }, modes, h("span", { class: "note" }, "the same task early and late in training; what changed most comes first")),
    h("table", { class: "list" }, h("thead", {}, h("tr", {}, ["task", "first", "last", "before", "after", "change"].map((name, index) => h("th", { class: index ? "right" : "" }, name)))),
      h("tbody", {}, found.tasks.map((task) => h("tr", {}, h("td", { class: "wide" }, h("a", { href: link(run, "task", task.task_key, { mode: found.mode }) }, taskText(task.task))), h("td", { class: "right" }, `step ${task.first}`), h("td", { class: "right" }, `step ${task.last}`), h("td", { class: "right" }, number(task.before)), h("td", { class: "right" }, number(task.after)), h("td", { class: `right ${task.after > task.before ? "good" : task.after < task.before ? "bad" : ""}` }, signed((task.after ?? 0) - (task.before ?? 0))))))));
  return {};
}

export async function taskView(place, { run, name, query, go }) {
  const mode = query.mode ?? "val";
  const { rollouts } = await ask(ofRun(run, `tasks/${encodeURIComponent(name)}`), { mode });
  if (!rollouts.length) return replaced(place, empty("There is no such task."));
  const first = rollouts.find((row) => row.rollout_id === query.then) ?? rollouts[0];
  const second = rollouts.find((row) => row.rollout_id === query.now) ?? rollouts.findLast((row) => row.step === rollouts.at(-1).step && row.reward !== null) ?? rollouts.at(-1);
  const options = rollouts.map((row) => [row.rollout_id, `step ${row.step}: reward ${number(row.reward)}`]);
  const pair = h("div", {});
  replaced(place, h("header", { class: "rollout-head" }, h("h2", {}, taskText(first.task))),
    h("div", { class: "filters" }, select("then", options, first.rollout_id, (value) => go({ ...query, mode, then: value }), "wide"), select("now", options, second.rollout_id, (value) => go({ ...query, mode, now: value }), "wide")), pair);
  await thenAndNow(pair, run, first, second);
  return {};
}

export async function thenAndNow(place, run, first, second) {
  const [before, after] = await Promise.all([first, second].map((row) => ask(ofRun(run, `rollouts/${encodeURIComponent(row.rollout_id)}`))));
  const [left, right] = [before, after].map((rollout) => countingAttempt(rollout)?.calls ?? []);
  const sides = [[before, first, left, right, 0, "gone"], [after, second, right, left, 1, "come"]].map(([rollout, row, own, other, side, kind]) => h("section", { class: "column" }, columnHead(run, row, `${side ? "now" : "then"}: step ${row.step}`),
    h("div", { class: "column-body" }, own.slice(0, 12).flatMap((call, index) => {
      const where = { run, rollout: rollout.rollout_id };
      const texts = side ? [answerText(other[index] ?? {}), answerText(call)] : [answerText(call), answerText(other[index] ?? {})];
      const words = wordDifference(...texts)[side];
      return [...call.messages.map((message) => messageBlock(message, where)), h("div", { class: "message answer role-assistant" }, h("div", { class: "role" }, "model"), h("div", { class: "said" }, marked(words, kind)))];
    }), own.length ? null : empty("no call"))));
  const told = whatChanged(before, after, left, right);
  replaced(place, told ? h("p", { class: "changed" }, told) : null, h("div", { class: "columns two-columns" }, sides));
}

function whatChanged(before, after, left, right) {
  const parts = [];
  if (before.reward !== after.reward) parts.push(`reward ${number(before.reward)} → ${number(after.reward)}`);
  if (left.length !== right.length) parts.push(`calls ${left.length} → ${right.length}`);
  const tokens = (calls) => calls.reduce((sum, call) => sum + call.sampled_tokens, 0);
  if (tokens(left) !== tokens(right)) parts.push(`sampled tokens ${number(tokens(left))} → ${number(tokens(right))}`);
  const versions = (calls) => calls[0]?.policy_versions?.[0];
  if (versions(left) !== versions(right)) parts.push(`policy version ${versions(left) ?? "–"} → ${versions(right) ?? "–"}`);
  return parts.length ? parts.join("   ·   ") : "nothing that is counted";
}

export function canShow(run, id) {
  return holds(ofRun(run, `rollouts/${encodeURIComponent(id)}`));
}
