// The radix tree as an icicle: a row is a level, a box a segment, as wide as the blocks in and below it.

import { byId, html, svg } from "./dom.js";
import { count, duration, oneLine, whole } from "./format.js";

const ROW = 28;
const MAX_ROWS = 20;
const CHARACTER = 6.7;
const STEPS = {
  idle_seconds: { bounds: [3600, 600, 120, 30, 5], from: "an hour ago", to: "just used" },
  uses: { bounds: [1, 3, 9, 29, 99], from: "once", to: "100 times" },
};

export class Icicle {
  constructor(element, onZoom) {
    this.element = element;
    this.colour = "idle_seconds";
    this.root = null;
    this.zoomed = null; // ids: what fills the width, and what the keyboard is at
    this.current = null;
    this.onZoom = onZoom;
    this.picture = svg("svg", { role: "tree", "aria-label": "Prefix tree", "aria-describedby": "tree-sub" });
    element.append(this.picture);
    new ResizeObserver(() => this.draw()).observe(element);
    this.picture.addEventListener("click", (event) => this.zoom(this.nodeOf(event.target)));
    this.picture.addEventListener("keydown", (event) => this.key(event));
    for (const name of ["pointerover", "focusin"]) {
      this.picture.addEventListener(name, (event) => this.describe(this.nodeOf(event.target)));
    }
    this.picture.addEventListener("pointerleave", () => this.describe(this.byId.get(this.current)));
  }

  // `snapshot` is the answer of GET /snapshot.
  show(snapshot) {
    this.root = grown(snapshot);
    this.byId = new Map();
    const visit = (node) => {
      this.byId.set(node.id, node);
      node.children.forEach(visit);
    };
    visit(this.root);
    this.draw();
  }

  setColour(colour) {
    this.colour = colour;
    this.draw();
  }

  zoom(node) {
    if (!node || node.kind === "beyond") return;
    // What fills the width already is a way out.
    const target = node.id === this.zoomed && node.parent ? node.parent : node;
    this.zoomed = target.id;
    this.current = node.id;
    const hadFocus = this.picture.contains(document.activeElement);
    this.draw();
    if (hadFocus) this.focus(target);
  }

  key(event) {
    const node = this.byId.get(this.current);
    if (!node || event.ctrlKey || event.metaKey || event.altKey) return;
    const siblings = node.parent?.children ?? [node];
    const at = siblings.indexOf(node);
    const steps = {
      ArrowDown: () => this.focus(node.children[0]),
      ArrowUp: () => this.focus(node.parent),
      ArrowLeft: () => this.focus(siblings[at - 1]),
      ArrowRight: () => this.focus(siblings[at + 1]),
      Home: () => this.focus(siblings[0]),
      End: () => this.focus(siblings.at(-1)),
      Enter: () => this.zoom(node),
      " ": () => this.zoom(node),
      Escape: () => this.zoom(this.byId.get(this.zoomed)?.parent ?? this.root),
    };
    if (!(event.key in steps)) return;
    event.preventDefault();
    steps[event.key]();
  }

  focus(node) {
    if (!node) return;
    this.current = node.id;
    // The keyboard may leave what is zoomed into.
    const inside = this.rows.some(({ node: drawn }) => drawn === node);
    if (!inside) this.zoomed = (node.parent ?? node).id;
    this.draw();
    this.boxOf(node.id)?.focus({ preventScroll: true });
    this.describe(node);
  }

  nodeOf(target) {
    return this.byId.get(target.closest("[data-node]")?.dataset.node);
  }

  boxOf(id) {
    return this.picture.querySelector(`[data-node="${CSS.escape(id)}"]`);
  }

