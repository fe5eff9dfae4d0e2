// The timeline: a row per stage, drawn on a canvas because a trace has thousands of boxes.

const OPS = {F: "forward", B: "backward", U: "update", E: "evaluate", W: "wait"};
const ROW = 46, MAIN = 28, STRIP = 9, HEAD = 6, FOOT = 40;
const BOXES_AT_FIRST = 14;

function timeline(trace, title) {
  if (!trace.spans.length) return panel(title, missing("No trace.json: it is written when a run ends."));
  const spans = trace.spans.map(([stage, op, microbatch, version, start, duration, isBeside, name]) => ({
    stage, op, microbatch, version, start, end: start + duration, isBeside,
    text: op === "W" ? name : `${stage}${op}${microbatch}@v${version}`,
  }));
  const total = Math.max(...spans.map((span) => span.end), 1);
  const canvas = element("canvas", {tabindex: "0", role: "img", "aria-label": `${title}: what each stage did, over time. Arrow keys move, plus and minus zoom, Escape shows all.`});
  const tip = element("div", {class: "tip", hidden: ""});
  const box = element("div", {class: "plot"}, canvas, tip);
  const hidden = {};
  const legend = element("div", {class: "legend"});
  const about = element("p", {class: "about"}, "Shades alternate with the weight version; a strip below the row is an update "
    + "that runs beside other actions. Hover a box to find its microbatch on all stages. Drag to zoom, shift and drag to move, double click for the whole trace.");
  const node = panel(title, box, legend, about);
  const edge = {left: 62, right: 14};
  let range = firstRange(), hovered = null, drag = null;
  const buttons = [["◀", "Earlier", () => pan(-0.5)], ["▶", "Later", () => pan(0.5)], ["−", "Zoom out", () => zoom(2)],
    ["+", "Zoom in", () => zoom(0.5)], ["all", "The whole trace", () => show([0, total])]];
  for (const [text, name, act] of buttons) {
    node.querySelector(".heading").append(element("button", {type: "button", class: "small", "aria-label": name, title: name, onclick: act}, text));
  }
  for (const [op, name] of Object.entries(OPS)) {
    if (!spans.some((span) => span.op === op)) continue;
    const parities = op === "U" || op === "W" ? [0] : [0, 1];
    const swatch = element("span", {class: "pair"}, ...parities.map((parity) => element("i", {style: {background: `var(--${name}-${parity})`}})));
    const act = (isShown) => { hidden[op] = !isShown; draw(); };
    legend.append(toggle(true, act, {title: "Show or hide these boxes"}, swatch, name));
  }

  function firstRange() {
    // Enough boxes of one stage to read their labels, from the middle of the trace.
    const own = spans.filter((span) => span.stage === 0 && span.op !== "W" && !span.isBeside);
    const at = Math.max(0, Math.floor(own.length / 2) - BOXES_AT_FIRST / 2);
    const some = own.slice(at, at + BOXES_AT_FIRST);
    return some.length > 1 ? [some[0].start, some[some.length - 1].end] : [0, total];
  }

  function show([from, to]) {
    const width = Math.min(total, Math.max(to - from, Math.min(20, total)));
    const start = Math.min(Math.max(0, from), total - width);
    range = [start, start + width];
    hovered = null;
    tip.hidden = true;
    draw();
  }
  const pan = (share) => show(range.map((end) => end + share * (range[1] - range[0])));
  function zoom(factor, at = (range[0] + range[1]) / 2) {
    show(range.map((end) => at + (end - at) * factor));
  }

  const innerWidth = () => Math.max(10, box.clientWidth - edge.left - edge.right);
  const x = (time) => edge.left + (time - range[0]) / (range[1] - range[0]) * innerWidth();
  const unX = (pixel) => range[0] + Math.min(1, Math.max(0, (pixel - edge.left) / innerWidth())) * (range[1] - range[0]);

  function place(span) {
    const top = HEAD + span.stage * ROW;
    const left = x(span.start), width = Math.max(x(span.end) - left, 0.75);
    return span.isBeside ? {left, width, top: top + MAIN + 3, height: STRIP} : {left, width, top, height: MAIN};
  }

  function draw() {
    const width = box.clientWidth;
    if (!width) return;
    const height = HEAD + trace.numStages * ROW + FOOT, scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = height + "px";
    Object.assign(canvas.dataset, {from: range[0], to: range[1]});
    const style = getComputedStyle(document.documentElement), value = (name) => style.getPropertyValue(name).trim();
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (let stage = 0; stage < trace.numStages; stage++) {
      pen.fillStyle = value("--ink-soft");
      pen.textAlign = "left";
      pen.fillText(`stage ${stage}`, 4, HEAD + stage * ROW + MAIN / 2);
      pen.fillStyle = value("--idle");
      pen.fillRect(edge.left, HEAD + stage * ROW, innerWidth(), MAIN);
    }
    drawAxis(pen, value, height);
    pen.save();
    pen.beginPath();
    pen.rect(edge.left, 0, innerWidth(), height - FOOT + 2);
    pen.clip();
    pen.font = "11px ui-monospace, monospace";
    pen.textAlign = "center";
    const inView = spans.filter((span) => span.end >= range[0] && span.start <= range[1] && !hidden[span.op]);
    for (const span of inView) {
      const at = place(span), parity = span.op === "U" || span.op === "W" ? 0 : Math.max(0, span.version) % 2;
      pen.fillStyle = value(`--${OPS[span.op]}-${parity}`);
      pen.fillRect(at.left, at.top, Math.max(at.width - (at.width > 4 ? 1 : 0), 0.75), at.height);
      if (span.isBeside || span.op === "W") continue;
      // A box that sticks out of the window keeps its label in the part that can be seen.
      const left = Math.max(at.left, edge.left), right = Math.min(at.left + at.width, edge.left + innerWidth());
      const label = [span.text, span.op + span.microbatch].find((text) => right - left > 6.7 * text.length + 6);
      if (label) {
        pen.fillStyle = value(`--${OPS[span.op]}-ink-${parity}`);
        pen.fillText(label, (left + right) / 2, at.top + at.height / 2 + 0.5);
      }
    }
    if (hovered) {
      pen.strokeStyle = value("--ink");
      for (const span of inView) {
        const isSame = span === hovered || ("FB".includes(span.op) && "FB".includes(hovered.op) && span.microbatch === hovered.microbatch);
        if (!isSame) continue;
        const at = place(span);
        pen.lineWidth = span === hovered ? 2.5 : 1.5;
        pen.strokeRect(at.left + 0.5, at.top + 0.5, Math.max(at.width - 2, 1), at.height - 1);
      }
    }
    if (drag && !drag.isPan) {
      pen.fillStyle = value("--selection");
      pen.fillRect(Math.min(drag.from, drag.to), 0, Math.abs(drag.to - drag.from), height - FOOT);
    }
    pen.restore();
  }

  function drawAxis(pen, value, height) {
    const [unit, name] = range[1] >= 1e6 ? [1e6, "s"] : [1e3, "ms"];
    pen.fillStyle = value("--ink-soft");
    pen.strokeStyle = value("--rule");
    pen.textAlign = "center";
    for (const tick of niceTicks(range[0] / unit, range[1] / unit, innerWidth() / 90)) {
      const at = x(tick * unit);
      pen.beginPath();
      pen.moveTo(at, HEAD);
      pen.lineTo(at, height - FOOT + 4);
      pen.stroke();
      pen.fillText(String(tick), Math.min(at, edge.left + innerWidth() - 6), height - FOOT + 14);
    }
    pen.fillText(`time since the first box (${name})`, edge.left + innerWidth() / 2, height - 8);
  }

  function boxAt(event) {
    const bounds = canvas.getBoundingClientRect(), left = event.clientX - bounds.left, top = event.clientY - bounds.top;
    if (left < edge.left || left > edge.left + innerWidth()) return null;
    for (let i = spans.length - 1; i >= 0; i--) {
      const at = place(spans[i]);
      if (!hidden[spans[i].op] && left >= at.left && left <= at.left + at.width && top >= at.top && top <= at.top + at.height) return spans[i];
    }
    return null;
  }

  function read(span) {
    tip.hidden = !span;
    if (!span) return;
    const rows = [["what", OPS[span.op]], ["stage", span.stage], ["microbatch", span.microbatch],
      [span.op === "U" ? "writes version" : "weight version", span.version], ["took", spokenTime(span.end - span.start)], ["began at", spokenTime(span.start)]];
    const list = element("dl", {class: "plain"});
    for (const [name, text] of rows) if (text !== -1) list.append(element("dt", {}, name), element("dd", {}, String(text)));
    tip.replaceChildren(element("strong", {}, span.text), list);
    const at = place(span);
    placeTip(tip, Math.max(edge.left, at.left) + Math.min(at.width, 20), at.top + at.height + 6, box.clientWidth);
  }

  const position = (event) => event.clientX - canvas.getBoundingClientRect().left;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = {from: position(event), to: position(event), isPan: event.shiftKey, range};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) {
      const span = boxAt(event);
      if (span !== hovered) { hovered = span; draw(); }
      read(span);
      return;
    }
    drag.to = position(event);
    if (drag.isPan) {
      const moved = (drag.from - drag.to) / innerWidth() * (drag.range[1] - drag.range[0]);
      show(drag.range.map((end) => end + moved));
    } else draw();
  });
  canvas.addEventListener("pointerup", () => {
    const done = drag;
    drag = null;
    if (done && !done.isPan && Math.abs(done.to - done.from) > 6) show([done.from, done.to].sort((a, b) => a - b).map(unX));
    else draw();
  });
  canvas.addEventListener("pointercancel", () => { drag = null; draw(); });
  canvas.addEventListener("pointerleave", () => { hovered = null; read(null); draw(); });
  canvas.addEventListener("dblclick", () => show([0, total]));
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(event.deltaY > 0 ? 1.25 : 0.8, unX(position(event)));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / innerWidth());
    else return;
    event.preventDefault();
  }, {passive: false});
  const keys = {ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), Escape: () => show([0, total])};
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  view.listeners.push(draw);
  new ResizeObserver(() => draw()).observe(box);
  return node;
}

function spokenTime(microseconds) {
  if (microseconds >= 1e6) return (microseconds / 1e6).toFixed(3) + " s";
  return microseconds >= 1e3 ? (microseconds / 1e3).toFixed(2) + " ms" : microseconds + " µs";
}
