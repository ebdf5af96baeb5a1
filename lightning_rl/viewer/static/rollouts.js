// The table of rollouts: filters, any column to sort by, and rows that are drawn only where they are seen.

import { h, replaced, number, signed, duration, shortId, taskText, select, empty } from "./dom.js";
import { ask, link, ofRun } from "./data.js";

const ROW_HEIGHT = 28, PAGE_ROWS = 200, ROOM = 12;
const FILTERS = ["text", "mode", "status", "agent", "excluded", "step", "reward_min", "reward_max", "group_id", "task_key"];
const TABLE_COLUMNS = [
  ["rollout_id", "rollout", (row) => shortId(row.rollout_id)],
  ["step", "step", (row) => number(row.step)],
  ["mode", "mode", (row) => row.mode],
  ["status", "status", (row) => row.status],
  ["reward", "reward", (row) => number(row.reward)],
  ["advantage", "advantage", (row) => signed(row.advantage)],
  ["calls", "calls", (row) => number(row.calls)],
  ["sampled", "tokens", (row) => number(row.sampled)],
  ["trained", "trained", (row) => number(row.trained)],
  ["seconds", "time", (row) => duration(row.seconds)],
  ["attempts", "tries", (row) => number(row.attempts)],
  ["agent", "agent", (row) => row.agent ?? ""],
  ["task", "task", (row) => row.error ? `⚠ ${row.error.length > 80 ? `${row.error.slice(0, 80)}…` : row.error} · ${taskText(row.task)}` : taskText(row.task)],
];
const RIGHT = new Set(["step", "reward", "advantage", "calls", "sampled", "trained", "seconds", "attempts"]);

export async function rolloutsView(place, { run, query, go }) {
  const known = await ask(ofRun(run, "choices"));
  const wanted = { ...query };
  const columns = TABLE_COLUMNS.filter(([name]) => (name !== "agent" || Object.keys(known.agent).length) && true);
  const count = h("span", { class: "count", role: "status" });
  const table = rowsTable(run, wanted, columns, count, (sort) => apply({ sort }));
  const apply = (changes) => {
    Object.assign(wanted, changes);
    for (const name of Object.keys(wanted)) if (wanted[name] === "" || wanted[name] === null) delete wanted[name];
    go(wanted, true);
    table.begin();
  };
  const words = h("input", { type: "search", placeholder: "words of task, prompt or answer; *part of one", value: wanted.text ?? "", "aria-label": "words in the conversation", id: "search" });
  words.addEventListener("input", debounced(() => apply({ text: words.value }), 220));
  const choice = (name, label, values) => Object.keys(values).length ? select(label, [["", "all"], ...Object.entries(values).map(([value, n]) => [value, `${value.replaceAll("_", " ")} (${number(n)})`])], wanted[name], (value) => apply({ [name]: value })) : null;
  const bound = (name, label, wide) => { const field = h("input", { type: "number", step: "any", value: wanted[name] ?? "", "aria-label": label, class: wide ? "" : "short" }); field.addEventListener("change", () => apply({ [name]: field.value })); return field; };
  const only = ["group_id", "task_key"].filter((name) => wanted[name]).map((name) => h("button", { type: "button", class: "chip", onclick: (event) => { event.target.remove(); apply({ [name]: "" }); } }, `${name.replace("_", " ")} ${wanted[name]} ✕`));
  replaced(place, h("div", { class: "filters" },
    h("label", { class: "field grow" }, h("span", {}, "search"), words),
    choice("mode", "mode", known.mode), choice("status", "status", known.status), choice("agent", "agent", known.agent), choice("excluded", "not trained", known.excluded),
    h("label", { class: "field" }, h("span", {}, "step"), bound("step", "step")),
    h("label", { class: "field" }, h("span", {}, "reward"), h("span", {}, bound("reward_min", "reward from"), " to ", bound("reward_max", "reward to"))), only,
    h("button", { type: "button", class: "quiet", onclick: () => { go({}); } }, "clear"), count), table.element);
  await table.begin();
  return { move: table.move, focusSearch: () => words.focus(), fresh: () => { table.note(); } };
}

function debounced(act, wait) {
  let timer = null;
  return () => { clearTimeout(timer); timer = setTimeout(act, wait); };
}

