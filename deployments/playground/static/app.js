// The playground: the form, and one or two runs beside each other.

import { Run } from "./run.js";
import { catalogue, generate, model, Refusal } from "./stream.js";
import { visible } from "./tree.js";

const $ = (id) => document.getElementById(id);
const EXAMPLES = {
  completion: "def fibonacci(n):\n",
  chat: "What is the capital of France, and what is it known for?",
};
const GROUPS = ["No drafts", "A draft model", "Text seen before", "The target itself", "Trained heads"];
const WAITS = "waits for its turn";
const TOP_SEED = 2 ** 32;

const selects = [$("method-0"), $("method-1")];
const runs = [new Run($("runs")), new Run($("runs"))];
let entries = new Map(); // of the catalogue, by name of the method
let stopper = null; // of the runs under way
const prompts = { ...EXAMPLES };

// --- what is served ---------------------------------------------------------------------------

async function load() {
  try {
    const [served, known] = await Promise.all([model($("key").value), catalogue()]);
    entries = new Map(known.map((entry) => [entry.name, entry]));
    $("model").textContent = served.id;
    if (served.has_chat_template && $("prompt").value === EXAMPLES.completion) {
      document.querySelector("[name=kind][value=chat]").click();
    }
    fill(selects[0], served.methods, served.default_method);
    fill(selects[1], served.methods, served.default_method === "ar" ? "prompt_lookup" : "ar");
    solve();
  } catch (error) {
    complain(error, true);
  }
}

function fill(select, methods, first) {
  const kept = select.value || first;
  const groups = new Map(GROUPS.map((group) => [group, []]));
  for (const name of methods) {
    const entry = entries.get(name) ?? { group: "Others", lossless: true };
    if (!groups.has(entry.group)) groups.set(entry.group, []);
    groups.get(entry.group).push(new Option(entry.lossless ? name : `${name} (lossy)`, name));
  }
  select.replaceChildren();
  for (const [label, options] of groups) {
    if (!options.length) continue;
    const group = document.createElement("optgroup");
    group.label = label;
    group.append(...options);
    select.append(group);
  }
  select.value = methods.includes(kept) ? kept : methods[0];
  explain();
}

/** Say what the chosen methods are, and which fields they have. */
function explain() {
  selects.forEach((select, i) => {
    const entry = entries.get(select.value);
    const paper = document.createElement("cite");
    paper.textContent = entry?.paper ?? "";
    $(`about-${i}`).replaceChildren(entry?.summary ?? "\u00a0", paper);
    if (!stopper && !runs[i].rounds.length) runs[i].clear(select.value, "");
  });
  const entry = chosen().map((name) => entries.get(name)).find((each) => each?.length);
  $("length").disabled = !entry;
  $("length").placeholder = entry ? (entry.adaptive ? "adaptive" : entry.length) : "none";
}

function chosen() {
  return selects.slice(0, $("compare").checked ? 2 : 1).map((select) => select.value);
}

// --- what goes wrong --------------------------------------------------------------------------

function complain(error, loading = false) {
  const refused = error instanceof Refusal;
  if (!refused) console.error(error);
  if (error.status === 401) $("access").open = true;
  $("problem-text").textContent = refused ? error.message : `The page failed: ${error.message}`;
  $("retry").hidden = !loading;
  $("problem").hidden = false;
}

function solve() {
  $("problem").hidden = true;
}

// --- generating -------------------------------------------------------------------------------

function value(id) {
  const text = $(id).value.trim();
  return text === "" ? undefined : Number(text);
}

function speculation(method) {
  const entry = entries.get(method);
  const length = value("length");
  return {
    method,
    ...(length !== undefined && entry?.length && { num_speculative_tokens: length }),
    ...(length !== undefined && entry?.length && entry.adaptive && { length: "fixed" }),
    ...(entry?.lossless === false && { allow_lossy: true }),
  };
}

async function generateAll() {
  if (stopper) return;
  const kind = document.querySelector("[name=kind]:checked").value;
  const prompt = $("prompt").value;
  const methods = chosen();
  if (!methods[0]) return load();
  const body = {
    temperature: value("temperature"),
    seed: value("seed") ?? Math.floor(Math.random() * TOP_SEED), // one for both
    max_tokens: value("max-tokens"),
  };
  solve();
  $("verdict").textContent = "\u00a0";
  stopper = new AbortController();
  busy(true);
  methods.forEach((method, i) => {
    runs[i].clear(method, kind === "chat" ? "" : prompt);
    runs[i].say(WAITS);
  });
  reveal();
  announce(`Generating with ${methods.join(" and ")}`);
  try {
    // One after the other: each has the machine to itself, so that speeds compare.
    for (const [i, method] of methods.entries()) {
      await follow(runs[i], generate(kind, prompt, { ...body, speculation: speculation(method) }, $("key").value, stopper.signal));
    }
    const told = methods.length > 1 ? [verdict(...runs)] : [];
    announce([...methods.map((_, i) => summary(runs[i])), ...told].join(" "));
  } catch (error) {
    for (const run of runs) if (run.state.textContent === WAITS) run.say("not run");
    if (error.name === "AbortError") announce("Stopped.");
    else complain(error);
  } finally {
    stopper = null;
    busy(false);
  }
}

