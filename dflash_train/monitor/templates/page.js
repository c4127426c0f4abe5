"use strict";
// Every string from the run goes in as text (textContent), never as markup.
const byId = (id) => document.getElementById(id);
const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const TENTHS = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });
const known = (value) => value !== null && value !== undefined;
const count = (value) => known(value) ? NUMBER.format(value) : "–";
const rate = (value) => known(value) ? (value < 100 ? TENTHS : NUMBER).format(value) : "–";
const percent = (value, digits = 0) => known(value) ? (100 * value).toFixed(digits) + " %" : "–";
const share = (part, whole) => whole > 0 ? Math.min(1, Math.max(0, part / whole)) : 0;

function bytes(value) {
  if (!known(value)) return "–";
  let unit = 0;
  for (; value >= 1000 && unit < 5; unit++) value /= 1000;
  return (unit && value < 100 ? TENTHS : NUMBER).format(value) + " " + ["B", "KB", "MB", "GB", "TB", "PB"][unit];
}

function duration(seconds) {
  if (!known(seconds)) return "–";
  const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  if (s < 60) return s + "s";
  if (s < 3600) return Math.floor(s / 60) + "m" + two(s % 60) + "s";
  if (s < 86400) return Math.floor(s / 3600) + "h" + two(Math.floor(s % 3600 / 60)) + "m";
  return Math.floor(s / 86400) + "d" + two(Math.floor(s % 86400 / 3600)) + "h";
}

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.map((child) => child instanceof Node ? child : String(child)));
  return element;
}

// A section is built anew only when its numbers changed, so that a selection or a scroll position survives.
const shown = {};
function section(id, data, build) {
  const text = JSON.stringify(data);
  if (shown[id] === text) return;
  shown[id] = text;
  byId(id).replaceChildren(...build(data));
}

function fill(part, className = "") {
  const bar = make("i", className);
  bar.style.width = 100 * part + "%";
  return bar;
}

function mark(at, title) {
  const line = make("u");
  line.style.left = `calc(${100 * at}% - 1px)`;
  line.title = title;
  return line;
}

const meter = (part) => make("div", "meter", fill(part));
const none = (text) => [make("div", "none", text)];
const lines = (events) => make("ul", "", ...events.slice().reverse().map((e) => make("li", "", `${e.at.slice(5, 19).replace("T", " ")}  ${e.line}`)));

function bars(counts, empty) {
  const entries = Object.entries(counts), most = Math.max(...entries.map(([, n]) => n));
  if (!entries.length) return none(empty);
  return entries.flatMap(([name, n]) => [make("span", "", name), make("span", "n", count(n)), meter(share(n, most))]);
}

// One point a sample; the scale starts at zero. What is not known leaves no gap: it is zero.
function sparkline(id, values, top, marks = []) {
  const svg = byId(id), ns = "http://www.w3.org/2000/svg";
  const most = top || Math.max(...values.map((v) => v || 0), 1e-9), height = (v) => 58 - 56 * Math.min(1, (v || 0) / most);
  const line = document.createElementNS(ns, "polyline");
  const step = 240 / Math.max(1, values.length - 1);
  line.setAttribute("points", values.map((v, i) => `${(i * step).toFixed(1)},${height(v).toFixed(1)}`).join(" "));
  svg.replaceChildren(line, ...marks.filter(known).map((at) => {
    const rule = document.createElementNS(ns, "line");
    for (const [name, value] of [["x1", 0], ["x2", 240], ["y1", height(at)], ["y2", height(at)]]) rule.setAttribute(name, value);
    return rule;
  }));
}

function figures(s) {
  return [
    [rate(s.tokens.per_s), "tokens/s", `mean ${rate(s.tokens.per_s_overall)}`],
    [rate(s.samples.per_s), "samples/s", `mean ${rate(s.samples.per_s_overall)}`],
    [percent(s.flops.utilisation, 1), "model FLOP utilisation", `mean ${percent(s.flops.utilisation_overall, 1)}`],
    [duration(s.eta_s), "left", `${duration(s.elapsed_s)} so far`],
    [percent(share(s.tokens.done, s.tokens.total), 1), "of the tokens", `${count(s.tokens.done)} of ${count(s.tokens.total)}`],
    [count(s.samples.done), "samples", `of ${count(s.samples.total)}`],
    [count(s.shards.done), "shards", `of ${count(s.shards.total)}, ${count(s.shards.before)} from before`],
    [known(s.uploads.per_s) ? bytes(s.uploads.per_s) + "/s" : "–", "upload", `${bytes(s.uploads.bytes)} so far`],
    [bytes(s.uploads.backlog_bytes), "backlog", `${count(s.uploads.backlog_shards)} shards`],
    [s.staging ? percent(s.staging.paused_share, 1) : "–", "of the time waiting", "for room in staging"],
    [count(s.retries.total), "retries", `${count(s.dropped.total)} rows left out`],
    [count(s.errors.total), "errors", `${count(s.shards.counts.failed)} shards failed`],
  ].map(([value, what, more]) => make("div", "", make("b", "", value), what, make("br"), make("small", "", more)));
}

function workerCard(w) {
  const row = (...cells) => make("div", "row", ...cells.map((cell) => make("span", "", cell)));
  const card = make("div", "", make("div", "row", make("b", "", w.name), make("span", "pill " + w.status, w.status)));
  card.append(row(w.device, w.pid ? `pid ${w.pid}` : ""), meter(w.shard_share || 0));
  card.append(row(w.shard_id || "no shard", known(w.shard_share) ? percent(Math.min(1, w.shard_share)) : ""));
  card.append(row(rate(w.tokens_per_s) + " tokens/s", count(w.tokens) + " tokens"));
  card.append(row(`captures ${percent(w.capturing_share)}, waits ${percent(w.paused_share)}`, `seen ${duration(w.seen_s)} ago`));
  return card;
}

