// Filters the board, and shows where a number comes from. An entry is a line of the table together
// with its bar, its dot and its line.
"use strict";
const lines = [...document.querySelectorAll("#table tbody tr")];
const parts = lines.map(() => []);
for (const part of document.querySelectorAll("[data-entry]")) parts[part.dataset.entry].push(part);

const inputs = [...document.querySelectorAll("#filters [name]")];
function filter() {
  let shown = 0;
  for (const line of lines) {
    const fits = inputs.every(({ name, value }) => name === "method"
      ? line.dataset.method.includes(value.trim().toLowerCase())
      : value === "" || line.dataset[name] === value);
    for (const part of parts[line.dataset.entry]) part.classList.toggle("out", !fits);
    shown += fits;
  }
  document.getElementById("count").textContent = `${shown} of ${lines.length} lines`;
  scaleBars();
  placeDots();
}

const visible = (selector) => [...document.querySelectorAll(`${selector}:not(.out)`)];
const most = (values) => Math.max(1, ...values);

function scaleBars() {
  const bars = visible("#speedup .entry").map((entry) => entry.querySelector("svg"));
  const width = most(bars.map((bar) => Number(bar.dataset.most))) * 1.01;
  for (const bar of bars) bar.setAttribute("viewBox", `0 0 ${width} 14`);
}

function placeDots() {
  const dots = visible("#lengths .dot");
  const right = 1.08 * most(dots.map((dot) => Number(dot.dataset.x)));
  const top = 1.12 * most(dots.map((dot) => Number(dot.dataset.y)));
  const x = (value) => 40 + 350 * value / right, y = (value) => 225 - 210 * value / top;
  const set = (element, values) => {
    for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
    return element;
  };
  for (const dot of dots) set(dot, { cx: x(dot.dataset.x), cy: y(dot.dataset.y) });
  const end = Math.min(right, top);
  set(document.getElementById("slant"), { x1: x(0), y1: y(0), x2: x(end), y2: y(end) });
  set(document.getElementById("ar"), { x1: 40, x2: 390, y1: y(1), y2: y(1) });
  const ticks = (last, place, where) => {
    const step = [0.5, 1, 2, 5, 10].find((each) => last / each <= 7) ?? Math.ceil(last / 7);
    return Array.from({ length: Math.floor(last / step) + 1 }, (_, i) => {
      const text = document.createElementNS(document.getElementById("ticks").namespaceURI, "text");
      text.textContent = i * step;
      return set(text, { class: "tick", ...where(place(i * step)) });
    });
  };
  document.getElementById("ticks").replaceChildren(
    ...ticks(right, x, (at) => ({ x: at, y: 241, "text-anchor": "middle" })),
    ...ticks(top, y, (at) => ({ x: 33, y: at + 4, "text-anchor": "end" })));
}
for (const input of inputs) input.addEventListener("input", filter);
filter();

const tip = document.getElementById("tip");
let current = null, pinned = false;
function hide() {
  if (current !== null) for (const part of parts[current]) part.classList.remove("on");
  current = null;
  pinned = false;
  tip.hidden = true;
  tip.classList.remove("pinned");
}
function show(part, x, y) {
  if (part.dataset.entry !== current) {
    hide();
    current = part.dataset.entry;
    for (const each of parts[current]) each.classList.add("on");
    const line = parts[current].find((each) => each.tagName === "TR");
    tip.querySelector("b").textContent = `${line.dataset.method}, ${line.dataset.category} prompts`;
    tip.querySelector("dl").replaceWith(
      document.getElementById(`row-${line.dataset.row}`).content.cloneNode(true));
    tip.hidden = false;
  }
  // Beside the pointer, and inside the window.
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
  const below = y + 18 + tip.offsetHeight <= innerHeight;
  tip.style.top = `${below ? y + 18 : Math.max(8, y - tip.offsetHeight - 12)}px`;
}
const entryAt = (event) => event.target.closest("[data-entry]");
document.addEventListener("pointermove", (event) => {
  if (pinned || event.pointerType === "touch") return;
  const part = entryAt(event);
  if (part) show(part, event.clientX, event.clientY);
  else hide();
});
document.addEventListener("focusin", (event) => {
  const part = entryAt(event);
  if (!part || pinned) return;
  const box = part.getBoundingClientRect();
  show(part, box.left, box.bottom - 14);
});
document.addEventListener("focusout", () => { if (!pinned) hide(); });
document.addEventListener("click", (event) => {
  if (tip.contains(event.target) && !event.target.closest("button")) return;
  const part = entryAt(event);
  hide();
  if (!part) return;
  show(part, event.clientX, event.clientY);
  pinned = true;
  tip.classList.add("pinned");
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