function rowsTable(run, wanted, columns, count, sortBy) {
  let rows = [], next = null, loading = false, turn = 0, chosen = -1, total = 0;
  const spacer = h("div", { class: "spacer-rows" }), drawn = h("div", { class: "rows", role: "rowgroup" });
  const heads = h("div", { class: "row head", role: "row" });
  const scroller = h("div", { class: "scroller", tabindex: 0, role: "table", "aria-label": "rollouts" }, heads, spacer, drawn);
  const headRow = () => replaced(heads, columns.map(([name, label]) => {
    const sort = wanted.sort ?? "-position", active = sort.replace("-", "") === name;
    return h("span", { role: "columnheader", class: RIGHT.has(name) ? "right" : "", "aria-sort": active ? (sort.startsWith("-") ? "descending" : "ascending") : "none" }, h("button", { type: "button", class: "link", onclick: () => { sortBy(active && sort.startsWith("-") ? name : `-${name}`); } }, label, active ? (sort.startsWith("-") ? " ↓" : " ↑") : ""));
  }));
  const draw = () => {
    const top = Math.max(Math.floor((scroller.scrollTop - ROW_HEIGHT) / ROW_HEIGHT) - ROOM, 0), seen = Math.ceil(scroller.clientHeight / ROW_HEIGHT) + 2 * ROOM;
    spacer.style.height = `${rows.length * ROW_HEIGHT}px`;
    drawn.style.transform = `translateY(${top * ROW_HEIGHT}px)`;
    replaced(drawn, rows.slice(top, top + seen).map((row, index) => oneRow(row, top + index)));
    if (next !== null && top + seen + ROOM >= rows.length) load();
  };
  const oneRow = (row, index) => h("a", { class: `row${index === chosen ? " chosen" : ""} ${row.error ? "failed" : ""}`, role: "row", href: link(run, "rollout", row.rollout_id), tabindex: -1, title: row.error ?? null },
    columns.map(([name, , cell]) => h("span", { role: "cell", class: `${RIGHT.has(name) ? "right " : ""}cell-${name} ${name === "status" ? row.status : ""}` }, cell(row))));
  const load = async (first = false) => {
    if (loading && !first) return;
    loading = true;
    const mine = turn;
    try {
      const page = await ask(ofRun(run, "rollouts"), { ...queryOf(wanted), limit: String(PAGE_ROWS), after: first ? "" : next });
      if (mine !== turn) return;
      rows = first ? page.rollouts : [...rows, ...page.rollouts];
      next = page.next;
      if (page.total !== null) total = page.total;
      replaced(count, `${number(total)} rollouts`);
      if (!rows.length) replaced(drawn, page.problem ? h("p", { class: "problem" }, page.problem) : empty("No rollout fits these filters."));
      else draw();
      if (!rows.length) spacer.style.height = "0";
    } catch (error) {
      replaced(drawn, h("p", { class: "problem" }, error.message));
    } finally {
      if (mine === turn) loading = false;
    }
  };
  let waiting = false;
  scroller.addEventListener("scroll", () => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; if (rows.length) draw(); }); } });
  scroller.addEventListener("keydown", (event) => { if (event.key === "Enter" && chosen >= 0) location.hash = link(run, "rollout", rows[chosen].rollout_id); });
  const move = (by) => {
    if (!rows.length) return;
    chosen = Math.max(0, Math.min(rows.length - 1, chosen + by));
    const top = chosen * ROW_HEIGHT;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    if (top + 3 * ROW_HEIGHT > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + 3 * ROW_HEIGHT - scroller.clientHeight;
    draw();
    scroller.focus();
  };
  const begin = async () => { turn += 1; loading = false; chosen = -1; scroller.scrollTop = 0; headRow(); await load(true); };
  const note = async () => {
    if (scroller.scrollTop > ROW_HEIGHT || chosen >= 0) replaced(count, `${number(total)} rollouts `, h("button", { type: "button", class: "quiet", onclick: begin }, "there is more: show"));
    else { turn += 1; loading = false; await load(true); }
  };
  return { element: scroller, begin, move, note };
}

function queryOf(wanted) {
  const found = {};
  for (const name of [...FILTERS, "sort"]) if (wanted[name]) found[name] = wanted[name];
  return found;
}
