// Lines and stacked areas over the last minutes, drawn by hand. One crosshair for all charts.
import { el, svg } from "./dom.js";

const HEIGHT = 190, LEFT = 60, RIGHT = 6, TOP = 8, BOTTOM = 20;
const charts = [];
let picked = null; // place of the crosshair: 0 is the oldest point, 1 the latest

export class Chart {
  constructor(place, label, { stacked = false, binary = false, format, ceiling = null }) {
    Object.assign(this, { stacked, binary, format, ceiling, series: [], times: [] });
    this.svg = svg("svg", { class: "chart", role: "img", tabindex: 0, "aria-label": label });
    this.legend = el("div", { class: "legend" });
    place.replaceChildren(this.svg, this.legend);
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      pick((event.clientX - box.left - LEFT) / Math.max(1, box.width - LEFT - RIGHT));
    });
    this.svg.addEventListener("pointerleave", () => pick(null));
    this.svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) pick((picked ?? 1) + step / Math.max(1, this.times.length - 1));
      if (event.key === "Escape") pick(null);
    });
    new ResizeObserver(() => this.draw()).observe(this.svg);
    charts.push(this);
  }

  // *series* is a list of {name, color, values}; null is a gap.
  show(times, series) {
    this.times = times;
    this.series = series;
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth || 480, count = this.times.length;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const tops = this.stacked ? sums(this.series, count) : this.series.map((each) => each.values);
    const most = this.ceiling ?? nice(Math.max(0, ...tops.flat().filter((value) => value !== null)), this.binary);
    const x = (i) => LEFT + (count > 1 ? (i / (count - 1)) * (width - LEFT - RIGHT) : 0);
    const y = (value) => HEIGHT - BOTTOM - (Math.min(value, most) / most) * (HEIGHT - TOP - BOTTOM);
    const drawn = this.axes(width, most, y, x);
    this.series.forEach((each, i) => {
      const under = this.stacked && i > 0 ? tops[i - 1] : null;
      if (this.stacked) drawn.push(svg("path", { d: area(tops[i], under, x, y), fill: each.color, "fill-opacity": 0.85 }));
      else drawn.push(svg("path", { d: line(tops[i], x, y), fill: "none", stroke: each.color, "stroke-width": 2, "stroke-linejoin": "round" }));
    });
    if (picked !== null && count) {
      const at = x(Math.round(picked * (count - 1)));
      drawn.push(svg("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.svg.replaceChildren(...drawn);
    this.tell(count);
  }

  axes(width, most, y, x) {
    const drawn = [];
    for (const part of [0, 0.5, 1]) {
      const at = y(most * part);
      drawn.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      drawn.push(svg("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, this.format(most * part)));
    }
    const last = this.times.length - 1;
    if (last > 0) {
      drawn.push(svg("text", { x: x(0), y: HEIGHT - 4 }, clock(this.times[0])));
      drawn.push(svg("text", { x: x(last), y: HEIGHT - 4, "text-anchor": "end" }, clock(this.times[last])));
    } else drawn.push(svg("text", { x: LEFT + 10, y: HEIGHT / 2 }, "waiting for the first seconds"));
    return drawn;
  }

  tell(count) {
    const at = count ? Math.round((picked ?? 1) * (count - 1)) : 0;
    const entries = this.series.map((each) => {
      const value = each.values[at];
      const said = value === null || value === undefined ? "–" : this.format(value);
      return el("span", {}, el("i", { class: "swatch", color: each.color }), each.name, el("b", {}, said));
    });
    const when = count ? clock(this.times[at]) : "";
    this.legend.replaceChildren(...entries, el("span", { class: "when" }, when));
  }
}

function pick(place) {
  picked = place === null ? null : Math.min(1, Math.max(0, place));
  for (const chart of charts) chart.draw();
}

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

function sums(series, count) {
  const below = new Array(count).fill(0);
  return series.map((each) => each.values.map((value, i) => (below[i] += value ?? 0)));
}

function nice(value, binary) {
  if (value <= 0) return 1;
  const power = binary ? 2 ** Math.floor(Math.log2(value)) : 10 ** Math.floor(Math.log10(value));
  return (binary ? [1, 1.5, 2] : [1, 2, 5, 10]).map((step) => step * power).find((step) => step >= value);
}

function line(values, x, y) {
  let drawing = false;
  return values.map((value, i) => {
    if (value === null) {
      drawing = false;
      return "";
    }
    const command = drawing ? "L" : "M";
    drawing = true;
    return `${command}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
  }).join("");
}

function area(tops, under, x, y) {
  if (!tops.length) return "";
  const over = tops.map((value, i) => `${x(i).toFixed(1)} ${y(value).toFixed(1)}`);
  const back = tops.map((_, i) => `${x(i).toFixed(1)} ${y(under ? under[i] : 0).toFixed(1)}`).reverse();
  return `M${over.join("L")}L${back.join("L")}Z`;
}
