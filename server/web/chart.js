// Charts of the last minutes: lines, or areas one upon the other.  A value is null where there is none, and the line has a gap.

import { html, svg } from "./dom.js";

const TOP = 18; // room for the axis' end, above all lines
const BOTTOM = 16;

export class Chart {
  // `lines` are {name, kind} from the bottom up; `kind` is the class that colours them.  `format` turns a value into text.
  constructor(element, title, lines, format, { stacked = false, most = null, height = 102 } = {}) {
    Object.assign(this, { element, title, lines, format, stacked, most, height });
    this.values = lines.map(() => []);
    this.pointed = null;
    this.readout = html("p", { class: "readout", "aria-hidden": "true" });
    this.picture = svg("svg", { role: "img", height });
    element.append(this.picture, this.readout);
    new ResizeObserver(() => this.draw()).observe(element);
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.point(null));
  }

  // One list of values for each line, all equally long, a second apart, the last one now.
  show(values) {
    this.values = values;
    this.draw();
  }

  point(event) {
    const box = this.picture.getBoundingClientRect();
    this.pointed = event === null ? null : Math.round(((event.clientX - box.left) / box.width) * (this.values[0].length - 1));
    this.draw();
  }

  draw() {
    const width = this.element.clientWidth;
    const length = this.values[0].length;
    if (!width || !length) return;
    const floors = this.values.map((line, i) => line.map((_, at) => (this.stacked ? sumBelow(this.values, i, at) : 0)));
    const tops = this.values.map((line, i) => line.map((value, at) => (value === null ? null : value + floors[i][at])));
    const highest = Math.max(0, ...tops.flat().filter((value) => value !== null));
    const most = this.most ?? nice(highest);
    const x = (at) => (at / (length - 1)) * width;
    const y = (value) => TOP + (1 - value / most) * (this.height - TOP - BOTTOM);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.picture.setAttribute("width", width);
    this.picture.setAttribute("aria-label", this.described());
    this.picture.replaceChildren(
      svg("line", { class: "grid", x1: 0, x2: width, y1: y(0), y2: y(0) }),
      svg("line", { class: "grid faint", x1: 0, x2: width, y1: y(most), y2: y(most) }),
      ...this.lines.map((line, i) =>
        svg("path", {
          class: `${this.stacked ? "area" : "line"} ${line.kind}`,
          d: this.stacked ? areas(tops[i], floors[i], x, y) : path(tops[i], x, y),
        }),
      ),
      svg("text", { class: "axis", x: 0, y: this.height - 3 }, `${Math.round(length / 60)} min ago`),
      svg("text", { class: "axis end", x: width, y: this.height - 3 }, "now"),
      svg("text", { class: "axis end", x: width, y: y(most) - 5 }, this.format(most)),
    );
    this.readout.textContent = "";
    if (this.pointed !== null && this.pointed >= 0 && this.pointed < length) {
      const at = this.pointed;
      this.picture.append(svg("line", { class: "pointer", x1: x(at), x2: x(at), y1: TOP, y2: y(0) }));
      const parts = this.lines.map(({ name }, i) => (this.values[i][at] === null ? null : `${this.format(this.values[i][at])} ${name}`));
      this.readout.textContent = [`${length - 1 - at} s ago`, ...parts.filter(Boolean)].join(" · ");
    }
  }

  described() {
    const parts = this.lines.map(({ name }, i) => {
      const known = this.values[i].filter((value) => value !== null);
      if (!known.length) return `${name} unknown`;
      return `${name} ${this.format(known.at(-1))}, between ${this.format(Math.min(...known))} and ${this.format(Math.max(...known))}`;
    });
    return `${this.title}, last ${Math.round(this.values[0].length / 60)} minutes: ${parts.join("; ")}`;
  }
}

function sumBelow(values, i, at) {
  let sum = 0;
  for (let j = 0; j < i; j++) sum += values[j][at] ?? 0;
  return sum;
}

// The end of an axis: a round number a little above all values.
export function nice(value) {
  if (value <= 0) return 1;
  const least = 1.05 * value;
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((most) => most >= least) ?? 10 * power;
}

function path(values, x, y) {
  let drawn = "";
  let open = false;
  values.forEach((value, at) => {
    if (value !== null) drawn += `${open ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}${open ? "" : "h.01"}`;
    open = value !== null;
  });
  return drawn;
}

function areas(tops, floors, x, y) {
  let drawn = "";
  for (let at = 0; at < tops.length; at++) {
    if (tops[at] === null) continue;
    let end = at;
    while (end + 1 < tops.length && tops[end + 1] !== null) end++;
    const places = Array.from({ length: end - at + 1 }, (_, i) => at + i);
    const upper = places.map((i) => `${x(i).toFixed(1)} ${y(tops[i]).toFixed(1)}`);
    const lower = places.reverse().map((i) => `${x(i).toFixed(1)} ${y(floors[i]).toFixed(1)}`);
    drawn += `M${[...upper, ...lower].join("L")}Z`;
    at = end;
  }
  return drawn;
}
