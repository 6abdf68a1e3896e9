// Plots as SVG elements, each with a sentence and a table that say the same.

import { counted, count, duration, rate, share, short } from './format.js';
import { bar, h, svg, table } from './dom.js';

const MAX_POINTS = 600;
const HEIGHT = 190;
const LEFT = 52;
const RIGHT = 12;
const TOP = 22;
const BOTTOM = 36;

/** Round steps for an axis that ends at `max`. */
function ticks(max, wanted, steps = [1, 2, 2.5, 5, 10]) {
  const rough = max / wanted;
  const scale = 10 ** Math.floor(Math.log10(rough));
  const step = steps.map((s) => s * scale).find((s) => s >= rough) ?? 10 * scale;
  const out = [];
  for (let v = 0; v <= max * 1.0001; v += step) out.push(v);
  return out;
}

function timeUnit(seconds) {
  if (seconds < 180) return [1, 's'];
  if (seconds < 10800) return [60, 'min'];
  return seconds < 259200 ? [3600, 'h'] : [86400, 'days'];
}

/** The rate of one job over time: at most `MAX_POINTS` points, neighbours averaged when more come. */
export class RatePlot {
  constructor() {
    this.points = []; // {t: ms, attempt, rate}
    this.box = h('div.plot', { testid: 'rate-plot' });
    this.summary = h('p', { testid: 'rate-summary' }, 'No rate is known yet.');
    this.details = h('details', { hidden: true, ontoggle: () => this.fillTable() }, h('summary', null, 'As a table'));
    this.element = h('div', null, this.box, this.summary, this.details);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.box);
  }

  stop() {
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
  }

  /** History; points that came live meanwhile and are newer stay. */
  load(points) {
    const old = points.map((p) => ({ t: Date.parse(p.time), attempt: p.attempt, rate: p.tokens_per_second }));
    const last = old.at(-1)?.t ?? -Infinity;
    this.points = [...old, ...this.points.filter((p) => p.t > last)];
    this.thin();
    this.redraw();
  }

  add(time, attempt, tokensPerSecond) {
    const t = Date.parse(time);
    if (tokensPerSecond == null || !(t > (this.points.at(-1)?.t ?? -Infinity))) return;
    this.points.push({ t, attempt, rate: tokensPerSecond });
    this.thin();
    this.redraw();
  }

  thin() {
    while (this.points.length > MAX_POINTS) {
      const out = [];
      for (let i = 0; i < this.points.length; i += 1) {
        const [a, b] = [this.points[i], this.points[i + 1]];
        const pair = b && a.attempt === b.attempt && i + 2 < this.points.length; // the newest stays exact
        out.push(pair ? { t: b.t, attempt: a.attempt, rate: (a.rate + b.rate) / 2 } : a);
        if (pair) i += 1;
      }
      if (out.length === this.points.length) out.splice(0, 1);
      this.points = out;
    }
  }

  redraw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    const width = Math.floor(this.box.clientWidth);
    const points = this.points;
    if (!points.length || width < 100) return;
    const start = points[0].t;
    const seconds = Math.max(1, (points.at(-1).t - start) / 1000);
    const [unit, unitName] = timeUnit(seconds);
    const top = Math.max(1, ...points.map((p) => p.rate)) * 1.05;
    const x = (t) => LEFT + ((t - start) / 1000 / seconds) * (width - LEFT - RIGHT);
    const y = (r) => TOP + (1 - r / top) * (HEIGHT - TOP - BOTTOM);
    const text = (props, value) => svg('text', props, value);
    const sentence = this.sentence(seconds);

    const grid = ticks(top, 4).map((v) => [
      svg('line.grid', { x1: LEFT, x2: width - RIGHT, y1: y(v), y2: y(v) }),
      text({ x: LEFT - 6, y: y(v) + 4, 'text-anchor': 'end' }, short(v)),
    ]);
    const along = ticks(seconds / unit, Math.max(2, Math.min(8, width / 90))).map((v) => [
      svg('line.grid', { x1: x(start + v * unit * 1000), x2: x(start + v * unit * 1000), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }),
      text({ x: x(start + v * unit * 1000), y: HEIGHT - BOTTOM + 16, 'text-anchor': 'middle' }, short(v)),
    ]);

    // One line per attempt: between two attempts nothing ran.
    const lines = [];
    const marks = [];
    points.forEach((p, i) => {
      const at = `${x(p.t).toFixed(1)} ${y(p.rate).toFixed(1)}`;
      const fresh = i === 0 || points[i - 1].attempt !== p.attempt;
      if (fresh) lines.push([]);
      lines.at(-1).push(at);
      if (fresh && i > 0) {
        marks.push(svg('line.attempt', { x1: x(p.t), x2: x(p.t), y1: TOP, y2: HEIGHT - BOTTOM }),
          text({ x: x(p.t) + (x(p.t) > width - 90 ? -4 : 4), y: HEIGHT - BOTTOM - 6, 'text-anchor': x(p.t) > width - 90 ? 'end' : 'start' }, `attempt ${p.attempt}`));
      }
    });
    const last = points.at(-1);

    this.box.replaceChildren(svg('svg', { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: 'img', 'aria-label': `Rate over time. ${sentence}` },
      grid, along, marks,
      lines.map((line) => svg('path.line', { d: `M${line.join('L')}${line.length === 1 ? 'h.1' : ''}` })),
      svg('circle.dot', { cx: x(last.t), cy: y(last.rate), r: 3 }),
      text({ x: 2, y: 12 }, 'tokens/s'),
      text({ x: width - RIGHT, y: HEIGHT - 4, 'text-anchor': 'end' }, `time since the first point (${unitName})`)));
    this.summary.textContent = sentence;
    this.details.hidden = false;
    this.fillTable();
  }

  sentence(seconds) {
    const rates = this.points.map((p) => p.rate);
    const mean = rates.reduce((a, b) => a + b, 0) / rates.length;
    return `Over ${duration(seconds)}: ${rate(rates.at(-1))} at the end, ${rate(mean)} on average, between ${count(Math.min(...rates))} and ${rate(Math.max(...rates))}.`;
  }

  /** About 20 rows, made only while they are looked at. */
  fillTable() {
    this.details.querySelector('.scroll')?.remove();
    if (!this.details.open || !this.points.length) return;
    const start = this.points[0].t;
    const every = Math.ceil(this.points.length / 20);
    const rows = this.points.filter((_, i) => i % every === 0 || i === this.points.length - 1)
      .map((p) => [duration((p.t - start) / 1000), String(p.attempt ?? '–'), rate(p.rate)]);
    this.details.append(table('Rate over time', ['#Time', '#Attempt', '#Rate'], rows));
  }
}

