// The live page: asks the server every second while somebody looks, and shows what it says.

import { Refused, fetchJson, hasKey, setKey } from "./api.js";
import { Chart } from "./chart.js";
import { byId, html } from "./dom.js";
import { count, duration, oneLine, percent, seconds, speed, whole } from "./format.js";
import { Icicle, label } from "./icicle.js";

const DATA_SECONDS = 1;
const TREE_SECONDS = 3;
const REASONS = {
  new: ["new", "nothing known goes on from there"],
  diverged: ["diverged", "an earlier prompt goes on otherwise from there"],
  evicted: ["evicted", "was cached, and given up for others"],
  partial_block: ["partial block", "was known, but filled no block"],
  in_flight: ["in flight", "another request was computing it"],
  last_token: ["last token", "always computed"],
  logprobs: ["log-probabilities", "computed because they were asked for"],
};

const charts = {
  hitRate: new Chart(byId("hit-rate-chart"), "Hit rate", [{ name: "hit rate", kind: "main" }], percent, { most: 1 }),
  ttft: new Chart(byId("ttft-chart"), "Time to first token", [{ name: "mean", kind: "main" }], seconds),
  speed: new Chart(byId("speed-chart"), "Tokens generated a second", [{ name: "tokens/s", kind: "main" }], speed),
  queue: new Chart(
    byId("queue-chart"),
    "Requests",
    [{ name: "waiting", kind: "second" }, { name: "running", kind: "main" }],
    whole,
  ),
  blocks: new Chart(
    byId("blocks-chart"),
    "Cache blocks",
    [{ name: "locked", kind: "locked" }, { name: "cached", kind: "cached" }],
    whole,
    { stacked: true, height: 94 },
  ),
};
const tree = new Icicle(byId("tree"), showCrumbs);
let paused = false;
let requestsShown = "";
let adviceShown = "";

// --- the last minutes

const sum = (values) => values.reduce((total, value) => total + value, 0);

// For each second the sum of the last `window` ones.
function trailing(values, window) {
  let total = 0;
  return values.map((value, at) => (total += value - (at >= window ? values[at - window] : 0)));
}

// A round of asking takes a little more than a second, so that now and then one has no answer of its own.
function held(values) {
  return values.map((value, at) => value ?? values[at - 1] ?? values[at - 2] ?? null);
}

const ratio = (above, below) => above.map((value, at) => (below[at] > 0 ? value / below[at] : null));

function showSeries({ series, now, requests }) {
  const minute = (name) => sum(series[name].slice(-60));
  const prompt = minute("prompt_tokens");
  const first = minute("first_tokens");
  byId("hit-rate").textContent = prompt ? percent(minute("cached_tokens") / prompt) : "–";
  byId("ttft").textContent = first ? seconds(minute("first_token_seconds") / first) : "–";
  const mostly = (hit) => requests.filter((each) => 2 * each.cached_tokens >= each.prompt_tokens === hit).map((each) => each.first_token_seconds);
  const [hits, misses] = [median(mostly(true)), median(mostly(false))];
  byId("ttft-sub").textContent =
    hits !== null && misses !== null ? `mean; medians: cached ${seconds(hits)}, not ${seconds(misses)}` : "mean, last minute";
  byId("speed").textContent = speed(sum(series.generated_tokens.slice(-11, -1)) / 10);
  const ten = (name) => trailing(series[name], 10);
  charts.hitRate.show([ratio(ten("cached_tokens"), ten("prompt_tokens"))]);
  charts.ttft.show([ratio(ten("first_token_seconds"), ten("first_tokens"))]);
  charts.speed.show([trailing(series.generated_tokens, 10).map((value) => value / 10)]);
  charts.queue.show([held(series.waiting), held(series.running)]);
  charts.blocks.most = now.blocks_total;
  charts.blocks.show([held(series.blocks_locked), held(series.blocks_cached)]);
}

function median(values) {
  return values.length ? values.sort((one, other) => one - other)[values.length >> 1] : null;
}

// --- totals

