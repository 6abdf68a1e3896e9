// Which executor of a cluster runs which split, out of the events of a job. Nothing of it for a job that its own worker makes.

import { h, setText, show, table } from './dom.js';
import { count, counted } from './format.js';

const RENDER_INTERVAL_MS = 200; // a history comes in bursts
const MAX_NAMED_SPLITS = 12; // splits that are named for an executor
const MAX_ROWS = 100; // executors that are shown: those at work first

export function executorList(signal) {
  let at = new Map(); // split → executor
  let done = new Map(); // executor → splits that it has made
  let unnamed = 0; // splits that were made before it was told by whom
  let changed = false;
  const status = h('p.muted', { testid: 'executors-text' });
  const box = h('div');
  const element = h('div', { testid: 'executors', hidden: true }, status, box);
  const timer = setInterval(flush, RENDER_INTERVAL_MS);
  signal.addEventListener('abort', () => clearInterval(timer));

  function flush() {
    if (!changed) return;
    changed = false;
    const splits = new Map([...done.keys()].map((name) => [name, []]));
    for (const [split, executor] of at) splits.get(executor).push(split);
    const rows = [...splits].sort(([a, x], [b, y]) => (y.length > 0) - (x.length > 0) || a.localeCompare(b));
    show(element, rows.length > 0);
    setText(status, `${counted(rows.length, 'executor')}, ${counted(at.size, 'split')} in progress${rows.length > MAX_ROWS ? `; the first ${MAX_ROWS} are shown` : ''}${unnamed ? `; ${counted(unnamed, 'split')} finished before ${unnamed === 1 ? 'its' : 'their'} executor was reported` : ''}.`);
    box.replaceChildren(table('Executors', ['Executor', 'Splits in progress', '#Splits done'],
      rows.slice(0, MAX_ROWS).map(([name, now]) => [name, named(now), count(done.get(name))])));
  }

  function named(splits) {
    const first = splits.sort((a, b) => a - b).slice(0, MAX_NAMED_SPLITS).join(', ');
    return splits.length > MAX_NAMED_SPLITS ? `${first} and ${count(splits.length - MAX_NAMED_SPLITS)} more` : first;
  }

  function clear() {
    at = new Map();
    done = new Map();
    unnamed = 0;
    changed = true;
  }

  function add({ type, data }) {
    if (type === 'split_started' && data?.executor) {
      // a split that is begun again is another one's now
      at.set(data.split, data.executor);
      if (!done.has(data.executor)) done.set(data.executor, 0);
      changed = true;
    } else if (type === 'split_committed' && at.has(data?.split)) {
      const executor = at.get(data.split);
      at.delete(data.split);
      done.set(executor, done.get(executor) + 1);
      changed = true;
    } else if (type === 'split_committed') {
      unnamed += 1;
      changed ||= done.size > 0;
    } else if (type === 'state' && !['running', 'cancelling'].includes(data?.to) && at.size) {
      // nobody works for a job that is over
      at = new Map();
      changed = true;
    }
  }

  return { element, clear, add };
}