/** Bins of corrections per token: 0, 1, 2–3, 4–7, … */
function binName(i) {
  return i < 2 ? String(i) : `${2 ** (i - 1)}–${2 ** i - 1}`;
}

export function correctionsHistogram(bins) {
  const all = bins.reduce((a, b) => a + b, 0);
  const most = Math.max(...bins);
  if (!most) return null;
  const mode = bins.indexOf(most);
  const width = 640;
  const step = (width - LEFT - RIGHT) / bins.length;
  const y = (n) => TOP + (1 - n / (most * 1.05)) * (HEIGHT - TOP - BOTTOM);
  const sentence = `Of ${counted(all, 'token')}, ${share(bins[0] / all)} need no correction; most often it is ${binName(mode)} (${share(most / all)}).`;
  const grid = ticks(most * 1.05, 4).map((v) => [
    svg('line.grid', { x1: LEFT, x2: width - RIGHT, y1: y(v), y2: y(v) }),
    svg('text', { x: LEFT - 6, y: y(v) + 4, 'text-anchor': 'end' }, short(v)),
  ]);
  const bars = bins.map((n, i) => [
    svg('rect.column', { x: LEFT + i * step + 2, width: Math.max(1, step - 4), y: y(n), height: Math.max(n ? 1 : 0, HEIGHT - BOTTOM - y(n)) },
      svg('title', null, `${binName(i)} corrections: ${counted(n, 'token')}, ${share(n / all)}`)),
    svg('text', { x: LEFT + (i + 0.5) * step, y: HEIGHT - BOTTOM + 15, 'text-anchor': 'middle' }, binName(i)),
  ]);
  return h('div', null,
    h('div.plot.scroll', { testid: 'corrections-plot', tabindex: 0, role: 'region', 'aria-label': 'Plot of corrections' },
      svg('svg.wide', { viewBox: `0 0 ${width} ${HEIGHT}`, role: 'img', 'aria-label': `Corrections per token. ${sentence}` }, grid, bars,
        svg('text', { x: 2, y: 12 }, 'tokens'),
        svg('text', { x: width - RIGHT, y: HEIGHT - 4, 'text-anchor': 'end' }, 'corrections per token'))),
    h('p', null, sentence),
    h('details', null, h('summary', null, 'As a table'),
      table('Corrections per token', ['#Corrections', '#Tokens', '#Share', ''], bins.map((n, i) => [binName(i), count(n), share(n / all), bar(n / most)]))));
}
