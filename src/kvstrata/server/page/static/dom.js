// Elements and figures. Whatever comes from a server becomes text, never markup.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  set(made, attributes);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(made, attributes);
  made.append(...children);
  return made;
}

function set(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "width%") made.style.width = `${value}%`;
    else if (name === "px") made.style.width = `${value}px`;
    else if (name === "indent") made.style.marginLeft = `${value}px`;
    else if (name === "color") made.style.background = value;
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
}

export const byId = (id) => document.getElementById(id);

// The elements of *place* become *children*; a button that has the focus keeps it.
export function fill(place, ...children) {
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const open = new Set([...place.querySelectorAll("details[open]")].map((each) => each.dataset.key));
  place.replaceChildren(...children);
  for (const each of place.querySelectorAll("details")) each.open ||= open.has(each.dataset.key);
  if (focused) [...place.querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused)?.focus();
}

export const COLORS = ["host", "disk", "remote", "none", "loaded", "saved", "promoted", "cascaded", "evicted"]
  .reduce((all, name) => ({ ...all, [name]: `var(--${name})` }), {});

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(count) {
  let power = 0;
  while (count >= 1024 && power < UNITS.length - 1) {
    count /= 1024;
    power += 1;
  }
  return `${power && count < 100 ? count.toFixed(1) : Math.round(count)} ${UNITS[power]}`;
}

export const whole = (count) => Math.round(count).toLocaleString("en-US");

export function number(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (value >= 100 || Number.isInteger(value)) return whole(value);
  return value >= 1 ? value.toFixed(1) : value.toFixed(2);
}

export const percent = (part) => `${(100 * part).toFixed(part > 0 && part < 0.995 ? 1 : 0)} %`;

export function stack(parts, total, attributes = {}) {
  const bars = parts
    .filter(([, count]) => count > 0)
    .map(([name, count]) => el("i", { class: name, "width%": (100 * count) / Math.max(total, 1) }));
  return el("div", { class: "stack", ...attributes }, ...bars);
}

export function table(titles, rows) {
  const heads = titles.map((title) => el("th", { scope: "col", class: title.startsWith("#") ? "n" : null }, title.replace(/^#/, "")));
  const body = rows.map((row) =>
    el("tr", {}, ...row.map((cell, i) => el("td", { class: titles[i].startsWith("#") ? "n" : null }, cell ?? ""))));
  return el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...body));
}
