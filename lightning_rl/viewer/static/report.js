// A run's report, or one rollout of it, from the answers that the file carries.

import { h, replaced, chip, metricName, number, signed, duration, plainText, empty, taskText, select } from "./dom.js";
import { ask, link, ofRun } from "./data.js";
import { curve } from "./curve.js";
import { accountBar, evaluationList, findingList, madeWith } from "./now.js";
import { thenAndNow } from "./groups.js";
import { rolloutView } from "./rollout.js";
import { COLOURINGS, scaleOf, tokenBlock, tokenLegend, tokenValues } from "./tokens.js";

const RUN = "run";
const place = document.getElementById("app");

async function showReport() {
  const report = await ask("report");
  const opened = /^#\/run\/run\/rollout\/([^?]+)(?:\?(.*))?$/.exec(location.hash);
  const name = report.only ?? (opened && decodeURIComponent(opened[1]));
  const view = h("div", { class: "view" });
  if (name) {
    if (!report.only) view.append(h("p", {}, h("a", { href: "#/" }, "‹ the report")));
    const body = h("div", {});
    view.append(body);
    const draw = (query) => rolloutView(body, { run: RUN, name, query, go: (changed, quietly) => { if (!quietly) draw(changed); } });
    replaced(place, view);
    await draw(Object.fromEntries(new URLSearchParams(opened?.[2] ?? "")));
    return;
  }
  const [summary, metrics, config] = await Promise.all(["summary", "metrics", "config"].map((path) => ask(ofRun(RUN, path))));
  replaced(view, headline(summary, report), ...(summary.evaluations?.length ? [evaluationList(summary.evaluations)] : [curvesSection(metrics), accountBar(summary.account)]), h("section", {}, findingList(report.doctor, RUN)), await pairsSection(report), settingsSection(report, config), repeatSection(report));
  replaced(place, view);
}

function headline(summary, report) {
  const best = summary.best, curvePoints = summary.curve?.value ?? [];
  return h("header", {}, h("div", { class: "rollout-head" }, h("h2", {}, plainText(summary.name)), chip(summary.state, summary.state), h("span", { class: "spacer" }), h("span", { class: "note" }, `made ${report.made}`)),
    h("p", { class: "note path" }, plainText(summary.folder ?? "")), h("div", { class: "tiles" },
      best ? h("div", { class: "tile" }, h("b", {}, `${number(curvePoints[0])} → ${number(curvePoints.at(-1))}`), h("span", {}, best.label)) : null,
      best ? h("div", { class: "tile" }, h("b", {}, number(best.value)), h("span", {}, `best, at step ${best.step}`)) : null,
      h("div", { class: "tile" }, h("b", {}, number(summary.steps ?? 0)), h("span", {}, "steps")), summary.seconds ? h("div", { class: "tile" }, h("b", {}, duration(summary.seconds)), h("span", {}, "of training")) : null,
      report.rollouts ? h("div", { class: "tile" }, h("b", {}, number(report.rollouts.rollouts)), h("span", {}, "rollouts")) : null),
    summary.model ? h("p", {}, "Model: ", h("span", { class: "mono" }, plainText(summary.model))) : null);
}

function curvesSection(metrics) {
  const names = Object.keys(metrics.series);
  return h("section", {}, h("h3", {}, "Curves"), names.length ? h("div", { class: "curves" }, names.slice(0, 8).map((name) => curve(metricName(name), [{ label: metricName(name), colour: 0, points: metrics.series[name] }]))) : empty("The run has made no step."));
}

async function pairsSection(report) {
  if (!report.pairs.length) return h("section", {}, h("h3", {}, "Before and after"), h("p", { class: "note" }, "No task was rolled out in two steps, so there is nothing to compare."));
  const parts = await Promise.all(report.pairs.map(pairOf));
  return h("section", {}, h("h3", {}, "Before and after: the most telling rollouts"), parts, report.left_out ? h("p", { class: "note" }, `${number(report.left_out)} more tasks are left out here; lightning-rl dashboard shows all.`) : null);
}

async function pairOf(pair, index) {
  const body = h("div", {}), tokens = h("div", {}), held = h("details", { class: "pair", open: index < 3 }, h("summary", {}, h("b", {}, taskText(pair.task)), ` reward ${number(pair.before)} → ${number(pair.after)}  (${signed(pair.after - pair.before)})`), body, tokens);
  await thenAndNow(body, RUN, pair.rows[0], pair.rows[1]);
  await colouredTokens(tokens, pair, "logprob");
  return held;
}

// The tokens of both sides, on one scale.
async function colouredTokens(where, pair, by) {
  const sides = await Promise.all(pair.rows.map(async (row) => {
    const rollout = await ask(ofRun(RUN, `rollouts/${encodeURIComponent(row.rollout_id)}`));
    const attempt = rollout.attempts.find((each) => each.attempt_id === rollout.counting_attempt_id) ?? rollout.attempts.at(-1);
    const calls = await Promise.all((attempt?.calls ?? []).slice(0, 12).map((call) => ask(ofRun(RUN, `rollouts/${encodeURIComponent(row.rollout_id)}/calls/${attempt.sequence}/${call.number}`))));
    return calls.map((call) => call.tokens);
  }));
  const all = sides.flat(), values = all.flatMap((columns) => tokenValues(columns.sampled, by)), scale = scaleOf(values, by);
  const versions = [...new Set(all.flatMap((columns) => columns.sampled.version))].sort((a, b) => a - b);
  const picker = select("tokens coloured by", COLOURINGS.filter(([name]) => name !== "text"), by, (value) => colouredTokens(where, pair, value));
  replaced(where, h("div", { class: "filters apart" }, picker, tokenLegend(by, scale, versions, values.some((value) => value !== null))),
    h("div", { class: "columns two-columns" }, sides.map((columns, side) => h("section", { class: "column" }, h("header", {}, h("a", { href: link(RUN, "rollout", pair.rows[side].rollout_id, { colour: by }) }, side ? "now, whole" : "then, whole")), h("div", { class: "column-body padded" }, columns.map((each) => tokenBlock(each, by, { scale, versions })))))));
}

function settingsSection(report, config) {
  const table = (entries) => h("table", { class: "list" }, h("tbody", {}, entries.map(([name, value]) => h("tr", {}, h("td", { class: "mono" }, name), h("td", { class: "mono" }, plainText(JSON.stringify(value)))))));
  const changed = Object.entries(report.changed), all = Object.entries(config.config);
  return h("section", {}, h("h3", {}, "Config: what is not as by default"), changed.length ? table(changed) : h("p", { class: "note" }, all.length ? "All keys are as by default." : "The run has no config."), all.length ? h("details", {}, h("summary", {}, `all ${all.length} keys`), table(all)) : null,
    madeWith(config.made_with, "h3"));
}

function repeatSection(report) {
  return h("section", {}, h("h3", {}, "How to repeat it"), report.repeat.length ? report.repeat.map((command) => h("pre", { class: "log" }, plainText(command))) : h("p", { class: "note" }, "Nothing of how it was begun is recorded."));
}

addEventListener("hashchange", () => showReport().catch(tellProblem));
showReport().catch(tellProblem);

function tellProblem(error) {
  replaced(place, h("p", { class: "problem", role: "alert" }, error.message));
}
