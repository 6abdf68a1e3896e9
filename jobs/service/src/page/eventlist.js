// The events of a job, newest first, the last ones kept.

import { h, icon, setText } from './dom.js';
import { bytes, clock, count, counted, duration, fullTime } from './format.js';

const MAX_EVENTS = 500;
const RENDER_INTERVAL_MS = 200; // a history comes in bursts

export function eventList(signal) {
  let waiting = [];
  let all = 0;
  const list = h('ol.events', { testid: 'events', reversed: true });
  const status = h('p.muted', null, 'No events yet.');
  const element = h('div', null, status, h('div.scroll.tall', { tabindex: 0, role: 'region', 'aria-label': 'Events, newest first' }, list));
  const timer = setInterval(flush, RENDER_INTERVAL_MS);
  signal.addEventListener('abort', () => clearInterval(timer));

  function flush() {
    if (!waiting.length) return;
    all += waiting.length;
    list.prepend(...waiting.slice(-MAX_EVENTS).map(line).reverse());
    waiting = [];
    while (list.children.length > MAX_EVENTS) list.lastChild.remove();
    setText(status, `${counted(all, 'event')}, newest first${all > MAX_EVENTS ? `; the last ${count(MAX_EVENTS)} are shown` : ''}.`);
  }

  function clear() {
    waiting = [];
    all = 0;
    list.replaceChildren();
  }

  return { element, clear, add: (event) => waiting.push(event) };
}

function line(event) {
  const warning = event.type === 'warning' || event.data?.to === 'failed';
  return h(warning ? 'li.warn' : 'li', { 'data-type': event.type },
    h('time', { datetime: event.time, title: fullTime(event.time) }, clock(event.time)),
    h('span.kind', null, warning ? icon('warning') : null, event.type.replaceAll('_', ' ')),
    h('span.wrap', null, describe(event)));
}

const text = (value) => (value == null ? '' : typeof value === 'object' ? JSON.stringify(value) : String(value));

function describe({ type, data, attempt }) {
  const d = data ?? {};
  switch (type) {
    case 'state': return `${d.from ? `${d.from} → ` : ''}${d.to}${d.reason ? `: ${d.reason}` : ''}`;
    case 'started': return `${counted(d.splits, 'split')}${d.splits_done ? `, ${count(d.splits_done)} done before` : ''}, ${bytes(d.input_bytes)} of input${d.teacher ? `, teacher ${d.teacher}` : ''}`;
    case 'split_started': return `split ${text(d.split)}${d.dataset_split ? ` (${d.dataset_split})` : ''}${d.executor ? `: executor ${d.executor}` : ''}`;
    case 'split_committed': return `split ${text(d.split)}: ${counted(d.rows, 'row')}, ${counted(d.tokens, 'token')}, ${bytes(d.bytes)} in ${text(d.shard)}`;
    case 'finished': return `${counted(d.rows, 'row')}, ${counted(d.tokens, 'token')}, ${bytes(d.bytes)} in ${duration(d.seconds)}${d.already_done ? '; the data set was already complete' : ''}`;
    case 'preparing': return text(d.what);
    case 'warning': return text(d.message);
    case 'attempt': return d.message ? text(d.message) : `attempt ${text(attempt)}`;
    default: return text(data);
  }
}
