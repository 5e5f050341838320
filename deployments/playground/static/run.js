// One generation on the page: its figures, its text, and its rounds to step through.

import { drawTree, visible } from "./tree.js";

const number = (value, digits) =>
  Number.isFinite(value) ? value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : "–";

export class Run {
  constructor(place) {
    const template = document.querySelector("#run");
    this.element = template.content.firstElementChild.cloneNode(true);
    const find = (selector) => this.element.querySelector(selector);
    this.name = find("h2");
    this.state = find(".state");
    this.output = find(".output");
    this.prompt = find(".prompt");
    this.text = find(".text");
    this.slider = find("input");
    this.place = find(".place");
    this.told = find(".told");
    this.tree = find(".tree");
    this.why = find(".why");
    this.figures = Object.fromEntries(
      [...this.element.querySelectorAll("[data-figure]")].map((e) => [e.dataset.figure, e]),
    );
    this.slider.addEventListener("input", () => this.step(this.slider.value - this.selected));
    find(".previous").addEventListener("click", () => this.step(-1));
    find(".next").addEventListener("click", () => this.step(1));
    for (const box of [this.output, this.tree]) {
      box.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!by || event.ctrlKey || event.altKey || event.metaKey) return;
        event.preventDefault();
        this.step(by);
      });
    }
    for (const kind of ["pointerover", "click"]) {
      this.output.addEventListener(kind, (event) => {
        const round = event.target.dataset.round;
        if (round) this.show(Number(round));
      });
    }
    place.append(this.element);
    this.clear("", "");
  }

  /** Empty, for a method. */
  clear(method, prompt) {
    this.method = method;
    this.name.textContent = method;
    this.output.setAttribute("aria-label", `Output of ${method}`);
    this.tree.setAttribute("aria-label", `Draft tree of ${method}`);
    this.slider.setAttribute("aria-label", `Round of ${method}`);
    this.rounds = [];
    this.spans = []; // of each round
    this.tokenIds = [];
    this.drafted = this.accepted = 0;
    this.startedAt = this.firstAt = null;
    this.selected = 0;
    this.following = true;
    this.prompt.textContent = prompt;
    this.text.replaceChildren();
    this.tree.replaceChildren();
    this.told.textContent = "\u00a0";
    this.why.hidden = true;
    this.say("");
    this.draw();
  }

  say(state, kind = "") {
    this.state.textContent = state;
    this.element.dataset.state = kind;
  }

  start() {
    this.startedAt = performance.now();
    this.say("waiting for the first token", "running");
  }

  /** Take a round as the API sends it. */
  add(round) {
    if (!this.rounds.length) {
      this.firstAt = performance.now();
      this.say("generating", "running");
    }
    this.rounds.push(round);
    this.tokenIds.push(...round.token_ids);
    this.accepted += round.num_accepted;
    this.drafted += depth(round.draft.parent_indices);
    const number = this.rounds.length;
    const spans = round.token_ids.map((id, i) => {
      const span = document.createElement("span");
      span.className = `token ${i < round.num_accepted ? "accepted" : "own"}`;
      span.dataset.round = number;
      span.textContent = round.texts[i] ?? "";
      return span;
    });
    this.spans.push(spans);
    this.text.append(...spans);
    this.scheduleDraw();
  }

  /** Show what method auto chose in this generation, and why. */
  explain({ workload, ar_rounds, ar_round_ms, drafters }) {
    this.why.querySelector("caption").textContent =
      `What auto chose (prompt: ${workload}). Without a draft: ${ar_rounds} rounds, ${number(ar_round_ms, 1)} ms each.`;
    const rows = Object.entries(drafters).sort(([, a], [, b]) => b.rounds - a.rounds);
    this.why.querySelector("tbody").replaceChildren(
      ...rows.map(([name, of]) => {
        const row = document.createElement("tr");
        const cells = [
          name, number(of.rounds, 0), number(of.accepted, 0),
          of.acceptance.length ? `${number(100 * of.acceptance[0], 0)} %` : "–",
          of.promised_tokens_per_second ? number(of.promised_tokens_per_second, 0) : "–",
        ];
        row.append(...cells.map((text, i) => {
          const cell = document.createElement(i ? "td" : "th");
          if (!i) cell.scope = "row";
          cell.textContent = text;
          return cell;
        }));
        return row;
      }),
    );
    this.why.hidden = false;
  }

  /** Tokens per second after the first round, by the server's clock; NaN before the second. */
  get speed() {
    const [first, last] = [this.rounds[0], this.rounds.at(-1)];
    if (first === last) return NaN;
    return (this.tokenIds.length - first.token_ids.length) / (last.seconds - first.seconds);
  }

  get tau() {
    return this.tokenIds.length / this.rounds.length;
  }

  scheduleDraw() {
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const any = this.rounds.length > 0;
    const { speed, tau, rate, first, tokens, rounds } = this.figures;
    speed.textContent = number(this.speed, 0);
    tau.textContent = number(this.tau, 2);
    rate.textContent = this.drafted ? `${number((100 * this.accepted) / this.drafted, 0)} %` : "–";
    first.textContent = any ? `${number(this.firstAt - this.startedAt, 0)} ms` : "–";
    tokens.textContent = any ? number(this.tokenIds.length, 0) : "–";
    rounds.textContent = any ? number(this.rounds.length, 0) : "–";
    this.slider.disabled = !any;
    this.slider.min = any ? 1 : 0;
    this.slider.max = this.rounds.length;
    if (this.following) {
      this.select(this.rounds.length);
      this.output.scrollTop = this.output.scrollHeight;
    } else this.select(this.selected);
  }

  /** Show a round from now on, also while others come. */
  show(round) {
    this.following = false;
    this.select(round);
  }

  /** Bring the shown round's text into view by scrolling its box alone, not the page. */
  scroll() {
    const [span] = this.spans[this.selected - 1] ?? [];
    if (!span) return;
    const [box, mine] = [this.output.getBoundingClientRect(), span.getBoundingClientRect()];
    if (mine.top < box.top || mine.bottom > box.bottom) {
      this.output.scrollTop += mine.top - box.top - box.height / 2;
    }
  }

  step(by) {
    if (!this.rounds.length) return;
    this.show(Math.min(Math.max(this.selected + by, 1), this.rounds.length));
    this.scroll();
  }

  select(index) {
    const all = this.rounds.length;
    for (const span of this.spans[this.selected - 1] ?? []) span.classList.remove("chosen");
    for (const span of this.spans[index - 1] ?? []) span.classList.add("chosen");
    const drawn = this.drawn === this.rounds[index - 1];
    this.selected = index;
    this.slider.value = index;
    this.place.textContent = all ? `${index} of ${all}` : "no rounds yet";
    this.slider.setAttribute("aria-valuetext", this.place.textContent);
    this.drawn = this.rounds[index - 1];
    if (drawn || !this.drawn) return;
    const told = describe(this.drawn);
    this.slider.setAttribute("aria-valuetext", `${this.place.textContent}. ${told}`);
    this.told.textContent = told;
    const earlier = this.rounds[index - 2];
    const before = earlier ? earlier.texts.at(-1) : this.prompt.textContent.slice(-8);
    this.tree.replaceChildren(drawTree(this.drawn, before || "…", told));
    this.tree.scrollTo(0, 0);
  }
}

function depth(parents) {
  const depths = [];
  for (const parent of parents) depths.push(1 + (depths[parent] ?? 0));
  return Math.max(0, ...depths);
}

function describe({ draft, token_ids, texts, num_accepted }) {
  const nodes = draft.token_ids.length;
  const own = token_ids.length > num_accepted;
  const added = own ? ` The target added “${visible(texts[num_accepted], token_ids[num_accepted])}”.` : "";
  if (!nodes) return `No draft.${added}`;
  const deep = depth(draft.parent_indices);
  const what = deep === nodes ? `a chain of ${nodes}` : `a tree of ${nodes}, ${deep} deep`;
  return `Drafted ${what}; accepted ${num_accepted}.${added}`;
}
