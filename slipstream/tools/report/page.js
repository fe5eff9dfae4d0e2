// The page around the charts: header, tabs, figures, bars, tables. Data comes from the JSON element of this document.

const data = JSON.parse(document.getElementById("data").textContent);
const isComparison = data.runs.length > 1;
const PARTS = ["forward", "backward", "evaluation", "update", "data", "wait_activations", "wait_gradients", "wait_sums", "other"];

const runDot = (index) => element("i", {class: "dot", "aria-hidden": "true", style: {background: colour(index)}});
const headOfRuns = () => element("thead", {}, element("tr", {}, element("td"),
  ...data.runs.map((run, index) => element("th", {scope: "col"}, runDot(index), run.name))));

const titled = (index, title) => isComparison ? `${data.runs[index].name}: ${title}` : title[0].toUpperCase() + title.slice(1);

// ---- header and axis

function header() {
  const node = document.getElementById("header"), facts = data.runs.map((run) => run.facts.join(" · "));
  if (isComparison) {
    const items = data.runs.map((run, index) => element("li", {}, runDot(index), element("b", {}, run.name), " ", element("span", {class: "facts"}, facts[index])));
    node.append(element("h1", {}, `${data.runs.length} runs`), element("ul", {class: "runs"}, ...items));
  } else {
    node.append(element("h1", {}, data.runs[0].name), element("p", {class: "facts"}, facts[0]));
  }
}

function axisControl() {
  const buttons = Object.keys(COLUMN_OF_AXIS).map((name) => element("button", {type: "button", class: "small", onclick: () => setView(name, null)}, name));
  const reset = element("button", {type: "button", class: "small reset", id: "reset", onclick: () => setView(view.axis, null)}, "reset zoom");
  document.getElementById("axis").append(element("span", {}, "over"), ...buttons, reset);
  const update = () => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.textContent === view.axis));
    reset.disabled = !view.range;
  };
  view.listeners.push(update);
  update();
}

// ---- tabs

function tabs(contents) {
  const bar = document.getElementById("tabs"), main = document.getElementById("main"), names = Object.keys(contents), nodes = {};
  const usesAxis = new Set(["Overview", "Training", "Pipeline"]);
  const select = (name, isFocused) => {
    for (const other of names) {
      const [tab, body] = nodes[other], isOn = other === name;
      tab.setAttribute("aria-selected", String(isOn));
      tab.tabIndex = isOn ? 0 : -1;
      body.hidden = !isOn;
      if (isOn && isFocused) tab.focus();
    }
    for (const id of ["axis", "hint"]) document.getElementById(id).hidden = !usesAxis.has(name);
    history.replaceState(null, "", "#" + name.toLowerCase());
  };
  names.forEach((name, index) => {
    const id = name.toLowerCase();
    const tab = element("button", {type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `panel-${id}`, onclick: () => select(name, false)}, name);
    tab.addEventListener("keydown", (event) => {
      const next = {ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: names.length - 1}[event.key];
      if (next === undefined) return;
      event.preventDefault();
      select(names[(next + names.length) % names.length], true);
    });
    const body = element("div", {role: "tabpanel", id: `panel-${id}`, "aria-labelledby": `tab-${id}`, hidden: ""}, ...contents[name]);
    nodes[name] = [tab, body];
    bar.append(tab);
    main.append(body);
  });
  const wanted = names.find((name) => "#" + name.toLowerCase() === location.hash);
  select(wanted || names[0], false);
}

// ---- overview

function cards() {
  return element("div", {class: "cards"}, ...data.figures.map((figure) => element("div", {class: "card", title: figure.meaning}, element("h3", {}, figure.label),
    element("p", {class: figure.values[0] === "not known" ? "value unknown" : "value"}, figure.values[0]), element("p", {class: "about"}, figure.details[0]))));
}

function comparison() {
  const rows = data.figures.map((figure) => element("tr", {}, element("th", {scope: "row"}, figure.label, element("small", {}, figure.meaning)),
    ...figure.values.map((value, index) => element("td", figure.best[index] ? {class: "best"} : {},
      element("span", {class: "value"}, value), figure.best[index] ? element("em", {}, "best") : null, element("small", {}, figure.details[index])))));
  return panel("", element("div", {class: "scroll"}, element("table", {id: "comparison"}, headOfRuns(), element("tbody", {}, ...rows))));
}