  draw() {
    const width = this.element.clientWidth;
    if (!this.root || !width) return;
    const focus = this.byId.get(this.zoomed) ?? this.root;
    this.zoomed = focus.id;
    const hadFocus = this.picture.contains(document.activeElement);
    this.rows = layOut(focus, width);
    if (!this.rows.some(({ node }) => node.id === this.current)) this.current = focus.id;
    const levels = 1 + Math.max(...this.rows.map(({ level }) => level));
    this.picture.setAttribute("width", width);
    this.picture.setAttribute("height", levels * ROW);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${levels * ROW}`);
    this.picture.replaceChildren(...this.rows.map((row) => this.box(row)));
    if (hadFocus) this.boxOf(this.current)?.focus({ preventScroll: true });
    this.onZoom(focus);
    this.describe(this.byId.get(this.current));
  }

  box({ node, level, x, width }) {
    const shown = width > 34 ? clipped(label(node), Math.floor((width - 14) / CHARACTER)) : "";
    return svg(
      "g",
      {
        role: "treeitem",
        class: `node ${node.kind} ${this.heat(node)}${node.locked ? " locked" : ""}${width < 8 ? " small" : ""}`,
        "data-node": node.id,
        tabindex: node.id === this.current ? 0 : -1,
        "aria-level": node.depth + 1,
        "aria-label": `${label(node)}: ${facts(node).join(", ")}`,
      },
      svg("rect", { x, y: level * ROW, width: Math.max(width - 1, 0.5), height: ROW - 2, rx: width > 6 ? 3 : 0 }),
      shown && svg("text", { x: x + 7, y: level * ROW + 17 }, shown),
    );
  }

  heat(node) {
    const value = node[this.colour];
    if (node.kind !== "segment") return "";
    if (value === null) return node.locked ? "heat5" : "heat0";
    const { bounds } = STEPS[this.colour];
    const step = this.colour === "idle_seconds" ? bounds.findIndex((bound) => value > bound) : bounds.findIndex((bound) => value <= bound);
    return `heat${step < 0 ? 5 : step}`;
  }

  scale() {
    const { from, to } = STEPS[this.colour];
    const swatches = [0, 1, 2, 3, 4, 5].map((step) => html("span", { class: `swatch heat${step}` }));
    return [from, html("span", { class: "swatches", "aria-hidden": "true" }, ...swatches), to];
  }

  describe(node) {
    if (!node) return;
    byId("detail").replaceChildren(
      html("p", { class: node.text ? "text" : "" }, node.text ? oneLine(node.text) + (node.blocks ? " …" : "") : label(node)),
      html("p", { class: "sub" }, facts(node).join(" · ")),
    );
  }
}

// One tree of all workers' and namespaces' trees.
function grown({ workers }) {
  const tops = workers.map((worker) => {
    const nodes = worker.nodes.map((node) => ({
      ...node,
      id: `${worker.worker}/${node.id}`,
      blockSize: worker.block_size,
      value: node.blocks + node.blocks_below,
      children: [],
    }));
    nodes.forEach((node, i) => {
      node.parent = worker.nodes[i].parent < 0 ? null : nodes[worker.nodes[i].parent];
      node.parent?.children.push(node);
    });
    const roots = nodes.filter((node) => node.parent === null);
    // A lone namespace without a name is all there is.
    const alone = roots.length === 1 && roots[0].namespace === "" ? roots[0] : null;
    return top("worker", `${worker.worker}/`, `worker ${worker.worker}`, alone ? alone.children : roots, worker.num_blocks, worker.num_nodes);
  });
  const sum = (name) => tops.reduce((total, each) => total + each[name], 0);
  const root =
    tops.length === 1
      ? Object.assign(tops[0], { kind: "all", name: "all prompts" })
      : top("all", "all", "all workers", tops, sum("value"), sum("nodes_below"));
  deepen(root, 0);
  return root;
}

function top(kind, id, name, children, value, nodes) {
  const node = { kind, id, name, children, value, blocks: 0, blocks_below: value, nodes_below: nodes, parent: null, locked: false };
  for (const child of children) child.parent = node;
  return node;
}

function deepen(node, depth) {
  node.depth = depth;
  node.children.sort((one, other) => rank(one) - rank(other) || other.value - one.value);
  for (const child of node.children) deepen(child, depth + 1);
}

const rank = ({ kind }) => ({ others: 1, beyond: 2 })[kind] ?? 0;

function layOut(focus, width) {
  const rows = [];
  const ancestors = [];
  for (let node = focus.parent; node; node = node.parent) ancestors.unshift(node);
  ancestors.forEach((node, level) => rows.push({ node, level, x: 0, width }));
  const place = (node, level, x, scale) => {
    rows.push({ node, level, x, width: node.value * scale });
    if (level - ancestors.length >= MAX_ROWS) return;
    for (const child of node.children) {
      place(child, level + 1, x, scale);
      x += child.value * scale;
    }
  };
  place(focus, ancestors.length, 0, width / Math.max(focus.value, 1));
  return rows;
}

export function label(node) {
  switch (node.kind) {
    case "all":
    case "worker":
      return node.name;
    case "namespace":
      return node.namespace === "" ? "no namespace" : node.namespace;
    case "others":
      return `${count(node.nodes, "smaller segment")}`;
    case "beyond":
      return `${count(node.nodes, "segment")} further down`;
    default:
      return node.text ? oneLine(node.text) : `${whole(node.blocks * node.blockSize)} tokens`;
  }
}

function facts(node) {
  const found = [];
  if (node.kind === "segment") {
    const end = node.start + node.blocks * node.blockSize;
    found.push(`tokens ${whole(node.start)} to ${whole(end)}`, count(node.blocks, "block"));
  } else found.push(count(node.value, "block"));
  if (node.children.length) found.push(`${count(node.nodes_below, "segment")} with ${count(node.blocks_below, "block")} below`);
  if (node.uses) found.push(`used by ${count(node.uses, "request")}`);
  if (typeof node.idle_seconds === "number") found.push(`last ${duration(node.idle_seconds)} ago`);
  if (node.locked) found.push("in use now");
  return found;
}

function clipped(text, length) {
  return text.length <= length ? text : length < 4 ? "" : `${text.slice(0, length - 1)}…`;
}