function showTotals({ totals, now, missed }) {
  const values = { ...totals, ...now };
  for (const element of document.querySelectorAll("[data-metric]")) {
    element.textContent = whole(values[element.dataset.metric]);
  }
  const computed = Object.entries(REASONS).map(([reason, [name, why]]) => ({ kind: reason, name, why, value: missed[reason] ?? 0 }));
  const unexplained = totals.prompt_tokens - totals.cached_tokens - sum(computed.map(({ value }) => value));
  showBar(
    "sources",
    [
      { kind: "hit", name: "from the cache", value: totals.cached_tokens },
      ...computed,
      { kind: "unexplained", name: "unexplained", why: "the server runs without prefix caching", value: unexplained },
    ],
    "tokens",
  );
  showBar(
    "blocks",
    [
      { kind: "locked", name: "in use", value: now.blocks_locked },
      { kind: "cached", name: "cached", value: now.blocks_cached },
      { kind: "free", name: "free", value: now.blocks_free, always: true },
    ],
    "blocks",
  );
}

function showBar(id, parts, unit) {
  const total = sum(parts.map(({ value }) => value));
  const shown = parts.filter(({ value, always }) => value > 0 || always);
  const bar = byId(`${id}-bar`);
  const described = shown.map(({ name, value }) => `${name} ${whole(value)}`).join(", ");
  bar.setAttribute("aria-label", total ? `${described} ${unit}` : `no ${unit} yet`);
  bar.replaceChildren(
    ...shown.map(({ kind, value }) => {
      const part = html("span", { class: kind });
      part.style.flexGrow = total ? value / total : 0;
      return part;
    }),
  );
  byId(`${id}-legend`).replaceChildren(
    ...shown.map(({ kind, name, value, why }) =>
      html(
        "li",
        { title: why },
        html("span", { class: `swatch ${kind}`, "aria-hidden": "true" }),
        `${name} `,
        html("b", { "data-part": kind }, whole(value)),
        total ? html("span", { class: "share" }, ` ${percent(value / total)}`) : null,
      ),
    ),
  );
}

// --- advice

function showAdvice({ advice, requests, show_prompts: shown }) {
  const key = JSON.stringify([advice, requests.length]);
  if (key === adviceShown) return;
  adviceShown = key;
  if (!advice.length) {
    const text = requests.length
      ? `Nothing stands out in the last ${count(requests.length, "request")}.`
      : "No requests yet. Advice is computed from the last hundred.";
    byId("advice").replaceChildren(html("li", { class: "none" }, text));
    return;
  }
  byId("advice").replaceChildren(
    ...advice.map((each) =>
      html(
        "li",
        {},
        html("h3", {}, each.text),
        html("p", { class: "sub" }, each.arithmetic),
        each.ours === null ? null : comparison(each),
        each.kind === "move_span" && !shown
          ? html("p", { class: "hint" }, "serve --show-prompts shows both texts here.")
          : null,
      ),
    ),
  );
}

// Both texts, what differs marked, and what that should come below.
function comparison({ ours, theirs, below }) {
  const shorter = Math.min(ours.length, theirs.length);
  let before = 0;
  while (before < shorter && ours[before] === theirs[before]) before++;
  let after = 0;
  while (after < shorter - before && ours.at(-1 - after) === theirs.at(-1 - after)) after++;
  const row = (name, text) => {
    const end = text.length - after;
    const differs = html("mark", {}, oneLine(text.slice(before, end)));
    return [html("dt", {}, name), html("dd", {}, oneLine(text.slice(0, before)), differs, oneLine(text.slice(end)))];
  };
  return html("dl", { class: "comparison" }, ...row("earlier", theirs), ...row("now", ours), html("dt", {}, "below"), html("dd", {}, oneLine(below)));
}

// --- requests

function showRequests({ requests }) {
  const key = JSON.stringify(requests);
  if (key === requestsShown) return;
  requestsShown = key;
  document.body.classList.toggle("one-namespace", requests.every(({ namespace }) => namespace === ""));
  byId("requests").replaceChildren(
    ...(requests.length
      ? requests.map(requestRow)
      : [html("tr", {}, html("td", { colspan: 9, class: "none" }, "None yet."))]),
  );
}