function notes() {
  const items = data.runs.flatMap((run) => run.notes.map((note) => element("li", {}, isComparison ? element("b", {}, run.name + ": ") : null, note)));
  return items.length ? panel("What is missing", element("ul", {class: "notes", id: "notes"}, ...items)) : null;
}

// ---- bars

function legendOf(keys, hidden, redraw) {
  return element("div", {class: "legend"}, ...keys.map((key, index) => {
    const swatch = element("i", {class: "block", "aria-hidden": "true", style: {background: partColour(key, index)}});
    const act = (isShown) => { hidden[index] = !isShown; redraw(); };
    return toggle(true, act, {title: "Show or hide this part"}, swatch, spoken(key));
  }));
}

function bars() {
  // The read-out of whatever piece of a bar the pointer is on.
  const rows = element("div"), tip = element("div", {class: "tip", hidden: ""}), node = element("div", {class: "bars"}, rows, tip);
  node.addEventListener("pointermove", (event) => {
    const piece = event.target.closest("[data-tip]"), bounds = node.getBoundingClientRect();
    tip.hidden = !piece;
    if (!piece) return;
    tip.textContent = piece.dataset.tip;
    placeTip(tip, event.clientX - bounds.left, event.clientY - bounds.top + 16, node.clientWidth);
  });
  node.addEventListener("pointerleave", () => { tip.hidden = true; });
  return [node, rows];
}

const partColour = (key, index) => PARTS.includes(key) ? `var(--part-${key.replace("_", "-")})` : colour(index);
const spoken = (key) => key.replace(/^wait_/, "wait for ").replaceAll("_", " ");

function splitBars(split, run) {
  const title = titled(run, "where each stage's time went");
  if (!split.keys.length) return panel(title, missing("Not recorded: the run has not ended, or is older than this figure."));
  const about = element("p", {class: "about"}), [node, rows] = bars(), hidden = [];
  function redraw() {
    const isZoomed = view.range && split.sums.length;
    let shares = split.window;
    about.textContent = "Share of the steady window, from when the pipeline had filled to when it drained.";
    if (isZoomed || !shares.length) {
      const last = split.steps[split.steps.length - 1];
      const [from, to] = view.range ? view.range.map((end) => Math.min(last, Math.max(0, toStep(data.runs[run].clock, end)))) : [0, last];
      shares = split.sums.map((stage) => {
        const parts = stage.map((sums) => Math.max(0, interpolate(split.steps, sums, to) - interpolate(split.steps, sums, from)));
        const total = parts.reduce((sum, part) => sum + part, 0);
        return parts.map((part) => total ? part / total : 0);
      });
      about.textContent = `Share of the time from step ${Math.round(from).toLocaleString("en-US")} to ${Math.round(to).toLocaleString("en-US")}.`;
    }
    if (split.sums.length) about.textContent += " Zoom into a chart above to see the split of those steps.";
    rows.replaceChildren(...shares.map((parts, stage) => {
      const bar = element("div", {class: "bar"});
      parts.forEach((share, index) => {
        if (hidden[index] || share <= 0) return;
        const text = `${(100 * share).toFixed(1)} %`;
        const style = {width: 100 * share + "%", background: partColour(split.keys[index], index)};
        bar.append(element("span", {"data-tip": `stage ${stage}, ${spoken(split.keys[index])}: ${text}`, style}, element("b", {}, text)));
      });
      return element("div", {class: "row"}, element("span", {class: "name"}, `stage ${stage}`), bar);
    }));
  }
  view.listeners.push(redraw);
  redraw();
  return panel(title, node, legendOf(split.keys, hidden, redraw), about);
}

