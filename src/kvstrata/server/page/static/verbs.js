// What the page may do, where it may: buttons, dialogs, and the token.
import { byId, bytes, el, fill, whole } from "./dom.js";

const KEY = "kvstrata-token";

// The token comes behind the # of the address, which browsers do not send, and goes from there.
export function takeToken() {
  const said = new URLSearchParams(location.hash.slice(1)).get("token");
  if (said) {
    sessionStorage.setItem(KEY, said);
    history.replaceState(null, "", location.pathname);
  }
}

export const ask = (path, order = null) => send(path, order && JSON.stringify(order), "application/json");

async function send(path, body, type) {
  const headers = {}, token = sessionStorage.getItem(KEY);
  if (token) headers.authorization = `Bearer ${token}`;
  if (body) headers["content-type"] = type;
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body,
    credentials: "omit", redirect: "error", signal: AbortSignal.timeout(body ? 400_000 : 5_000) });
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

// Of a *tier*, or of a *namespace* in the tier that is chosen, or in all. Shows first what would go.
export async function clear(namespace, tier, what, sizes) {
  const order = { namespace, tier, dry_run: true };
  const losses = el("div");
  const choice = tier ? null : el("select", { id: "tier", onchange: () => {
    order.tier = choice.value || null;
    count().catch((error) => fill(losses, el("p", {}, error.message)));
  } }, el("option", { value: "" }, "all tiers"), ...Object.keys(sizes).map((name) => el("option", { value: name }, name)));
  const count = async () => {
    fill(losses);
    const asked = order.tier, { report } = await ask("api/clear", order);
    if (asked === order.tier) fill(losses, ...lossesOf(report, sizes));
  };
  try {
    await count();
  } catch (error) {
    dialog(`Clear ${what}`, [el("p", {}, error.message)], async () => {});
    return;
  }
  const where = choice ? [el("label", { for: "tier" }, "In"), choice] : [];
  dialog(`Clear ${what}?`, [...where, losses], () => ask("api/clear", { ...order, dry_run: false }), { ok: "Clear", danger: true });
}

function lossesOf(report, sizes) {
  const lines = Object.entries(report.blocks).map(([name, blocks]) =>
    el("li", {}, `${name}: ${whole(blocks)} blocks, ${bytes(blocks * (sizes[name] ?? 0))}`));
  const lost = el("p", {}, `In no other tier, and to be computed again: ${whole(report.lost_blocks)} blocks.`);
  const kept = report.in_use_blocks ? el("p", {}, `In use or pinned, and kept: ${whole(report.in_use_blocks)} blocks.`) : "";
  return [el("p", {}, "This would go:"), el("ul", {}, ...lines), lost, kept];
}

export const clearButton = (key, run) => act("Clear…", `clear-${key}`, run, { class: "danger" });

const isBusy = (warming) => Boolean(warming && !warming.is_over);

export function warmFileButton({ namespace, parts }, warming) {
  const run = () => {
    const input = el("input", { type: "file", id: "prompts-file", required: true });
    const form = "Prompts, one a line as JSON: a list of token ids, or a text where the page was started with a tokenizer.";
    const note = el("p", {}, form);
    dialog(`Warm prompts of ${parts.model ?? namespace}`, [el("label", { for: "prompts-file" }, "File"), input, note], async () => {
      const [file] = input.files;
      note.textContent = `Reading ${file.name}: this can take half a minute.`;
      try {
        await send(`api/warm-file?${new URLSearchParams({ namespace, name: file.name })}`, file, "application/jsonl");
      } finally {
        note.textContent = form;
      }
    }, { ok: "Warm" });
  };
  return act("Warm…", `warm-${namespace}`, run, { title: "Bring the prompts of a file into host memory", disabled: isBusy(warming) });
}

export function showWarming(place, warming) {
  place.hidden = !warming;
  if (!warming) return;
  const { name, prompts, ended_prompts: ended, host_blocks: host, asked_blocks: asked } = warming;
  const short = warming.is_over && host < asked ? "; others are in no tier, or there was no room" : "";
  const said = `${name}: ${whole(ended)} of ${whole(prompts)} prompts, ${whole(host)} of ${whole(asked)} blocks in host memory${short}`;
  const bar = place.querySelector("progress"), text = place.querySelector("span");
  bar.max = Math.max(asked, 1);
  bar.value = host;
  bar.hidden = warming.is_over;
  const told = warming.problem ? `${said}. ${warming.problem}` : said;
  if (text.textContent !== told) text.textContent = told;
  text.className = warming.problem ? "problem" : "";
}

export function runButtons(run, warming) {
  const order = { namespace: run.namespace, last_block: run.last_block };
  const isMine = warming && warming.name === run.last_block;
  const label = isMine && !warming.is_over ? `Warming ${whole(warming.host_blocks)}/${whole(warming.asked_blocks)}`
    : isMine && warming.problem ? "Warm failed" : "Warm";
  const about = isMine && warming.problem ? warming.problem : "Bring the prompt up to here into host memory";
  return [
    act(label, `warm-${run.last_block}`, () => ask("api/warm", order).catch((e) => dialog("Warm", [el("p", {}, e.message)], async () => {})),
      { title: about, disabled: isBusy(warming) }),
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
