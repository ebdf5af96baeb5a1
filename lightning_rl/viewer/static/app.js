// The page: which view an address means, what keys do, and when to look again.

import { h, replaced, plainText } from "./dom.js";
import { ask, link } from "./data.js";
import { rolloutView } from "./rollout.js";
import { rolloutsView } from "./rollouts.js";
import { groupView, groupsView, taskView, tasksView } from "./groups.js";
import { configView, runsView } from "./runs.js";
import { nowView } from "./now.js";

const VIEWS = { now: nowView, rollouts: rolloutsView, rollout: rolloutView, groups: groupsView, group: groupView, tasks: tasksView, task: taskView, config: configView };
const TABS = [["now", "Now"], ["rollouts", "Rollouts"], ["groups", "Groups"], ["tasks", "Then and now"], ["config", "Config"]];
const TAB_OF = { rollout: "rollouts", group: "groups", task: "tasks" };
const KEYS = [
  ["/", "search rollouts"], ["j k", "next and previous row, or rollout of the group"], ["Enter", "open the row"], ["n", "now"], ["r", "rollouts"], ["g", "groups"], ["a", "all runs"],
  ["1 – 9", "colour tokens: 1 plain text, 2 mask, 3 advantage, 4 logprob, 5 trainer, 6 difference, 7 ratio, 8 entropy, 9 version"], ["← →", "the numbers of each token, in a block that has the focus"], ["t", "light or dark"], ["Esc", "close this"],
];
const COLOUR_KEYS = ["text", "mask", "advantage", "logprob", "trainer", "difference", "ratio", "entropy", "version"];
const LOOK_AGAIN_MS = 2000;

const page = { runs: [], at: null, view: {}, turn: 0, stamp: "" };
const root = document.getElementById("app");
const bar = h("header", { class: "bar" }), notice = h("div", { role: "status" }), main = h("main", { id: "main", tabindex: -1 });

function addressOf(hash) {
  const [path, words] = hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  const query = Object.fromEntries(new URLSearchParams(words ?? ""));
  if (parts[0] === "run" && parts[1]) return { run: parts[1], view: parts[2] || "now", name: parts.slice(3).join("/"), query };
  return { run: null, view: "runs", name: "", query };
}

function drawBar() {
  const { run, view } = page.at, told = page.runs.find((each) => each.key === run);
  const others = page.runs.length > 1 && run ? h("select", { "aria-label": "run", onchange: (event) => { location.hash = link(event.target.value, TAB_OF[view] ?? view); } }, page.runs.map((each) => h("option", { value: each.key, selected: each.key === run }, each.name))) : told ? h("span", { class: "run-name" }, plainText(told.name)) : null;
  replaced(bar, h("h1", {}, h("a", { class: "brand", href: "#/" }, "lightning_rl")), others,
    h("nav", { "aria-label": "views" }, page.runs.length > 1 || !run ? h("a", { href: "#/", "aria-current": view === "runs" ? "page" : null }, "Runs") : h("a", { href: "#/" }, "Run"), run ? TABS.map(([name, label]) => h("a", { href: link(run, name), "aria-current": (TAB_OF[view] ?? view) === name ? "page" : null }, label)) : null),
    h("span", { class: "spacer" }), indexState(told), h("button", { type: "button", class: "quiet", title: "light or dark (t)", onclick: turnTheme }, "◐"), h("button", { type: "button", class: "quiet", title: "keys (?)", onclick: showKeys }, "?"));
}

function indexState(told) {
  if (!told || told.indexed === undefined || (told.listed && told.indexed >= 1)) return null;
  return h("span", { class: "note" }, told.listed ? `searches find ${Math.floor(told.indexed * 100)} % of the calls so far` : "reading the rollouts…");
}