function memoryBars() {
  const most = Math.max(0, ...data.memory.flatMap((memory) => memory.bytes.filter((bytes) => bytes !== null)));
  return data.memory.map((memory, run) => {
    const title = titled(run, "peak memory per stage");
    if (!memory.bytes.length) return panel(title, missing("Not known before the run has ended."));
    const [node, rows] = bars();
    rows.append(...memory.bytes.map((bytes, stage) => {
      const style = {width: (most ? 100 * bytes / most : 0) + "%", background: colour(isComparison ? run : 0)};
      const piece = element("span", {"data-tip": bytes === null ? "not known" : `stage ${stage}: ${bytes.toLocaleString("en-US")} bytes`, style});
      return element("div", {class: "row"}, element("span", {class: "name"}, `stage ${stage}`), element("div", {class: "bar thin"}, piece), element("span", {class: "amount"}, memory.texts[stage]));
    }));
    return panel(title, node, element("p", {class: "about"}, memory.about + (isComparison ? " All runs have the same scale." : "")));
  });
}

function stageTable(stages, run) {
  if (!stages.rows.length) return null;
  const head = element("tr", {}, ...stages.columns.map((name) => element("th", {scope: "col"}, name)));
  const rows = stages.rows.map((cells) => element("tr", {}, ...cells.map((cell, index) => element(index ? "td" : "th", index ? {} : {scope: "row"}, cell))));
  return panel(titled(run, "stages"), element("div", {class: "scroll"}, element("table", {class: "numbers"}, element("thead", {}, head), element("tbody", {}, ...rows))));
}

// ---- configuration

function configuration() {
  if (!data.config.length) return [panel("", missing("No configuration was found."))];
  const search = element("input", {type: "search", id: "search", placeholder: "search settings and values", "aria-label": "Search the configuration"});
  const onlyDifferent = element("input", {type: "checkbox", id: "different"});
  const count = element("span", {class: "about", "aria-live": "polite"});
  const body = element("tbody");
  const numDifferent = data.config.filter((row) => row.differs).length;
  onlyDifferent.checked = isComparison && numDifferent > 0;
  const sorted = [...data.config.filter((row) => row.differs), ...data.config.filter((row) => !row.differs)];
  function update() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = (isComparison ? sorted : data.config).filter((row) => {
      const text = [row.path, ...row.values].join(" ").toLowerCase();
      return words.every((word) => text.includes(word)) && !(onlyDifferent.checked && !row.differs);
    });
    count.textContent = `${rows.length} of ${data.config.length} settings`;
    body.replaceChildren(...rows.map((row) => element("tr", row.differs ? {class: "differs"} : {}, element("th", {scope: "row"}, row.path),
      ...row.values.map((value) => value === null ? element("td", {class: "unset"}, "not set") : element("td", {}, value)))));
  }
  search.addEventListener("input", update);
  onlyDifferent.addEventListener("change", update);
  const choice = isComparison ? element("label", {}, onlyDifferent, `only the ${numDifferent} that differ`) : null;
  update();
  return [panel("", element("div", {class: "controls"}, search, choice, count), element("div", {class: "scroll"}, element("table", {id: "config"}, isComparison ? headOfRuns() : null, body)))];
}

// ---- all of it

const charts = (tab) => data.charts[tab].map((chart) => lineChart(chart, data.runs));
const grid = (nodes) => element("div", {class: "charts"}, ...nodes);
header();
document.getElementById("footer").append(
  element("span", {id: "hint"}, "Drag over a chart to zoom all charts to those steps; double click, or Escape, shows all again. ",
    data.maxPoints ? `A long curve is drawn with at most ${data.maxPoints.toLocaleString("en-US")} points: the pale line keeps the minimum and maximum of every stretch, the strong line is its mean. ` : ""),
  "Made by slipstream report from ", data.runs.map((run) => run.folder).join(", "), ".");
tabs({
  Overview: [isComparison ? comparison() : cards(), ...charts("overview"), notes()],
  Training: [grid(charts("training"))],
  Pipeline: [grid(charts("pipeline")), ...data.splits.map(splitBars),
    ...data.timelines.map((trace, run) => timeline(trace, titled(run, "timeline"))), ...data.stages.map(stageTable)],
  Memory: memoryBars(),
  Configuration: configuration(),
});
axisControl();
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setView(view.axis, view.range));
