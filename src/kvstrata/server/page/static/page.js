// Asks once a second, and shows what it hears.
import { Chart } from "./charts.js";
import { byId, bytes, number, percent } from "./dom.js";
import { showPrompts } from "./prompts.js";
import { curves, showCounters, showFigures, showHolds, showNamespaces, showTiers } from "./sections.js";
import { ask, askForToken, clear, clearButton, drainDialog, runButtons, showWarming, takeToken, unpinButton, warmFileButton } from "./verbs.js";

const KEPT = 900, PERIOD_MS = 1000, SLOWEST_MS = 10_000;
const THEMES = ["system", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const charts = {
  hits: new Chart(byId("chart-hits"), "Blocks looked up per second, by tier", { stacked: true, format: number }),
  moves: new Chart(byId("chart-moves"), "Bytes moved per second", { binary: true, format: bytes }),
  latency: new Chart(byId("chart-latency"), "Milliseconds a call takes", { format: number }),
  fill: new Chart(byId("chart-fill"), "How full each tier is", { format: percent, ceiling: 1 }),
};
let samples = [], isPaused = false, waitMs = PERIOD_MS, drain = "off";

async function turn() {
  try {
    if (!isPaused && !document.hidden) await look();
    waitMs = PERIOD_MS;
  } catch (error) {
    if (error.status === 401) askForToken(look);
    status("the page does not answer", "gone");
    waitMs = Math.min(SLOWEST_MS, waitMs * 2);
  }
  setTimeout(turn, waitMs);
}

async function look() {
  const after = samples.length ? samples[samples.length - 1].number : 0;
  const { admin, seen, warming } = await ask(`api/state?after=${after}`);
  const report = seen.report;
  if (seen.latest < after) samples = [];
  byId("socket").textContent = seen.socket;
  samples = [...samples, ...seen.samples.filter((each) => each.number > (samples.at(-1)?.number ?? 0))].slice(-KEPT);
  if (seen.problem) status(seen.problem, "gone");
  else status("live", "live");
  document.title = seen.problem ? "KVStrata: not answering" : "KVStrata";
  if (report) show(report, seen.hottest, admin, warming);
}

function show(report, hottest, admin, warming) {
  const sizes = Object.fromEntries(report.tiers.map((tier) => [tier.tier, tier.block_bytes]));
  const names = Object.fromEntries(report.namespaces.map((each) => [each.namespace, each.parts.model]));
  const none = () => [];
  showFigures(samples, report);
  showTiers(report, samples, admin ? (tier) => [clearButton(tier.tier, () => clear(null, tier.tier, tier.tier, sizes))] : none);
  showPrompts(byId("prompts"), hottest, report.tiers[0].block_bytes, names, admin ? (run) => runButtons(run, warming) : none);
  showNamespaces(report, admin ? (each) => [warmFileButton(each, warming),
    clearButton(each.namespace, () => clear(each.namespace, null, `namespace ${each.namespace}`, sizes))] : none);
  showWarming(byId("warming"), warming);
  showHolds(report, admin ? (pin) => [unpinButton(pin.number)] : none);
  showCounters(report);
  const { times, ...series } = curves(samples, report);
  for (const [name, chart] of Object.entries(charts)) chart.show(times, series[name]);
  drain = report.drain;
  byId("drain").hidden = !admin;
  byId("drain").textContent = drain === "off" ? "Drain…" : "Undo drain…";
  notice(report);
}

function notice(report) {
  const off = report.tiers.filter((tier) => tier.switched_off).map((tier) => tier.tier);
  const said = [];
  if (report.drain === "draining") said.push("Draining: saves are refused, blocks are being written. Not safe to stop yet.");
  if (report.drain === "drained") said.push("Drained: saves are refused, everything is written. Safe to stop.");
  if (off.length) said.push(`Switched off after repeated failures: ${off.join(", ")}.`);
  byId("notice").hidden = !said.length;
  if (byId("notice").textContent !== said.join(" ")) byId("notice").textContent = said.join(" ");
}

function status(text, kind) {
  const place = byId("status");
  if (place.textContent !== text) place.textContent = text;
  place.className = `status ${kind}`;
}

function theme(choice) {
  localStorage.setItem("kvstrata-theme", choice);
  byId("theme").textContent = `Theme: ${choice}`;
  document.documentElement.dataset.theme = choice === "system" ? (dark.matches ? "dark" : "light") : choice;
}

byId("theme").addEventListener("click", () => theme(THEMES[(THEMES.indexOf(localStorage.getItem("kvstrata-theme")) + 1) % THEMES.length]));
byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").textContent = isPaused ? "Go on" : "Pause";
  byId("pause").setAttribute("aria-pressed", String(isPaused));
});
byId("drain").addEventListener("click", () => drainDialog(drain));
dark.addEventListener("change", () => theme(localStorage.getItem("kvstrata-theme")));
theme(THEMES.includes(localStorage.getItem("kvstrata-theme")) ? localStorage.getItem("kvstrata-theme") : "system");
takeToken();
turn();
