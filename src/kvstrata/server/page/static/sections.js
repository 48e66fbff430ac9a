// Everything but the charts and the prompts.
import { COLORS, bytes, byId, el, fill, number, percent, stack, table, whole } from "./dom.js";

const TIERS = ["host", "disk", "remote"];

export function showFigures(samples, report) {
  const minute = samples.slice(-60);
  const seconds = minute.reduce((sum, each) => sum + each.seconds, 0) || 1;
  const found = { host: 0, disk: 0, remote: 0, none: 0 };
  const moved = { loaded: 0, saved: 0 };
  let lookups = 0;
  for (const each of minute) {
    for (const tier in found) found[tier] += each.looked_up[tier];
    for (const name in moved) moved[name] += each.moved[name];
    lookups += each.lookups;
  }
  const asked = found.host + found.disk + found.remote + found.none;
  const size = report.tiers[0].block_bytes;
  const rate = (count) => `${bytes((count / seconds) * size)}/s`;
  fill(byId("figures"),
    figure(asked ? percent(1 - found.none / asked) : "–", "hit rate, last minute",
      stack(Object.entries(found), asked, { role: "img", "aria-label": Object.entries(found).map((e) => e.join(" ")).join(", ") })),
    figure(number(lookups / seconds), "lookups a second"),
    figure(rate(moved.loaded), "loaded by engines"),
    figure(rate(moved.saved), "saved by engines"),
    figure(whole(report.engines.length), report.engines.length === 1 ? "engine" : "engines"),
    figure(`${whole(report.running_gets)} / ${whole(report.running_puts)}`, "loads / saves running"));
}

const figure = (value, label, more = null) => el("div", { class: "figure" }, el("b", {}, value), el("span", {}, label), more);

export function showTiers(report, samples, acts) {
  fill(byId("tiers"), ...report.tiers.map((tier) => {
    const used = tier.used_blocks * tier.block_bytes, room = tier.capacity_blocks * tier.block_bytes;
    const part = tier.capacity_blocks ? tier.used_blocks / tier.capacity_blocks : 0;
    const said = tier.capacity_blocks ? `${bytes(used)} of ${bytes(room)} · ${percent(part)}` : `${bytes(used)} from here`;
    const waiting = tier.waiting_blocks ? ` · ${whole(tier.waiting_blocks)} blocks to be written` : "";
    const left = [[tier.uncleared_namespaces, "namespace"], [tier.unremoved_blocks, "other block"]].filter(([count]) => count);
    const uncleared = left.length ? ` · still to be cleared of ${left.map(([count, what]) => `${whole(count)} ${what}${count === 1 ? "" : "s"}`).join(" and ")}` : "";
    const breaker = tier.tier === "host" ? null : tier.switched_off
      ? el("span", { class: "badge bad" }, "switched off after failures") : el("span", { class: "badge ok" }, "breaker closed");
    return el("div", { class: "tier", "data-tier": tier.tier },
      el("h3", {}, el("i", { class: `swatch ${tier.tier}` }), tier.tier),
      el("div", { class: "bar", role: "img", "aria-label": `${tier.tier}: ${said}` },
        el("i", { class: tier.tier, "width%": 100 * part })),
      el("p", {}, el("b", {}, said), ` · ${whole(tier.used_blocks)} blocks of ${bytes(tier.block_bytes)}${waiting}${uncleared}${latency(samples, tier.tier)} `, breaker, " ", ...acts(tier)));
  }));
}

function latency(samples, tier) {
  const sums = {};
  for (const each of samples.slice(-60))
    for (const [name, calls] of Object.entries(each.operations))
      if (name.startsWith(`${tier} `)) {
        const sum = (sums[name.slice(tier.length + 1)] ??= { calls: 0, seconds: 0 });
        sum.calls += calls.calls;
        sum.seconds += calls.seconds;
      }
  return Object.entries(sums).map(([name, sum]) => ` · ${name} ${number((1e3 * sum.seconds) / sum.calls)} ms`).join("");
}

