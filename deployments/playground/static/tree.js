// The draft of a round as a picture: from the last committed token on the left to the leaves. The
// accepted path is the straight line at the top.

const NS = "http://www.w3.org/2000/svg";
const HEIGHT = 26; // of a node
const ROW = 34;
const GAP = 22; // between columns
const LONGEST = 14; // characters of a label

/** A token's text with its white space visible. */
export function visible(text, id) {
  if (!text) return `#${id}`;
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
}

function make(name, attributes, ...children) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/**
 * Nodes with their kind: "root", "accepted", "own" or "rejected".
 * @param round as the API sends it, in `choices[0].round`
 * @param before the text of the last committed token
 */
function nodesOf(round, before) {
  const { draft } = round;
  const accepted = new Set(draft.accepted_indices);
  const root = { text: before, kind: "root", children: [], depth: 0 };
  const nodes = [];
  draft.token_ids.forEach((id, i) => {
    const parent = nodes[draft.parent_indices[i]] ?? root;
    const kind = accepted.has(i) ? "accepted" : "rejected";
    nodes.push({ id, text: draft.texts[i], kind, children: [], depth: parent.depth + 1 });
    parent.children.push(nodes[i]);
  });
  if (round.token_ids.length > round.num_accepted) {
    const parent = nodes[draft.accepted_indices.at(-1)] ?? root;
    const i = round.num_accepted;
    const own = { id: round.token_ids[i], text: round.texts[i], kind: "own", children: [] };
    own.depth = parent.depth + 1;
    parent.children.push(own);
    nodes.push(own);
  }
  return [root, ...nodes];
}

function place(nodes) {
  const widths = [];
  for (const node of nodes) {
    const label = visible(node.text, node.id);
    node.label = label.length > LONGEST ? `${label.slice(0, LONGEST - 1)}…` : label;
    node.width = Math.max(28, 7.3 * node.label.length + 16);
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const lefts = [];
  widths.reduce((x, width, depth) => ((lefts[depth] = x), x + width + GAP), 2);
  let rows = 0;
  const visit = (node) => {
    node.x = lefts[node.depth];
    node.y = 2 + rows * ROW;
    node.children.sort((a, b) => (a.kind === "rejected") - (b.kind === "rejected"));
    node.children.forEach((child, i) => {
      if (i) rows += 1;
      visit(child);
    });
  };
  visit(nodes[0]);
  const last = widths.length - 1;
  return { width: lefts[last] + widths[last] + 4, height: (rows + 1) * ROW };
}

/** The picture. Its description is for those who do not see it. */
export function drawTree(round, before, description) {
  const nodes = nodesOf(round, before);
  const { width, height } = place(nodes);
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", description);
  const middle = HEIGHT / 2;
  for (const node of nodes) {
    for (const child of node.children) {
      const [x1, y1] = [node.x + node.width, node.y + middle];
      const [x2, y2] = [child.x, child.y + middle];
      const bend = x2 - GAP / 2; // lines of one column meet in front of it
      const d = `M${x1} ${y1}H${bend - 6}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`;
      svg.append(make("path", { class: `edge ${child.kind}`, d }));
    }
  }
  const meaning = {
    root: "the last committed token",
    accepted: "drafted and accepted",
    own: "the target’s own token",
    rejected: "drafted and rejected",
  };
  for (const node of nodes) {
    const title = make("title", {});
    const id = node.id === undefined ? "" : ` · token ${node.id}`;
    title.textContent = `${JSON.stringify(node.text)}${id} · ${meaning[node.kind]}`;
    const label = make("text", { x: node.width / 2, y: middle + 4.3, "text-anchor": "middle" });
    label.textContent = node.label;
    svg.append(
      make(
        "g",
        { class: `node ${node.kind}`, transform: `translate(${node.x} ${node.y})` },
        title,
        make("rect", { width: node.width, height: HEIGHT, rx: 5 }),
        label,
      ),
    );
  }
  return svg;
}
