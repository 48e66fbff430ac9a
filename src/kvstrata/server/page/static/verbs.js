// What the page may do, where it may: buttons, dialogs, and the token.
import { byId, bytes, el, whole } from "./dom.js";

const KEY = "kvstrata-token";

// The token comes behind the # of the address, which browsers do not send, and goes from there.
export function takeToken() {
  const said = new URLSearchParams(location.hash.slice(1)).get("token");
  if (said) {
    sessionStorage.setItem(KEY, said);
    history.replaceState(null, "", location.pathname);
  }
}

export async function ask(path, order = null) {
  const headers = {}, token = sessionStorage.getItem(KEY);
  if (token) headers.authorization = `Bearer ${token}`;
  if (order) headers["content-type"] = "application/json";
  const answer = await fetch(path, { method: order ? "POST" : "GET", headers, body: order ? JSON.stringify(order) : null,
    credentials: "omit", redirect: "error", signal: AbortSignal.timeout(order ? 310_000 : 5_000) });
  const text = await answer.text();
  let value = {};
  try {
    value = JSON.parse(text);
  } catch {
    value = { problem: text };
  }
  if (!answer.ok) throw Object.assign(new Error(value.problem || answer.statusText), { status: answer.status });
  return value;
}

// A dialog; *act* is called with it on OK, and closes it unless it throws.
function dialog(title, body, act, { ok = "OK", danger = false } = {}) {
  const box = byId("dialog"), button = byId("dialog-ok"), problem = byId("dialog-problem");
  byId("dialog-title").textContent = title;
  byId("dialog-body").replaceChildren(...body);
  problem.textContent = "";
  button.textContent = ok;
  button.className = danger ? "danger" : "primary";
  button.disabled = false;
  byId("dialog-cancel").onclick = () => box.close();
  box.querySelector("form").onsubmit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    problem.textContent = "";
    try {
      await act();
      box.close();
    } catch (error) {
      problem.textContent = error.message;
      button.disabled = false;
    }
  };
  if (!box.open) box.showModal();
}

export function askForToken(accept) {
  if (byId("dialog").open) return;
  const input = el("input", { type: "password", autocomplete: "off", id: "token", required: true });
  dialog("This page needs its token", [el("label", { for: "token" }, "Whoever started kvstrata page has it."), input], async () => {
    sessionStorage.setItem(KEY, input.value.trim());
    await accept();
  });
}

const act = (label, key, run, attributes = {}) => el("button", { type: "button", "data-key": key, onclick: run, ...attributes }, label);

export async function clear(namespace, tier, what, sizes) {
  const order = { namespace, tier, dry_run: true };
  let report;
  try {
    report = (await ask("api/clear", order)).report;
  } catch (error) {
    dialog(`Clear ${what}`, [el("p", {}, error.message)], async () => {});
    return;
  }
  const lines = Object.entries(report.blocks).map(([name, blocks]) =>
    el("li", {}, `${name}: ${whole(blocks)} blocks, ${bytes(blocks * (sizes[name] ?? 0))}`));
  const notes = [el("p", {}, `In no other tier, and to be computed again: ${whole(report.lost_blocks)} blocks.`)];
  if (report.in_use_blocks) notes.push(el("p", {}, `In use, and kept: ${whole(report.in_use_blocks)} blocks.`));
  dialog(`Clear ${what}?`, [el("p", {}, "This would go:"), el("ul", {}, ...lines), ...notes],
    () => ask("api/clear", { ...order, dry_run: false }), { ok: "Clear", danger: true });
}

export const clearButton = (key, run) => act("Clear…", `clear-${key}`, run, { class: "danger" });

export function runButtons(run, warming) {
  const order = { namespace: run.namespace, last_block: run.last_block };
  const isMine = warming && warming.last_block === run.last_block;
  const label = isMine && !warming.is_over ? `Warming ${whole(warming.host_blocks)}/${whole(warming.asked_blocks)}`
    : isMine && warming.problem ? "Warm failed" : "Warm";
  const about = isMine && warming.problem ? warming.problem : "Bring the prompt up to here into host memory";
  return [
    act(label, `warm-${run.last_block}`, () => ask("api/warm", order).catch((e) => dialog("Warm", [el("p", {}, e.message)], async () => {})),
      { title: about, disabled: Boolean(warming && !warming.is_over) }),
    act("Pin…", `pin-${run.last_block}`, () => {
      const input = el("input", { type: "number", min: 1, max: 1e9, value: 3600, id: "ttl", required: true });
      dialog("Pin this prompt", [el("label", { for: "ttl" }, "Seconds"), input], () =>
        ask("api/pin", { ...order, ttl_seconds: Number(input.value) }), { ok: "Pin" });
    }),
  ];
}

export const unpinButton = (number) => act("Unpin", `unpin-${number}`, () => ask("api/unpin", { number }));

export function drainDialog(state) {
  const wanted = state === "off";
  const text = wanted ? "Saves are refused, and what no tier below has is written. Blocks are loaded as before." : "Engines save again.";
  dialog(wanted ? "Drain this server?" : "End the drain?", [el("p", {}, text)], () => ask("api/drain", { wanted }), { ok: wanted ? "Drain" : "Undo" });
}
