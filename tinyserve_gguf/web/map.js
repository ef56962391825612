// The map: a row for every layer, a column for every expert, colour by heat, an outline for those that are resident.
import { Heat, ramp } from "./heat.js";

const by = (id) => document.getElementById(id);
const MARGIN = 26; // for the numbers of the layers

export function fit(canvas) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const plural = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

export class ExpertMap {
  constructor() {
    this.canvas = by("map");
    this.heat = new Heat();
    this.kind = "recent";
    this.cursor = null; // {layer, expert}: indices of what is pointed at
    this.canvas.addEventListener("pointermove", (event) => this.point(this.at(event.offsetX, event.offsetY)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("focus", () => this.canvas.matches(":focus-visible") && this.map && this.point({ layer: 0, expert: 0 }, true));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
    this.recolour();
  }

  recolour() {
    this.colours = ramp();
    const { context, width, height } = fit(by("ramp"));
    for (let x = 0; x < width; x++) {
      context.fillStyle = this.colours[Math.round((255 * x) / Math.max(1, width - 1))];
      context.fillRect(x, 0, 1, height);
    }
    this.draw();
  }

  update(map) {
    this.map = map;
    this.heat.add(map);
    this.draw();
    if (this.cursor) {
      this.point(this.cursor);
    }
  }

  show(kind) {
    this.kind = kind;
    this.draw();
  }

  // Where cells lie: in whole pixels, so that lines are sharp.
  layout() {
    const columns = Math.max(...this.map.layers.map((layer) => layer.hits.length));
    const rows = this.map.layers.length;
    const [width, height] = [this.canvas.clientWidth - MARGIN, this.canvas.clientHeight];
    const x = (e) => MARGIN + Math.floor((width * e) / columns);
    const y = (l) => Math.floor((height * l) / rows);
    return { columns, rows, x, y, cell: Math.min(width / columns, height / rows) };
  }

  at(px, py) {
    if (!this.map || px < MARGIN) {
      return null;
    }
    const { columns, rows } = this.layout();
    const layer = Math.floor((py / this.canvas.clientHeight) * rows);
    const expert = Math.floor(((px - MARGIN) / (this.canvas.clientWidth - MARGIN)) * columns);
    return this.map.layers[layer]?.hits[expert] === undefined ? null : { layer, expert };
  }

  draw() {
    const { context, height } = fit(this.canvas);
    if (!this.map) {
      return;
    }
    const { rows, x, y, cell } = this.layout();
    const { rows: values, most } = this.heat.values(this.kind);
    const gap = cell >= 5 ? 1 : 0;
    const framed = cell >= 7;
    const line = cell >= 5 ? 2 : 1;
    const outline = theme("--resident");
    this.map.layers.forEach((layer, l) => {
      const [top, bottom] = [y(l), y(l + 1) - gap];
      layer.hits.forEach((_, e) => {
        const [left, right] = [x(e), x(e + 1) - gap];
        context.fillStyle = this.colours[Math.round(255 * values[l][e])];
        context.fillRect(left, top, right - left, bottom - top);
        if (!layer.resident[e]) {
          return;
        }
        if (framed) {
          context.strokeStyle = outline;
          context.lineWidth = 2;
          context.strokeRect(left + 1, top + 1, right - left - 2, bottom - top - 2);
        } else { // too small for a frame: a line below
          context.fillStyle = outline;
          context.fillRect(left, bottom - line, right - left, line);
        }
      });
    });
    this.labelRows(context, rows, y, height);
    if (this.cursor) {
      const { layer, expert } = this.cursor;
      context.strokeStyle = theme("--ink");
      context.lineWidth = 2;
      context.strokeRect(x(expert) - 1, y(layer) - 1, x(expert + 1) - x(expert) + 2 - gap, y(layer + 1) - y(layer) + 2 - gap);
    }
    by("box").classList.toggle("line", !framed);
    by("cold").textContent = "not used";
    by("hot").textContent = this.kind === "total" ? `${most} uses` : "used now";
    const resident = this.map.slots;
    this.canvas.setAttribute("aria-label", `Map of experts: ${rows} layers, ${resident.resident} experts resident in ${resident.total} slots`);
  }

  labelRows(context, rows, y, height) {
    context.fillStyle = theme("--muted");
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const step = Math.ceil(rows / Math.max(1, Math.floor(height / 14)));
    for (let l = 0; l < rows; l += step) {
      context.fillText(this.map.layers[l].layer, MARGIN - 5, Math.max(6, (y(l) + y(l + 1)) / 2));
    }
  }

  text({ layer, expert }) {
    const row = this.map.layers[layer];
    const ago = this.map.tick - row.last_use[expert];
    const name = row.family && row.family !== "exps" ? ` (${row.family})` : "";
    const used = row.last_use[expert] ? `last used ${ago === 0 ? "by the last token" : `${plural(ago, "token")} ago`}` : "not used yet";
    return `Layer ${row.layer}, expert ${expert}${name}\n${row.resident[expert] ? "resident" : "in host memory"}, ` +
           `${plural(row.hits[expert], "hit")}, ${plural(row.misses[expert], "miss", "misses")}\n${used}`;
  }

  point(cursor, aloud = false) {
    this.cursor = cursor;
    const tip = by("tip");
    tip.hidden = !cursor;
    if (cursor) {
      const { x, y } = this.layout();
      tip.textContent = this.text(cursor);
      const left = Math.min(x(cursor.expert + 1) + 6, this.canvas.clientWidth - tip.offsetWidth);
      const below = y(cursor.layer + 1) + 6;
      tip.style.left = `${Math.max(0, left)}px`;
      tip.style.top = `${below + tip.offsetHeight > this.canvas.clientHeight ? Math.max(0, y(cursor.layer) - tip.offsetHeight - 6) : below}px`;
      if (aloud) {
        by("cell").textContent = tip.textContent;
      }
    }
    this.draw();
  }

  move(event) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || !this.map) {
      return;
    }
    event.preventDefault();
    const from = this.cursor ?? { layer: 0, expert: 0 };
    const layer = Math.min(Math.max(from.layer + step[0], 0), this.map.layers.length - 1);
    const expert = Math.min(Math.max(from.expert + step[1], 0), this.map.layers[layer].hits.length - 1);
    this.point({ layer, expert }, true);
  }
}
