// Draws figures. Whatever a drawing shows is also there as text.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (share) =>
  share === null || share === undefined ? "–" : `${number(100 * share)} %`;

function show(id, text, unit = "") {
  const element = byId(id);
  element.textContent = text;
  if (unit) {
    const small = document.createElement("small");
    small.textContent = ` ${unit}`;
    element.append(small);
  }
}

function svg(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// One column for each iteration, with a square for each of its tokens, the first at the bottom.
class IterationStrip {
  constructor(mostTokens) {
    this.svg = byId("iterations");
    this.size = 7;
    this.step = 9;
    this.height = Math.max(mostTokens, 1) * this.step;
    this.columns = Math.max(Math.floor(this.svg.clientWidth / this.step), 10);
    this.svg.setAttribute("height", this.height);
    this.svg.replaceChildren();
    this.count = 0;
  }

  push(sources) {
    const column = svg("g", {});
    sources.forEach((source, row) => {
      const y = this.height - (row + 1) * this.step + 1;
      const square = svg("rect", { y, width: this.size, height: this.size, rx: 1 });
      square.dataset.source = source;
      column.append(square);
    });
    this.svg.append(column);
    if (this.svg.childElementCount > this.columns) this.svg.firstElementChild.remove();
    // Only a full strip moves.
    const isFull = this.count >= this.columns;
    this.count += 1;
    const moved = isFull ? [...this.svg.children] : [column];
    const first = isFull ? 0 : this.count - 1;
    moved.forEach((one, i) => {
      one.setAttribute("transform", `translate(${(first + i) * this.step})`);
    });
  }
}

function cell(text, className = "") {
  const element = document.createElement("td");
  element.textContent = text;
  element.className = className;
  return element;
}

// A cell with bars. `parts` are {name, begin, share}, with shares from 0 to 1.
function barCell(parts) {
  const element = document.createElement("td");
  const track = document.createElement("div");
  track.className = "track";
  track.setAttribute("aria-hidden", "true");
  for (const { name, begin = 0, share } of parts) {
    const bar = document.createElement("i");
    bar.className = name;
    bar.style.left = `${100 * begin}%`;
    if (name !== "mark") bar.style.width = share > 0 ? `max(2px, ${100 * share}%)` : "0";
    track.append(bar);
  }
  element.append(track);
  return element;
}

function tableRow(...cells) {
  const row = document.createElement("tr");
  row.append(...cells);
  return row;
}

// The share of drafts accepted at each position: of one output, and of all since the start.
function drawPositions(own, all) {
  const rows = all.map((share, i) => {
    const mine = own?.[i];
    const parts = [{ name: "bar", share: mine ?? 0 }];
    if (share !== null) parts.push({ name: "mark", begin: Math.min(share, 0.994) });
    return tableRow(
      cell(String(i + 1)),
      barCell(parts),
      cell(percent(mine)),
      cell(percent(share), "soft"),
    );
  });
  byId("positions").replaceChildren(...rows);
}

function drawGroups(groups) {
  const rows = groups.map((group) => {
    const window = group.window > 0 ? ` ${group.window}` : "";
    const held = group.held_blocks / group.max_blocks;
    const cached = group.cached_blocks / group.max_blocks;
    return tableRow(
      cell(`${group.owner} ${group.kind}${window}`),
      barCell([
        { name: "cached", begin: held, share: cached },
        { name: "bar", share: held },
      ]),
      cell(number(group.held_blocks)),
      cell(number(group.cached_blocks), "soft"),
    );
  });
  byId("groups").replaceChildren(...rows);
}

// The memory of each rank. One rank is not worth a table.
function drawRanks(ranks) {
  byId("ranks-part").hidden = ranks.length < 2;
  const rows = ranks.map((rank, i) => {
    const where = rank.gpu === null ? "" : `, GPU ${rank.gpu}`;
    const sizes = [
      rank.target_weight_bytes + rank.draft_weight_bytes,
      rank.kv_pool_bytes,
      rank.workspace_bytes + rank.graph_bytes,
    ];
    return tableRow(
      cell(`${i}${where}`),
      ...sizes.map((bytes) => cell(number(bytes / 2 ** 30, 2))),
    );
  });
  byId("ranks").replaceChildren(...rows);
}

// Rates of the last minute, the newest at the right edge.
function drawRates(rates, most) {
  const chart = byId("rates");
  const highest = Math.max(...rates, 1);
  const points = rates.map((rate, i) => {
    const x = most - rates.length + i;
    return `${x},${(30 * (1 - rate / highest) + 2).toFixed(2)}`;
  });
  chart.setAttribute("viewBox", `0 0 ${most - 1} 34`);
  chart.replaceChildren(svg("polyline", { points: points.join(" ") }));
}
