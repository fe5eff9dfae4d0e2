"use strict";
// Line charts in SVG. All of them share one horizontal axis and its zoom, so that a spike in one can be looked up in the
// others. What comes from a run's files only ever becomes a text node or a number.

const DASHES = ["", "6 3", "2 3", "9 3 2 3"];
const NUM_COLOURS = 8;
const COLUMN_OF_AXIS = {step: "steps", tokens: "tokens", time: "seconds"};
const view = {axis: "step", range: null, listeners: []};

// Sets attributes, styles and listeners. A style is an object, because the page's policy allows no style attributes.
function set(node, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  return node;
}

function filled(node, properties, children) {
  set(node, properties).append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const element = (tag, properties = {}, ...children) => filled(document.createElement(tag), properties, children);
const shape = (tag, properties, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);

// Returns a button that is pressed or not. `act` is called with whether it is pressed when that changes.
function toggle(isPressed, act, properties, ...children) {
  const button = element("button", {type: "button", "aria-pressed": String(isPressed), ...properties}, ...children);
  button.addEventListener("click", () => {
    isPressed = !isPressed;
    button.setAttribute("aria-pressed", String(isPressed));
    act(isPressed);
  });
  return button;
}

function panel(title, ...children) {
  return element("section", {class: "panel"}, title ? element("div", {class: "heading"}, element("h3", {}, title)) : null, ...children);
}

const missing = (text) => element("p", {class: "missing"}, text);
const colour = (index) => `var(--line-${index % NUM_COLOURS})`;

// ---- numbers as they are read

function shortNumber(value) {
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return trimmed(value / (limit === 1e4 ? 1e3 : limit), 4) + unit;
  }
  if (size > 0 && size < 1e-4) return value.toExponential(1).replace(".0e", "e");
  return trimmed(value, 4);
}

const trimmed = (value, digits) => String(Number(value.toPrecision(digits)));

function readOut(value, chart) {
  if (value === null) return "not known";
  if (chart.percent) return (100 * value).toFixed(1) + " %";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return Number(value.toPrecision(5)).toString();
}

function timeUnit(seconds) {
  if (seconds < 180) return [1, "s"];
  return seconds < 10800 ? [60, "min"] : [3600, "h"];
}

function axisText(value) {
  if (view.axis === "step") return "step " + Math.round(value).toLocaleString("en-US");
  if (view.axis === "tokens") return Math.round(value).toLocaleString("en-US") + " tokens";
  const [unit, name] = timeUnit(value);
  return (value / unit).toFixed(1) + " " + name;
}

// ---- scales

function niceTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || rough;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of [1, 2, 5]) ticks.push(Number((factor * 10 ** power).toPrecision(3)));
  }
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  const decades = inside.filter((tick) => Number.isInteger(Number(Math.log10(tick).toFixed(9))));
  if (decades.length > 4) return decades;
  return inside.length > 1 ? inside : niceTicks(low, high, 4);
}

function interpolate(from, to, value) {
  if (from.length < 2) return value;
  let low = 0, high = from.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= value) low = middle; else high = middle;
  }
  const width = from[high] - from[low];
  return width ? to[low] + (to[high] - to[low]) * (value - from[low]) / width : to[low];
}

const fromStep = (clock, step) => view.axis === "step" ? step : interpolate(clock.steps, clock[COLUMN_OF_AXIS[view.axis]], step);
const toStep = (clock, value) => view.axis === "step" ? value : interpolate(clock[COLUMN_OF_AXIS[view.axis]], clock.steps, value);

function setView(axis, range) {
  view.axis = axis;
  view.range = range;
  for (const listener of view.listeners) listener();
}

// ---- a chart