function gpuRow(g) {
  const power = known(g.power_w) ? `${count(g.power_w)}${known(g.power_limit_w) ? " of " + count(g.power_limit_w) : ""} W` : "";
  const heat = known(g.temperature_c) ? `${count(g.temperature_c)} °C` : "";
  const memory = `${bytes(g.memory_used_bytes)} of ${bytes(g.memory_total_bytes)}`;
  return make("div", "", make("div", "row", make("b", "", `${g.index} ${g.name}`), make("span", "", `busy ${percent(g.utilisation)}`)),
    meter(g.utilisation || 0), make("div", "row", memory, make("span", "", [power, heat].filter(Boolean).join(" · "))),
    meter(share(g.memory_used_bytes, g.memory_total_bytes)));
}

function staging({ folder: f, uploads: u }) {
  const upload = `uploaded ${bytes(u.bytes)} in ${count(u.count)} shards, mean ${bytes(u.per_s_overall)}/s; ${bytes(u.backlog_bytes)} (${count(u.backlog_shards)} shards) wait`;
  if (!f) return [make("div", "none", "nothing staged yet"), make("p", "", upload)];
  const bar = make("div", "meter", fill(f.fill || 0, "all"), fill(share(f.own_bytes, f.total_bytes)), mark(f.high_water, "high water"));
  if (known(f.low_water)) bar.append(mark(f.low_water, "low water"));
  const marks = `high water ${percent(f.high_water)}` + (known(f.low_water) ? `, low water ${percent(f.low_water)}` : "");
  return [
    make("div", "row", `${percent(f.fill)} full `, make("span", "pill " + (f.paused ? "paused" : ""), f.paused ? "capture waits" : "room")), bar,
    make("p", "", `${bytes(f.own_bytes)} staged or reserved by this run, ${bytes(f.used_bytes)} of ${bytes(f.total_bytes)} in use; ${marks}`),
    make("p", "", `capture has waited ${duration(f.paused_s)} (${percent(f.paused_share, 1)} of the run)`), make("p", "", upload),
  ];
}

function grid({ cells, done_percent: done, per_cell: size }) {
  const box = byId("grid");
  while (box.children.length > cells.length) box.lastChild.remove();
  while (box.children.length < cells.length) box.append(make("i"));
  [...box.children].forEach((cell, i) => {
    cell.className = { "~": "active", "x": "bad" }[cells[i]] || "";
    cell.style.background = cells[i] === "x" ? "" : `linear-gradient(to right, var(--done) ${done[i]}%, var(--track) ${done[i]}%)`;
    cell.title = size > 1 ? `${size} shards, ${done[i]} % done` : `shard ${i + 1}`;
  });
}

function show(s) {
  document.title = `${percent(share(s.tokens.done, s.tokens.total))} ${s.stage}: ${s.run}`;
  byId("run").textContent = s.run;
  byId("status").textContent = s.status;
  byId("status").className = "pill " + s.status;
  byId("about").textContent = `${s.stage} on ${s.host}, since ${s.started_at.replace("T", " ").replace("+00:00", " UTC")}, ${duration(s.elapsed_s)}`;
  byId("total").setAttribute("aria-valuenow", Math.round(100 * share(s.tokens.done, s.tokens.total)));
  byId("total").replaceChildren(fill(share(s.tokens.done, s.tokens.total)));
  byId("figures").replaceChildren(...figures(s));
  const h = s.history, f = s.staging;
  byId("tokens-now").textContent = rate(s.tokens.per_s);
  byId("upload-now").textContent = known(s.uploads.per_s) ? bytes(s.uploads.per_s) + "/s" : "–";
  byId("fill-now").textContent = f ? percent(f.fill) : "–";
  sparkline("tokens-line", h.tokens_per_s);
  sparkline("upload-line", h.upload_bytes_per_s);
  sparkline("fill-line", h.staging_fill, 1, f ? [f.high_water, f.low_water] : []);
  section("workers", s.workers, (all) => all.length ? all.map(workerCard) : none("none yet"));
  section("shards", s.shards.counts, (counts) => [make("div", "legend", ...Object.entries(counts).map(([name, n]) => make("span", "", make("b", "", count(n)), " " + name)))]);
  grid(s.shards.grid);
  section("staging", { folder: f, uploads: s.uploads }, staging);
  section("gpus", s.gpus, ({ devices, note }) => devices.length ? devices.map(gpuRow) : none(note));
  section("sources", s.sources, (counts) => bars(counts, "none yet"));
  section("dropped", s.dropped.by_reason, (counts) => bars(counts, "none"));
  section("retries", s.retries, (r) => r.total ? [make("div", "bars", ...bars(r.by_reason, "")), lines(r.recent)] : none("none"));
  section("errors", s.errors.recent, (events) => events.length ? [lines(events)] : none("none"));
}

let last = null;
function lost() {
  const ended = last && last.status !== "running";
  byId("lost").textContent = (ended ? `The run is over: ${last.status}.` : "Connection lost: the run has ended, or its host cannot be reached.")
    + " The figures are the last ones seen.";
  byId("lost").className = ended ? last.status : "";
  if (!ended) byId("status").textContent = "lost";
  byId("status").className = "pill " + (ended ? last.status : "dead");
}

async function poll() {
  try {
    const response = await fetch("api/state", { cache: "no-store", signal: AbortSignal.timeout(8000) });
    if (!response.ok) throw new Error(response.status);
    last = await response.json();
    show(last);
    byId("lost").hidden = true;
  } catch (error) {
    lost();
    byId("lost").hidden = false;
  }
  setTimeout(poll, byId("lost").hidden ? 1500 : 5000);
}
poll();