function requestRow(request) {
  const number = (value, extra = "") => html("td", { class: `number ${extra}` }, value);
  const time = new Date(1000 * request.time).toLocaleTimeString("en-GB");
  const share = request.prompt_tokens ? request.cached_tokens / request.prompt_tokens : 0;
  const filled = html("span", { class: "fill" });
  filled.style.width = `${100 * share}%`;
  const reasons = Object.entries(request.missed).map(([reason, tokens]) => {
    const [name, why] = REASONS[reason] ?? [reason, ""];
    const at = reason === "diverged" && request.position !== undefined ? ` at ${whole(request.position)}` : "";
    return html(
      "span",
      { class: "reason", title: why },
      html("span", { class: `swatch ${reason}`, "aria-hidden": "true" }),
      `${name} ${whole(tokens)}${at}`,
    );
  });
  return html(
    "tr",
    { "data-request": request.id },
    html("td", {}, time),
    html("td", { class: "namespace" }, request.namespace),
    number(whole(request.prompt_tokens)),
    html("td", { class: "number" }, html("span", { class: "meter", "aria-hidden": "true" }, filled), whole(request.cached_tokens)),
    number(whole(request.computed_tokens)),
    html("td", { class: "reasons" }, ...reasons),
    number(seconds(request.first_token_seconds)),
    number(whole(request.output_tokens), "less"),
    html("td", { class: "less" }, request.finish_reason ?? "running"),
  );
}

// --- the tree

function showCrumbs(focus) {
  const path = [];
  for (let node = focus; node; node = node.parent) path.unshift(node);
  const crumbs = path.map((node) => {
    const name = label(node);
    const button = html("button", { type: "button", "aria-current": node === focus ? "true" : null }, name.length > 28 ? `${name.slice(0, 27)}…` : name);
    button.addEventListener("click", () => node !== focus && tree.zoom(node));
    return button;
  });
  byId("crumbs").hidden = path.length < 2;
  byId("crumbs").replaceChildren(...crumbs);
}

function showTree(snapshot) {
  tree.show(snapshot);
  const of = (name) => sum(snapshot.workers.map((worker) => worker[name]));
  byId("tree-sub").textContent = of("num_nodes")
    ? `${count(of("num_nodes"), "segment")} in ${count(of("num_blocks"), "block")}; a box is as wide as the blocks in and below it` +
      (snapshot.show_prompts ? "" : "; texts are hidden without serve --show-prompts")
    : "Nothing is cached yet.";
  byId("tree").hidden = byId("detail").hidden = !of("num_nodes");
  byId("scale").replaceChildren(...tree.scale());
}

// --- going on

// Screen readers say every change of the state; the time since the start would have them speak each second.
function showStatus(text, kind, uptime = "") {
  if (byId("state").textContent !== text) byId("state").textContent = text;
  byId("uptime").textContent = uptime;
  byId("status").className = kind;
}

async function refreshData() {
  const data = await fetchJson("/dashboard/data");
  byId("login").hidden = true;
  byId("main").hidden = false;
  byId("model").textContent = data.model;
  document.title = `radixkv · ${data.model}`;
  showStatus(data.status === "ok" ? "up" : data.status, data.status, duration(data.uptime_s));
  showSeries(data);
  showTotals(data);
  showAdvice(data);
  showRequests(data);
}

async function refreshTree() {
  showTree(await fetchJson(`/snapshot?max_nodes=${innerWidth < 700 ? 200 : 500}`));
}

// What to do about it: false where asking again is of no use without another key.
function onFailure(error) {
  if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
    const wrong = error.status === 401 ? "The server does not know this key." : `The server says: ${error.message}`;
    if (hasKey() || error.status === 403) byId("login-why").textContent = wrong;
    byId("main").hidden = true;
    byId("login").hidden = false;
    showStatus("locked", "locked-out");
    return false;
  }
  if (!(error instanceof Refused || error instanceof TypeError || error instanceof DOMException)) throw error;
  showStatus(error instanceof Refused ? error.message : "does not answer", "lost");
  return true;
}

// One round after another, so that a slow server is not asked more and more.
async function go(refresh, every) {
  for (;;) {
    if (!paused && !document.hidden && !stopped) {
      try {
        await refresh();
      } catch (error) {
        if (!onFailure(error)) stopped = true;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * every));
  }
}

let stopped = false; // until there is another key

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
  stopped = false;
  refreshData().then(refreshTree).catch(onFailure);
});

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", paused);
});

for (const input of document.querySelectorAll("input[name=colour]")) {
  input.addEventListener("change", () => {
    tree.setColour(input.value);
    byId("scale").replaceChildren(...tree.scale());
  });
}

go(refreshData, DATA_SECONDS);
go(refreshTree, TREE_SECONDS);