export function showNamespaces(report, acts) {
  const size = report.tiers[0].block_bytes;
  const rows = [...report.namespaces].sort((a, b) => b.blocks - a.blocks).map((each) => {
    const parts = Object.entries(each.parts).sort();
    const details = parts.length ? el("details", { "data-key": each.namespace }, el("summary", {}, `${parts.length} parts`),
      el("dl", { class: "parts" }, ...parts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]))) : null;
    const shown = stack([["host", each.host_blocks], ["disk", each.blocks - each.host_blocks]], each.blocks);
    return [el("div", {}, el("b", {}, each.parts.model ?? "not used yet"), el("br"), el("code", {}, each.namespace), details),
      each.parts.engine ?? "–", el("div", {}, whole(each.blocks), shown), whole(each.host_blocks), whole(each.disk_blocks),
      bytes(each.blocks * size), el("div", { class: "acts" }, ...acts(each))];
  });
  fill(byId("namespaces"), rows.length ? table(["model", "engine", "#blocks", "#host", "#disk", "#bytes", ""], rows)
    : el("p", { class: "empty" }, "No blocks yet."));
}

export function showHolds(report, acts) {
  const engines = report.engines.map((each) => [each.session, `${each.workers.length} of ${each.world_size}`,
    each.blocks_per_second ? number(each.blocks_per_second) : "–"]);
  const pins = report.pins.map((pin) => [String(pin.number), el("code", {}, pin.namespace), whole(pin.blocks), whole(pin.seconds_left),
    el("div", { class: "acts" }, ...acts(pin))]);
  fill(byId("holds"), el("div", { class: "holds" },
    el("div", {}, el("h3", {}, "Engines"), engines.length ? table(["session", "#workers", "#blocks/s computed"], engines)
      : el("p", { class: "empty" }, "No engine is connected.")),
    el("div", {}, el("h3", {}, `Pins: ${whole(report.pinned_blocks)} blocks`), pins.length
      ? table(["#pin", "namespace", "#blocks", "#seconds left", ""], pins) : el("p", { class: "empty" }, "Nothing is pinned.")),
    el("div", {}, el("h3", {}, "Tasks with leases"), el("p", { class: "empty" },
      `${whole(report.running_gets)} loads hold ${whole(report.leased_blocks)} blocks, and ${whole(report.running_puts)} saves run.`))));
}

export function showCounters(report) {
  const rows = Object.entries(report.counters).filter(([, value]) => value).sort()
    .map(([name, value]) => [el("code", {}, name), whole(value)]);
  fill(byId("counters"), table(["since start", "#count"], rows));
}

// What the charts show of *samples*.
export function curves(samples, report) {
  const size = report.tiers[0].block_bytes;
  const per = (pick) => samples.map((each) => pick(each) / each.seconds);
  const moves = ["loaded", "saved", "promoted", "cascaded", "evicted"];
  const stores = [...new Set(samples.flatMap((each) => Object.keys(each.operations)))].sort()
    .filter((name) => /(read|write|exists)/.test(name)).slice(0, 5);
  const tints = [COLORS.disk, COLORS.saved, COLORS.remote, COLORS.host, COLORS.evicted];
  return {
    times: samples.map((each) => each.at_seconds),
    hits: [...TIERS.filter((tier) => report.tiers.some((each) => each.tier === tier)), "none"].map((tier) => ({ name: tier === "none" ? "miss" : tier, color: COLORS[tier], values: per((each) => each.looked_up[tier]) })),
    moves: moves.map((name) => ({ name, color: COLORS[name], values: per((each) => each.moved[name] * size) })),
    latency: stores.map((name, i) => ({ name, color: tints[i], values: samples.map((each) => {
      const calls = each.operations[name];
      return calls ? (1e3 * calls.seconds) / calls.calls : null;
    }) })),
    fill: report.tiers.filter((tier) => tier.capacity_blocks).map((tier) => ({ name: tier.tier, color: COLORS[tier.tier],
      values: samples.map((each) => (each.used[tier.tier] ?? 0) / tier.capacity_blocks) })),
  };
}
