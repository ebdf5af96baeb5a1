// What happens now: the step, who waits for what, what is open, the engines, the token account, what the doctor says.

import { h, replaced, chip, metricName, number, duration, shortId, taskText, empty, plainText } from "./dom.js";
import { ask, isReport, link, ofRun } from "./data.js";
import { curve } from "./curve.js";

const OPEN_ROWS = 25; // that are listed
const NOW_CURVES = ["critic/score/mean", "val/reward"];

export async function nowView(place, { run }) {
  const draw = async () => {
    const [now, metrics] = await Promise.all([ask(ofRun(run, "now")), ask(ofRun(run, "metrics"))]);
    const scrolled = document.scrollingElement?.scrollTop ?? 0;
    replaced(place, progress(now), h("div", { class: "tiles" }, tiles(now)), now.evaluations.length ? evaluationList(now.evaluations) : accountBar(now.account),
      h("div", { class: "two even" }, h("section", {}, h("h2", { class: "minor" }, "Waiting"), waitingList(now), h("h2", { class: "minor" }, "Engines"), engineTable(now.server, now.state), findingList(now.doctor, run)),
        h("section", {}, NOW_CURVES.filter((name) => metrics.series[name]).map((name) => curve(metricName(name), [{ label: metricName(name), colour: 0, points: metrics.series[name] }])), h("h2", { class: "minor" }, "Open rollouts"), openTable(run, now))));
    document.scrollingElement?.scrollTo(0, scrolled);
    if (now.doctor?.pending) setTimeout(() => { if (place.isConnected) draw().catch(() => {}); }, 1000);
  };
  await draw();
  return { refresh: draw };
}

function progress(now) {
  const share = now.steps && now.step !== null ? Math.min(now.step / now.steps, 1) : null;
  return h("header", { class: "rollout-head" }, chip(now.state, now.state), h("span", { class: "big" }, now.step === null ? (now.evaluations.length ? "the agent was measured, not trained" : "no step is done yet") : ["step ", h("b", {}, number(now.step)), now.steps ? ` of ${number(now.steps)}` : ""]),
    share === null ? null : h("progress", { value: share, max: 1, "aria-label": "steps done" }),
    now.last?.["timing_s/step"] ? h("span", { class: "note" }, `${duration(now.last["timing_s/step"])} a step`, now.state === "running" && now.steps ? `, about ${duration((now.steps - now.step) * now.last["timing_s/step"])} left` : "") : null);
}

function tiles(now) {
  const { counts } = now.rollouts, server = now.server ?? {};
  const parked = Object.values(server.models ?? {}).reduce((sum, model) => sum + (model.parked ?? 0), 0);
  const shown = [
    ["running", counts.running ?? 0], ["queued", counts.queued ?? 0], ["succeeded", counts.succeeded ?? 0], ["failed", counts.failed ?? 0],
    ...(now.server && !server.problem ? [["calls in flight", server.in_flight], ["calls parked", parked], ["open attempts", server.open_attempts], ["tokens pending", server.tokens_pending]] : []),
  ];
  return shown.map(([label, value]) => h("div", { class: "tile" }, h("b", {}, number(value)), h("span", {}, label)));
}

export function evaluationList(evaluations) {
  return h("section", {}, h("h2", { class: "minor" }, "Measured"), h("ul", { class: "plain" }, evaluations.map((told) => h("li", {}, plainText(told)))));
}

export function accountBar(account) {
  if (!account) return h("p", { class: "note" }, "The token account begins with the first step.");
  const parts = [["trained", account.trained, "part-0"], ...Object.entries(account.excluded).map(([reason, n], index) => [reason.replaceAll("_", " "), n, `part-${(index % 6) + 1}`]), ["pending", account.pending, "part-pending"]].filter(([, n]) => n > 0);
  const whole = account.received || 1;
  return h("section", { class: "account" }, h("h2", { class: "minor" }, `Token account: ${number(account.received)} received by step ${account.step}`),
    h("div", { class: "account-bar", role: "img", "aria-label": parts.map(([name, n]) => `${name} ${n}`).join(", ") }, parts.map(([name, n, kind]) => h("i", { class: kind, style: { width: `${(n / whole) * 100}%` }, title: `${name}: ${number(n)}` }))),
    h("div", { class: "legend" }, parts.map(([name, n, kind]) => h("span", {}, h("i", { class: `swatch ${kind}` }), `${name} ${number(n)} (${((n / whole) * 100).toFixed(1)} %)`))));
}