function lineChart(chart, runs) {
  if (!chart.series.length) return panel(chart.title, missing(chart.missing));
  const canvas = shape("svg", {role: "img", tabindex: "0", "aria-label": `${chart.title}: a chart. Arrow keys read values, Escape shows all steps.`});
  const tip = element("div", {class: "tip", hidden: ""});
  const box = element("div", {class: "plot"}, canvas, tip);
  const legend = element("div", {class: "legend"});
  const node = panel(chart.title, box, legend);
  let isLog = false, drawn = [], scale = null, cursor = null, dragFrom = null;
  const byRun = runs.length > 1 && !chart.byStage;
  const dot = (line, cx, cy, r) => shape("circle", {cx, cy, r, fill: line.colour});
  chart.series.forEach((line, index) => {
    line.colour = colour(byRun ? line.run : index);
    line.dash = DASHES[(byRun ? line.variant : Math.floor(index / NUM_COLOURS)) % DASHES.length];
    const swatch = shape("svg", {class: "swatch", width: 22, height: 10, "aria-hidden": "true"},
      shape("line", {x1: 1, x2: 21, y1: 5, y2: 5, stroke: line.colour, "stroke-dasharray": line.dash}), line.marks ? dot(line, 11, 5, 3) : null);
    legend.append(toggle(true, (isShown) => { line.isHidden = !isShown; draw(); }, {title: "Show or hide this line"}, swatch, line.name));
  });
  if (!chart.percent && chart.series.some((line) => line.y.some((y) => y > 0))) {
    const act = (isPressed) => { isLog = isPressed; draw(); };
    node.querySelector(".heading").append(toggle(false, act, {class: "small", title: "Logarithmic vertical axis"}, "log"));
  }

  const along = (line, steps) => steps.map((step) => fromStep(runs[line.run].clock, step));
  const isOnScale = (value) => value !== null && !(isLog && value <= 0);

  function bounds() {
    const ends = chart.series.flatMap((line) => along(line, [line.x[0], line.x[line.x.length - 1]]));
    let [left, right] = view.range || [Math.min(...ends), Math.max(...ends)];
    if (!(right > left)) [left, right] = [left - 1, left + 1];
    let low = Infinity, high = -Infinity;
    for (const {line, xs} of drawn) {
      line.y.forEach((y, i) => {
        // The neighbours of a visible point count too: a line leads to them.
        const isNear = (xs[i + 1] ?? xs[i]) >= left && (xs[i - 1] ?? xs[i]) <= right;
        if (isNear && isOnScale(y)) { low = Math.min(low, y); high = Math.max(high, y); }
      });
    }
    if (low > high) [low, high] = isLog ? [0.1, 1] : [0, 1];
    if (chart.zero && !isLog && low >= 0) low = 0;
    if (low === high) { const pad = Math.abs(low) * 0.05 || 0.5; low -= chart.zero && low === 0 ? 0 : pad; high += pad; }
    if (isLog) return {left, right, low: low / 1.05, high: high * 1.05};
    const pad = (high - low) * 0.05;
    return {left, right, low: chart.zero && low === 0 ? 0 : low - pad, high: chart.percent && high <= 1 ? Math.min(1, high + pad) : high + pad};
  }

  function draw() {
    const width = box.clientWidth;
    if (!width) return;
    drawn = chart.series.filter((line) => !line.isHidden).map((line) => ({line, xs: along(line, line.x)}));
    const height = 250, {left, right, low, high} = bounds();
    const yTicks = isLog ? logTicks(low, high) : niceTicks(low, high, 8);
    const yTexts = yTicks.map((tick) => chart.percent ? trimmed(100 * tick, 4) + " %" : shortNumber(tick));
    const edge = {left: 14 + 7 * Math.max(...yTexts.map((text) => text.length), 2), right: 14, top: chart.unit ? 22 : 10, bottom: 38};
    const inner = {width: Math.max(10, width - edge.left - edge.right), height: height - edge.top - edge.bottom};
    const x = (value) => edge.left + (value - left) / (right - left) * inner.width;
    const level = (value) => isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    const y = (value) => edge.top + inner.height * (1 - level(value));
    const unX = (pixel) => left + Math.min(1, Math.max(0, (pixel - edge.left) / inner.width)) * (right - left);
    scale = {x, y, unX, edge, inner, width, left, right};
    set(canvas, {viewBox: `0 0 ${width} ${height}`, width, height});
    Object.assign(canvas.dataset, {from: left, to: right, low, high});
    const grid = shape("g", {class: "grid"});
    yTicks.forEach((tick, i) => {
      grid.append(shape("line", {x1: edge.left, x2: width - edge.right, y1: y(tick), y2: y(tick)}));
      grid.append(shape("text", {x: edge.left - 8, y: y(tick) + 4, "text-anchor": "end"}, yTexts[i]));
    });
    const [unit, unitName] = view.axis === "time" ? timeUnit(right) : [1, ""];
    for (const tick of niceTicks(left / unit, right / unit, inner.width / 64)) {
      if (view.axis === "step" && !Number.isInteger(tick)) continue;
      const at = x(tick * unit);
      grid.append(shape("line", {x1: at, x2: at, y1: height - edge.bottom, y2: height - edge.bottom + 4}));
      const anchor = at > width - edge.right - 18 ? "end" : "middle";
      grid.append(shape("text", {x: anchor === "end" ? width - edge.right + 8 : at, y: height - edge.bottom + 17, "text-anchor": anchor}, shortNumber(tick)));
    }
    grid.append(shape("line", {class: "base", x1: edge.left, x2: width - edge.right, y1: height - edge.bottom, y2: height - edge.bottom}));
    const axisName = view.axis + (unitName ? ` (${unitName})` : "");
    grid.append(shape("text", {x: edge.left + inner.width / 2, y: height - 5, "text-anchor": "middle"}, axisName));
    if (chart.unit) grid.append(shape("text", {x: 4, y: 12}, chart.unit));
    const frame = [edge.left - 4, edge.top - 4, inner.width + 8, inner.height + 8];
    // The lines are in an svg of their own, which clips them.
    const lines = shape("svg", {x: frame[0], y: frame[1], width: frame[2], height: frame[3], viewBox: frame.join(" ")});
    for (const {line, xs} of drawn) drawLine(lines, line, xs, line.y, line.means ? "line pale" : "line");
    for (const {line} of drawn) if (line.means) drawLine(lines, line, along(line, line.means.x), line.means.y, "line");
    for (const index of new Set(chart.series.map((line) => line.run))) {
      for (const turn of runs[index].turns) {
        const at = x(fromStep(runs[index].clock, turn.step));
        lines.append(shape("line", {class: "turn", x1: at, x2: at, y1: edge.top, y2: edge.top + inner.height},
          shape("title", {}, `${turn.text} after step ${turn.step.toLocaleString("en-US")}`)));
      }
    }
    const selection = shape("rect", {class: "selection", y: edge.top, height: inner.height, width: 0});
    canvas.replaceChildren(grid, lines, shape("g", {class: "cursor"}), selection);
    tip.hidden = true;
  }

  function drawLine(parent, line, xs, ys, name) {
    let path = "", isPen = false;
    ys.forEach((value, i) => {
      const isKnown = isOnScale(value);
      if (isKnown) {
        const x = scale.x(xs[i]), y = scale.y(value), isAlone = !isPen && (ys[i + 1] ?? null) === null;
        path += `${isPen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
        if (line.marks || isAlone) parent.append(dot(line, x, y, line.marks ? 3 : 2));
      }
      isPen = isKnown;
    });
    parent.append(shape("path", {d: path, class: name, stroke: line.colour, "stroke-dasharray": line.dash}));
  }

  function point(value) {
    if (!scale) return;
    const {x, y, edge, inner, width} = scale, group = canvas.querySelector(".cursor");
    group.replaceChildren();
    cursor = value;
    tip.hidden = value === null || !drawn.length;
    if (tip.hidden) return;
    const closest = (best, place) => Math.abs(place - value) < Math.abs(best - value) ? place : best;
    const nearest = drawn.map(({xs}) => xs.reduce(closest)), at = nearest.reduce(closest);
    group.append(shape("line", {x1: x(at), x2: x(at), y1: edge.top, y2: edge.top + inner.height}));
    const list = element("dl");
    drawn.forEach(({line, xs}, index) => {
      const place = nearest[index], known = line.y[xs.indexOf(place)];
      const name = element("dt", {}, line.name);
      name.style.setProperty("--own", line.colour);
      const isElsewhere = Math.abs(place - at) > (view.axis === "step" ? 0.5 : Math.abs(at) * 1e-6);
      list.append(name, element("dd", {}, readOut(known, chart) + (isElsewhere ? ` (${axisText(place)})` : "")));
      const isInside = x(place) >= edge.left - 1 && x(place) <= width - edge.right + 1;
      if (isOnScale(known) && isInside) group.append(dot(line, x(place), y(known), 3.5));
    });
    tip.replaceChildren(element("strong", {}, axisText(at)), list);
    placeTip(tip, x(at), edge.top, width);
  }

  const position = (event) => event.clientX - canvas.getBoundingClientRect().left;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    dragFrom = position(event);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (dragFrom === null) { point(scale && scale.unX(position(event))); return; }
    const {edge, inner} = scale, clamp = (pixel) => Math.min(edge.left + inner.width, Math.max(edge.left, pixel));
    const ends = [clamp(dragFrom), clamp(position(event))].sort((a, b) => a - b);
    set(canvas.querySelector(".selection"), {x: ends[0], width: ends[1] - ends[0]});
  });
  canvas.addEventListener("pointerup", (event) => {
    if (dragFrom === null) return;
    const ends = [dragFrom, position(event)].sort((a, b) => a - b);
    dragFrom = null;
    if (ends[1] - ends[0] > 6) setView(view.axis, ends.map(scale.unX));
  });
  canvas.addEventListener("pointercancel", () => { dragFrom = null; draw(); });
  canvas.addEventListener("pointerleave", () => { if (dragFrom === null) point(null); });
  canvas.addEventListener("blur", () => point(null));
  canvas.addEventListener("dblclick", () => setView(view.axis, null));
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Escape") setView(view.axis, null);
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const {left, right} = scale;
    const stride = Math.max((right - left) / 60, view.axis === "step" ? 1 : 0);
    const next = cursor === null ? left : cursor + (event.key === "ArrowRight" ? stride : -stride);
    point(Math.min(right, Math.max(left, next)));
  });
  view.listeners.push(draw);
  new ResizeObserver(draw).observe(box);
  return node;
}

function placeTip(tip, at, top, width) {
  tip.hidden = false;
  const half = tip.offsetWidth;
  tip.style.left = Math.max(0, at + 14 + half > width ? at - 14 - half : at + 14) + "px";
  tip.style.top = top + "px";
}