async function show() {
  const mine = ++page.turn, at = addressOf(location.hash);
  page.at = at;
  page.view = {};
  page.stamp = stampOf();
  if (at.run && !page.runs.some((run) => run.key === at.run)) await readRuns();
  drawBar();
  document.title = `${[at.name || (at.view === "runs" ? "runs" : at.view), at.run].filter(Boolean).join(" · ")} · lightning_rl`;
  const place = h("div", { class: `view view-${at.view}` });
  const slow = setTimeout(() => { if (mine === page.turn) replaced(main, h("p", { class: "empty" }, "reading…")); }, 250);
  const go = (query, quietly = false) => {
    const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""));
    const hash = `${location.hash.split("?")[0] || "#/"}${words.size ? `?${words}` : ""}`;
    if (!quietly) location.hash = hash;
    else history.replaceState(null, "", hash);
  };
  try {
    const view = VIEWS[at.view] ?? runsView;
    const made = await view(place, { ...at, go, runs: page.runs });
    if (mine !== page.turn) return;
    page.view = made ?? {};
    replaced(main, place);
    if (at.view === "rollouts") window.dispatchEvent(new Event("resize"));
  } catch (error) {
    if (mine === page.turn) replaced(main, h("p", { class: "problem", role: "alert" }, error.message));
  } finally {
    clearTimeout(slow);
  }
}

async function readRuns() {
  page.runs = (await ask("runs")).runs;
  const told = page.runs.find((each) => each.key === page.at?.run);
  replaced(notice, told?.problem ? h("p", { class: "problem" }, plainText(told.problem)) : null);
}

async function lookAgain() {
  if (document.hidden) return;
  try {
    await readRuns();
  } catch (error) {
    replaced(notice, h("p", { class: "problem" }, error.message));
    return;
  }
  const told = page.runs.find((each) => each.key === page.at.run), before = page.stamp;
  page.stamp = stampOf();
  drawBar();
  if (before === page.stamp && !(page.at.view === "now" && told?.state === "running")) return;
  try {
    await page.view.refresh?.();
    page.view.fresh?.();
  } catch (error) {
    replaced(notice, h("p", { class: "problem" }, error.message));
  }
}

// What is another one once what is shown may be out of date.
function stampOf() {
  const { run } = page.at, told = page.runs.find((each) => each.key === run);
  return JSON.stringify(run ? [told?.version, told?.steps, told?.state] : page.runs.map((each) => [each.key, each.steps, each.state]));
}

function turnTheme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(dark ? "light" : "dark");
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("lightning_rl.theme", name); } catch { /* kept for this page alone */ }
}

function showKeys() {
  const box = h("dialog", { class: "keys", onclose: () => box.remove() }, h("h3", {}, "Keys"), h("table", {}, KEYS.map(([key, does]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, does)))), h("form", { method: "dialog" }, h("button", {}, "close")));
  document.body.append(box);
  box.showModal();
}

function sibling(by) {
  const { rollout } = page.view;
  const index = rollout?.group?.findIndex((each) => each.rollout_id === rollout.rollout_id) ?? -1;
  const next = rollout?.group?.[index + by];
  if (index >= 0 && next) location.hash = link(page.at.run, "rollout", next.rollout_id, page.at.query.colour ? { colour: page.at.query.colour } : {});
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const { run } = page.at, step = { j: 1, k: -1 }[event.key];
  if (event.key === "?") showKeys();
  else if (event.key === "t") turnTheme();
  else if (event.key === "a") location.hash = "#/";
  else if (event.key === "/" && run) { event.preventDefault(); if (page.view.focusSearch) page.view.focusSearch(); else location.hash = link(run, "rollouts"); }
  else if (step && page.view.move) page.view.move(step);
  else if (step) sibling(step);
  else if (run && "nrg".includes(event.key)) location.hash = link(run, { n: "now", r: "rollouts", g: "groups" }[event.key]);
  else if (page.view.colour && /^[1-9]$/.test(event.key)) page.view.colour(COLOUR_KEYS[Number(event.key) - 1]);
});

async function begin() {
  try { const kept = localStorage.getItem("lightning_rl.theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* the system's theme */ }
  replaced(root, bar, notice, main);
  page.at = addressOf(location.hash);
  try {
    await readRuns();
    if (!location.hash && page.runs.length === 1) history.replaceState(null, "", link(page.runs[0].key, "now"));
  } catch (error) {
    replaced(main, h("p", { class: "problem", role: "alert" }, error.message));
    return;
  }
  addEventListener("hashchange", show);
  await show();
  setInterval(lookAgain, LOOK_AGAIN_MS);
}

begin();