async function follow(run, chunks) {
  run.start();
  try {
    let reason = "";
    for await (const chunk of chunks) {
      for (const choice of chunk.choices) {
        if (choice.round) run.add(choice.round);
        reason = choice.finish_reason ?? reason;
      }
      if (chunk.explanations?.[0]) run.explain(chunk.explanations[0]);
    }
    run.say(reason === "length" ? "reached max tokens" : "finished", "done");
  } catch (error) {
    if (error.name === "AbortError") run.say("stopped", "done");
    else run.say("failed", "failed");
    throw error;
  } finally {
    run.draw();
  }
}

function summary(run) {
  const speed = Number.isFinite(run.speed) ? `, ${Math.round(run.speed)} tokens per second` : "";
  const tau = run.rounds.length ? `, mean accepted length ${run.tau.toFixed(2)}` : "";
  return `${run.method}: ${run.tokenIds.length} tokens in ${run.rounds.length} rounds${tau}${speed}.`;
}

/** Whether both said the same, and how their speeds compare. */
function verdict(first, second) {
  const [a, b] = [first.tokenIds, second.tokenIds];
  const at = a.findIndex((id, i) => id !== b[i]);
  const same = at < 0 && a.length === b.length;
  let text = `Identical: both gave the same ${a.length} tokens.`;
  if (!same) {
    const place = at < 0 ? a.length : at;
    const [x, y] = [first, second].map((run) => word(run, place));
    text = `Different from token ${place + 1} on: “${x}” and “${y}”.`;
    const other = [first, second].find((run) => entries.get(run.method)?.coupled === false);
    if (other) text += ` ${other.method} ${promise(entries.get(other.method))}.`;
  }
  const ratio = first.speed / second.speed;
  if (Number.isFinite(ratio)) {
    text += ` ${first.method} is ${ratio.toFixed(2)}× as fast as ${second.method}.`;
  }
  const mark = document.createElement("span");
  mark.className = "mark";
  mark.setAttribute("aria-hidden", "true");
  mark.textContent = same ? "=" : "≠";
  $("verdict").dataset.same = same;
  $("verdict").replaceChildren(mark, text);
  return text;
}

/** What a method that need not have AR's tokens promises. */
function promise(entry) {
  return entry.lossless
    ? "keeps the target’s distribution, and above temperature 0 not its very tokens"
    : "may change the output";
}

function word(run, index) {
  const span = run.text.children[index];
  return span ? visible(span.textContent, run.tokenIds[index]) : "the end";
}

function busy(running) {
  $("generate").setAttribute("aria-disabled", running);
  $("stop").setAttribute("aria-disabled", !running);
  $("results").setAttribute("aria-busy", running);
}

/** On a narrow screen, results are below the form. */
function reveal() {
  if ($("results").getBoundingClientRect().top > innerHeight * 0.6) {
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    $("results").scrollIntoView({ behavior: calm ? "auto" : "smooth" });
  }
}

function announce(text) {
  $("announcement").textContent = text;
}

// --- the form ---------------------------------------------------------------------------------

function arrange() {
  const two = $("compare").checked;
  $("second").hidden = $("verdict").hidden = runs[1].element.hidden = !two;
  $("runs").classList.toggle("two", two);
  explain();
}

$("prompt").value = prompts.completion;
for (const radio of document.querySelectorAll("[name=kind]")) {
  radio.addEventListener("change", () => {
    const other = radio.value === "chat" ? "completion" : "chat";
    prompts[other] = $("prompt").value;
    $("prompt").value = prompts[radio.value];
    $("prompt-label").textContent = radio.value === "chat" ? "Message" : "Prompt";
  });
}
for (const select of selects) select.addEventListener("change", explain);
$("compare").addEventListener("change", arrange);
$("key").addEventListener("change", load);
$("retry").addEventListener("click", load);
$("stop").addEventListener("click", () => stopper?.abort());
$("request").addEventListener("submit", (event) => {
  event.preventDefault();
  generateAll();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    generateAll();
  }
  if (event.key === "Escape") stopper?.abort();
});
arrange();
load();
