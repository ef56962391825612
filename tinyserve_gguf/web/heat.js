// How much each expert is used, from one snapshot of the server to the next; and the colours for it.

const HALF_LIFE = 32; // tokens after which a use counts half

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

export class Heat {
  constructor() {
    this.before = null;
    this.recent = []; // [layer][expert] decayed count of uses
  }

  // `map` as /v1/experts gives it. A server that began anew counts from zero.
  add(map) {
    const before = this.before;
    const same = before && before.layers.length === map.layers.length && before.tick <= map.tick;
    const keep = same ? 0.5 ** ((map.tick - before.tick) / HALF_LIFE) : 0;
    this.recent = map.layers.map((layer, l) => layer.hits.map((hits, e) => {
      const uses = hits + layer.misses[e];
      if (!same) { // the page has just come: what was used last is warm
        return layer.last_use[e] ? 0.5 ** ((map.tick - layer.last_use[e]) / HALF_LIFE) : 0;
      }
      const old = before.layers[l];
      return this.recent[l][e] * keep + Math.max(0, uses - old.hits[e] - old.misses[e]);
    }));
    this.before = map;
  }

  // [layer][expert], 0 to 1.
  values(kind) {
    const raw = kind === "total" ? this.before.layers.map((layer) => layer.hits.map((hits, e) => hits + layer.misses[e])) : this.recent;
    const most = Math.max(0, ...raw.map((row) => Math.max(0, ...row)));
    const scale = Math.log1p(most) || 1;
    return { most, rows: raw.map((row) => row.map((value) => Math.log1p(value) / scale)) };
  }
}

function channels(colour) {
  const number = Number.parseInt(colour.trim().slice(1), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}

// 256 colours from the theme's five.
export function ramp() {
  const style = getComputedStyle(document.documentElement);
  const stops = [0, 1, 2, 3, 4].map((i) => channels(style.getPropertyValue(`--heat-${i}`)));
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    const mixed = stops[low].map((value, c) => Math.round(value + (stops[low + 1][c] - value) * (at - low)));
    return `rgb(${mixed.join(",")})`;
  });
}

export const counted = (map) => sum(map.layers.map((layer) => layer.hits.length));
