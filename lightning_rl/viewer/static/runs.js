// The runs: how each fares, their curves over one another, what differs between two configs.

import { h, replaced, chip, metricName, number, duration, select, empty, plainText } from "./dom.js";
import { ask, link, ofRun } from "./data.js";
import { curve, sparkline } from "./curve.js";
import { madeWith } from "./now.js";

const FIRST_CURVES = ["critic/score/mean", "val/reward", "actor/entropy", "response_length/mean"];
const MOST_OVERLAID = 8;

export async function runsView(place, { query, go, runs }) {
  if (!runs.length) return replaced(place, empty("There is no run here."));
  const chosen = new Set((query.runs ?? runs.slice(0, 3).map((run) => run.key).join(",")).split(",").filter((key) => runs.some((run) => run.key === key)));
  const state = { x: query.x ?? "step", metrics: (query.metrics ?? "").split(",").filter(Boolean) };
  const keep = (changes) => go({ ...query, runs: [...chosen].join(","), x: state.x === "step" ? null : state.x, metrics: state.metrics.join(",") || null, ...changes }, true);
  const curves = h("section", {}), differences = h("section", {});
  const update = async () => {
    const keys = [...chosen].slice(0, MOST_OVERLAID);
    const told = await Promise.all(keys.map((key) => ask(ofRun(key, "metrics"), state.metrics.length ? { names: [...new Set([...FIRST_CURVES, ...state.metrics])].join(",") } : {}).catch((error) => ({ problem: error.message, series: {}, names: [] }))));
    replaced(curves, curvesOf(keys, told, state, runs, () => { keep(); update(); }));
    replaced(differences, keys.length > 1 ? await configDifference(keys.slice(0, 2), runs) : null);
  };
  const table = h("table", { class: "list" }, h("thead", {}, h("tr", {}, ["curve", "run", "state", "steps", "best", "last", "reward", "time", "written"].map((name, index) => h("th", { class: index > 2 && index !== 6 ? "right" : "" }, name)))),
    h("tbody", {}, runs.map((run) => h("tr", {}, h("td", {}, h("input", { type: "checkbox", checked: chosen.has(run.key), "aria-label": `show ${run.name}`, onchange: (event) => { if (event.target.checked) chosen.add(run.key); else chosen.delete(run.key); keep(); update(); } })),
      h("td", { class: "wide" }, h("a", { href: link(run.key, "now") }, plainText(run.name)), run.problem ? h("div", { class: "problem" }, plainText(run.problem)) : h("div", { class: "note path" }, plainText(run.folder ?? ""))),
      h("td", {}, chip(run.state, run.state)), h("td", { class: "right" }, number(run.steps ?? null)),
      h("td", { class: "right tight", title: run.best ? `${run.best.label}, at step ${run.best.step}` : "" }, run.best ? [number(run.best.value), h("div", { class: "note" }, `${run.best.label}, step ${run.best.step}`)] : run.evaluations?.length ? h("div", { class: "note" }, run.evaluations.map((told) => h("div", {}, plainText(told)))) : "–"), h("td", { class: "right" }, run.best ? number(run.best.last) : "–"),
      h("td", {}, sparkline(run.curve)), h("td", { class: "right tight" }, run.seconds ? duration(run.seconds) : "–"), h("td", { class: "right note tight" }, run.written ? new Date(run.written * 1000).toLocaleString() : "–")))));
  replaced(place, table, curves, differences);
  await update();
  return { refresh: update };
}

function curvesOf(keys, told, state, runs, changed) {
  if (!keys.length) return empty("Choose runs above to see their curves.");
  const names = [...new Set(told.flatMap((each) => each.names))];
  const has = (metric) => told.some((each) => each.series[metric]);
  const shown = [...FIRST_CURVES.filter(has), ...state.metrics.filter((metric) => !FIRST_CURVES.includes(metric))];
  const named = (key) => runs.find((run) => run.key === key)?.name ?? key;
  const picker = select("add a metric", [["", "…"], ...names.map((name) => [name, name])], "", (name) => { if (name && !state.metrics.includes(name)) state.metrics.push(name); changed(); });
  const axis = select("by", [["step", "step"], ["seconds", "time since its beginning"]], state.x, (x) => { state.x = x; changed(); });
  return [h("div", { class: "filters apart" }, h("h2", { class: "minor" }, "Curves"), axis, picker, state.metrics.map((metric) => h("button", { type: "button", class: "chip", onclick: () => { state.metrics = state.metrics.filter((each) => each !== metric); changed(); } }, `${metric} ✕`)), told.filter((each) => each.problem).map((each) => h("span", { class: "problem" }, each.problem))),
    shown.length ? h("div", { class: "curves" }, shown.map((metric) => curve(metricName(metric), keys.map((key, index) => ({ label: named(key), colour: index, points: told[index].series[metric] })), { x: state.x }))) : empty("No step is done yet: curves begin with the first.")];
}

// The config, with the commit and the versions of the run's last session.
function settings(told) {
  const last = told.made_with?.at(-1);
  if (!last) return told.config;
  const versions = Object.entries(last.versions).map(([name, value]) => [`(${name})`, value]);
  return { ...told.config, "(commit)": last.commit, "(files changed since)": last.changed_files, ...Object.fromEntries(versions) };
}

async function configDifference(keys, runs) {
  const [one, two] = (await Promise.all(keys.map((key) => ask(ofRun(key, "config")).catch(() => ({ config: {} }))))).map(settings);
  const names = [...new Set([...Object.keys(one), ...Object.keys(two)])].filter((name) => JSON.stringify(one[name]) !== JSON.stringify(two[name])).sort();
  const title = keys.map((key) => runs.find((run) => run.key === key)?.name ?? key);
  return [h("h2", { class: "minor" }, `What differs between ${title[0]} and ${title[1]}`), names.length ? h("table", { class: "list" }, h("thead", {}, h("tr", {}, h("th", {}, "key"), title.map((name) => h("th", {}, name)))), h("tbody", {}, names.map((name) => h("tr", {}, h("td", { class: "mono" }, name), [one, two].map((each) => h("td", { class: "mono" }, name in each ? plainText(JSON.stringify(each[name])) : "–")))))) : h("p", { class: "note" }, "Their configs, commits and versions are the same.")];
}

export async function configView(place, { run }) {
  const told = await ask(ofRun(run, "config"));
  const entries = Object.entries(told.config), field = h("input", { type: "search", placeholder: "a part of a key or value", "aria-label": "filter keys" });
  const body = h("tbody", {});
  const draw = () => replaced(body, entries.filter(([name, value]) => `${name}=${JSON.stringify(value)}`.toLowerCase().includes(field.value.toLowerCase())).map(([name, value]) => h("tr", {}, h("td", { class: "mono" }, name), h("td", { class: "mono" }, plainText(JSON.stringify(value))))));
  field.addEventListener("input", draw);
  draw();
  replaced(place, h("div", { class: "filters" }, h("label", { class: "field grow" }, h("span", {}, "filter"), field)), entries.length ? h("table", { class: "list" }, body) : empty("This folder has no config.yaml: it was no training run, or its rollouts are at a server."), madeWith(told.made_with, "h2"));
  return {};
}