// What each session of the run was made with: a run that went on elsewhere has several.
export function madeWith(sessions, heading) {
  if (!sessions.length) return h("p", { class: "note" }, "With which versions it was made is not recorded.");
  const rows = sessions.map((session) => [
    new Date(session.began * 1000).toISOString().slice(0, 19).replace("T", " "),
    session.commit ? `${session.commit.slice(0, 10)}${session.changed_files ? `, ${number(session.changed_files)} files changed since` : ""}` : "not known",
    Object.entries(session.versions).map(([name, value]) => `${name} ${value}`).join(", "),
    [session.gpus.join(", ") || null, session.threads === null ? null : `${session.threads} ${session.threads === 1 ? "thread" : "threads"}`, session.machine].filter(Boolean).join(", "),
  ]);
  return h("section", {}, h(heading, { class: "minor" }, "Made with"), h("table", { class: "list" }, h("thead", {}, h("tr", {}, ["began (UTC)", "commit", "versions", "on"].map((name) => h("th", {}, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((text) => h("td", {}, plainText(text))))))));
}

function waitingList(now) {
  if (now.state === "finished") return h("p", { class: "note" }, "The run is finished: nothing is waited for.");
  if (now.state !== "running") return h("p", { class: "note" }, "The run has stopped before its end: nobody works on it. ", now.checkpoint ? `lightning-rl train --resume goes on behind its checkpoint ${now.checkpoint}.` : "It has no checkpoint: lightning-rl train --resume begins it again.");
  if (!now.waiting.length) return h("p", { class: "note" }, "Nobody waits.");
  return h("ul", { class: "plain" }, now.waiting.map((each) => h("li", {}, h("b", {}, plainText(each.who)), " waits for ", plainText(each.what))));
}

function engineTable(server, state) {
  if (!server) return h("p", { class: "note" }, state === "running" ? "The server of this run cannot be asked: its key is not in the folder." : "Engines run while the run does.");
  if (server.problem) return h("p", { class: "problem" }, plainText(server.problem));
  return h("table", { class: "narrow" }, h("thead", {}, h("tr", {}, ["model", "kind", "in flight", "version", "state"].map((name) => h("th", {}, name)))),
    h("tbody", {}, server.engines.map((engine) => h("tr", { title: engine.url }, h("td", {}, plainText(engine.model)), h("td", {}, engine.kind), h("td", { class: "right" }, number(engine.in_flight)), h("td", { class: "right" }, number(engine.policy_version)), h("td", {}, engine.away ? chip(plainText(engine.away), "warn") : chip("well", "succeeded"))))));
}

export function findingList(doctor, run) {
  if (!doctor) return null;
  const rows = (doctor.findings ?? []).map((finding) => h("li", {}, chip(finding.severity, finding.severity === "look at it" ? "info" : "warn"), ` ${finding.policy ? `${plainText(finding.policy)}: ` : ""}${plainText(finding.told)} `, h("div", { class: "note" }, plainText(finding.advice), finding.rollout && !isReport() ? [" ", h("a", { href: link(run, "rollout", finding.rollout) }, shortId(finding.rollout))] : null)));
  return [h("h2", { class: "minor" }, "Doctor"), doctor.problem ? h("p", { class: "problem" }, plainText(doctor.problem)) : doctor.pending ? h("p", { class: "note" }, "looking through the run…") : rows.length ? h("ul", { class: "plain" }, rows) : h("p", { class: "note" }, "Nothing was found that keeps this run from learning.")];
}

function openTable(run, now) {
  const { open } = now.rollouts;
  if (!open.length) return empty("No rollout is open.");
  const at = Date.now() / 1000;
  const more = open.length > OPEN_ROWS ? h("p", { class: "note" }, `and ${open.length - OPEN_ROWS} more: `, h("a", { href: link(run, "rollouts", null, { status: "running" }) }, "all that run")) : null;
  return [h("table", { class: "narrow" }, h("thead", {}, h("tr", {}, ["rollout", "status", "for", "task"].map((name) => h("th", {}, name)))),
    h("tbody", {}, open.slice(0, OPEN_ROWS).map((row) => h("tr", {}, h("td", {}, h("a", { href: link(run, "rollout", row.rollout_id) }, shortId(row.rollout_id))), h("td", {}, chip(row.status, row.status)), h("td", { class: "right" }, duration(Math.max(at - row.created, 0))), h("td", { class: "wide" }, taskText(row.task)))))), more];
}
