// The prompts that are asked for most, as a tree of runs of blocks.
import { bytes, el, fill, stack, whole } from "./dom.js";

// *names* are the models of the namespaces.
export function showPrompts(place, runs, blockBytes, names, acts) {
  if (!runs.length) {
    fill(place, el("p", { class: "empty" }, "No prompt has been found in the cache lately."));
    return;
  }
  const most = Math.max(...runs.map((run) => run.hits));
  const longest = Math.max(...runs.map((run) => run.blocks));
  const depths = [];
  const items = runs.map((run, i) => {
    depths.push(run.above < 0 ? 0 : depths[run.above] + 1);
    return item(run, depths[i], { most, longest, blockBytes, names, acts });
  });
  fill(place, el("ul", { class: "tree", role: "tree", "aria-label": "Hottest prompts" }, ...items));
}

function item(run, depth, { most, longest, blockBytes, names, acts }) {
  const first = run.first_block + 1, end = run.first_block + run.blocks;
  const range = first === end ? `block ${whole(first)}` : `blocks ${whole(first)}–${whole(end)}`;
  const gone = run.blocks - Math.max(run.host_blocks, run.disk_blocks, run.remote_blocks);
  const onlyDisk = Math.max(0, Math.min(run.disk_blocks, run.blocks - run.host_blocks));
  const onlyRemote = Math.max(0, Math.min(run.remote_blocks, run.blocks - run.host_blocks - onlyDisk));
  const parts = [["host", run.host_blocks], ["disk", onlyDisk], ["remote", onlyRemote], ["none", Math.max(0, gone)]];
  const places = [["host", run.host_blocks], ["disk", run.disk_blocks], ["remote", run.remote_blocks]];
  const where = places.filter(([, count]) => count).map(([tier, count]) => `${tier} ${whole(count)}`).join(", ") || "in no tier";
  const more = [
    depth ? null : names[run.namespace],
    where,
    run.children > 1 ? `${whole(run.children)} go on from it` : null,
    run.leased_blocks ? `${whole(run.leased_blocks)} leased` : null,
    run.is_cut ? "its beginning is not shown" : null,
  ].filter(Boolean).join(" · ");
  const width = 14 + 136 * Math.sqrt(run.blocks / longest);
  const name = el("div", { class: "what" },
    `${range} `, el("small", {}, `${bytes(run.blocks * blockBytes)} · `),
    el("code", { title: run.last_block }, run.last_block.slice(0, 12)), el("br"), el("small", {}, more));
  const hits = el("div", { class: "hits" }, el("b", {}, whole(run.hits)), run.hits === 1 ? " hit" : " hits",
    el("div", { class: "meter" }, el("i", { "width%": (100 * run.hits) / most })));
  const indent = Math.min(depth, 8) * 18;
  return el("li", { role: "treeitem", "aria-level": depth + 1, "data-block": run.last_block },
    el("div", { class: "run", indent }, depth ? el("i", { class: "elbow" }) : null,
      el("div", { class: "bar" }, stack(parts, run.blocks, { px: Math.round(width), role: "img", "aria-label": where })), name),
    hits, el("div", { class: "acts" }, ...acts(run)));
}
