// Curves as SVG: several series over steps or seconds, the values under the pointer, and a table for who cannot see them.

import { h, s, replaced, number, duration } from "./dom.js";

const CURVE_WIDTH = 560, CURVE_HEIGHT = 210;
const MARGIN = { left: 52, right: 12, top: 10, bottom: 24 };
const MOST_POINTS = 1200; // of one curve: more than there are pixels say nothing more

export function curve(title, lines, { x = "step", marks = [] } = {}) {
  const drawn = lines.filter((line) => line.points && line.points.value.length);
  const head = h("figcaption", {}, h("b", {}, title));
  if (!drawn.length) return h("figure", { class: "curve" }, head, h("p", { class: "empty" }, "no values yet"));
  const scales = scalesOf(drawn, x);
  const told = h("span", { class: "told" }, lastValues(drawn));
  head.append(told);
  const cursor = s("line", { class: "cursor", y1: MARGIN.top, y2: CURVE_HEIGHT - MARGIN.bottom, visibility: "hidden" });
  const dots = s("g", {});
  const picture = s("svg", { viewBox: `0 0 ${CURVE_WIDTH} ${CURVE_HEIGHT}`, role: "img", "aria-label": `${title}: ${lastValues(drawn)}` },
    axes(scales, x), marks.map((mark) => s("line", { class: "mark", x1: scales.x(mark), x2: scales.x(mark), y1: MARGIN.top, y2: CURVE_HEIGHT - MARGIN.bottom })),
    drawn.map((line) => oneLine(line, scales, x)), cursor, dots);
  picture.addEventListener("pointermove", (event) => {
    const place = picture.getBoundingClientRect();
    const at = scales.invert(((event.clientX - place.left) / place.width) * CURVE_WIDTH);
    const near = drawn.map((line) => nearest(line, x, at));
    const where = scales.x(near[0][0]);
    cursor.setAttribute("x1", where);
    cursor.setAttribute("x2", where);
    cursor.setAttribute("visibility", "visible");
    replaced(dots, near.map(([px, py], index) => s("circle", { cx: scales.x(px), cy: scales.y(py), r: 3.5, class: `line${drawn[index].colour}` })));
    told.textContent = `${x === "step" ? `step ${number(near[0][0])}` : duration(near[0][0])}: ` + near.map(([, py], index) => (drawn.length > 1 ? `${drawn[index].label} ` : "") + number(py, 4)).join("   ");
  });
  picture.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    replaced(dots);
    told.textContent = lastValues(drawn);
  });
  const legend = drawn.length > 1 ? h("div", { class: "legend" }, drawn.map((line) => h("span", {}, h("i", { class: `swatch line${line.colour}` }), line.label))) : null;
  return h("figure", { class: "curve" }, head, picture, legend, valuesTable(drawn, x));
}

function scalesOf(lines, x) {
  const xs = lines.flatMap((line) => line.points[x]), ys = lines.flatMap((line) => line.points.value);
  const left = Math.min(...bounds(xs)), right = Math.max(...bounds(xs));
  let [low, high] = bounds(ys);
  if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const room = (high - low) * 0.06;
  low -= room; high += room;
  const width = CURVE_WIDTH - MARGIN.left - MARGIN.right, height = CURVE_HEIGHT - MARGIN.top - MARGIN.bottom;
  const span = right - left || 1;
  return {
    left, right, low, high,
    x: (value) => MARGIN.left + ((value - left) / span) * width,
    y: (value) => MARGIN.top + (1 - (value - low) / (high - low)) * height,
    invert: (place) => left + ((place - MARGIN.left) / width) * span,
  };
}

function bounds(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}

export function ticks(low, high, most) {
  const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

function axes(scales, x) {
  const bottom = CURVE_HEIGHT - MARGIN.bottom;
  return s("g", { class: "axes" },
    ticks(scales.low, scales.high, 4).map((value) => [
      s("line", { x1: MARGIN.left, x2: CURVE_WIDTH - MARGIN.right, y1: scales.y(value), y2: scales.y(value) }),
      s("text", { x: MARGIN.left - 6, y: scales.y(value) + 4, "text-anchor": "end" }, axisNumber(value)),
    ]),
    ticks(scales.left, scales.right, 7).filter((value) => x !== "step" || Number.isInteger(value)).map((value) =>
      s("text", { x: scales.x(value), y: bottom + 16, "text-anchor": "middle" }, x === "step" ? number(value) : duration(value))),
    s("line", { class: "base", x1: MARGIN.left, x2: CURVE_WIDTH - MARGIN.right, y1: bottom, y2: bottom }));
}

function axisNumber(value) {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(0) : String(Number(value.toPrecision(4)));
}

function oneLine(line, scales, x) {
  const { value } = line.points, places = line.points[x], every = Math.ceil(value.length / MOST_POINTS);
  const points = [];
  for (let index = 0; index < value.length; index += 1) {
    if (index % every === 0 || index === value.length - 1) points.push(`${scales.x(places[index]).toFixed(1)},${scales.y(value[index]).toFixed(1)}`);
  }
  const path = s("polyline", { class: `stroke line${line.colour}`, points: points.join(" ") });
  if (points.length > 40) return path;
  return s("g", {}, path, points.map((point) => s("circle", { class: `line${line.colour}`, cx: point.split(",")[0], cy: point.split(",")[1], r: 2.2 })));
}

function nearest(line, x, at) {
  const places = line.points[x];
  let best = 0;
  for (let index = 1; index < places.length; index += 1) if (Math.abs(places[index] - at) < Math.abs(places[best] - at)) best = index;
  return [places[best], line.points.value[best]];
}

function lastValues(lines) {
  return lines.map((line) => (lines.length > 1 ? `${line.label} ` : "") + number(line.points.value.at(-1), 4)).join("   ");
}

function valuesTable(lines, x) {
  const body = h("tbody", {});
  const table = h("details", { class: "values", ontoggle: () => {
    if (!table.open || body.children.length) return;
    for (const line of lines) line.points.value.slice(-200).forEach((value, index, all) => {
      const place = line.points[x].at(index - all.length);
      body.append(h("tr", {}, lines.length > 1 ? h("td", {}, line.label) : null, h("td", {}, x === "step" ? number(place) : duration(place)), h("td", {}, number(value, 4))));
    });
  } }, h("summary", {}, "as a table"), h("table", {}, body));
  return table;
}

export function sparkline(points) {
  if (!points || points.value.length < 2) return h("span", {});
  const [low, high] = bounds(points.value), width = 96, height = 22, last = points.value.length - 1;
  const at = points.value.map((value, index) => `${((index / last) * (width - 4) + 2).toFixed(1)},${(height - 3 - ((value - low) / (high - low || 1)) * (height - 6)).toFixed(1)}`);
  return s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `from ${number(points.value[0])} to ${number(points.value[last])}` },
    s("polyline", { class: "stroke line0", points: at.join(" ") }));
}
