// Elements. Everything becomes text nodes and attributes here; nothing is ever parsed as HTML.

import { count, duration, fullTime, now, roughly, sinceSeconds } from './format.js';

/** `h('p.muted', {testid: 'x', onclick: f}, 'text', child)` */
export function h(spec, props, ...children) {
  const [tag, ...classes] = spec.split('.');
  return fill(document.createElement(tag), classes, props, children);
}

export function svg(spec, props, ...children) {
  const [tag, ...classes] = spec.split('.');
  return fill(document.createElementNS('http://www.w3.org/2000/svg', tag), classes, props, children);
}

function fill(element, classes, props, children) {
  if (classes.length) element.setAttribute('class', classes.join(' '));
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value == null || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'testid') element.dataset.testid = value;
    else if (name === 'width%') element.style.width = `${value}%`; // through CSSOM, which the policy allows
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(Infinity).filter((c) => c != null && c !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets text only where it differs, so that selections and screen readers are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function show(element, visible) {
  element.hidden = !visible;
}

const ICONS = {
  queued: 'M8 2a6 6 0 1 0 .01 0M8 4.5V8l2.5 1.5',
  running: 'M5 3l8 5-8 5z',
  cancelling: 'M8 2a6 6 0 1 0 .01 0M6 6h4v4H6z',
  retrying: 'M13 8a5 5 0 1 1-1.5-3.5M13 2v3h-3',
  succeeded: 'M3 8.5l3.5 3.5L13 4.5',
  failed: 'M4 4l8 8M12 4l-8 8',
  cancelled: 'M8 2a6 6 0 1 0 .01 0M4 12l8-8',
  warning: 'M8 2l6.5 11.5h-13zM8 6.5v3M8 11.5v.3',
};

export function icon(name) {
  return svg('svg.icon', { viewBox: '0 0 16 16', 'aria-hidden': 'true' }, svg('path', { d: ICONS[name] ?? ICONS.queued }));
}

/** State as icon and word; the colour comes from the class. */
export const badge = (state) => h('span.badge', { testid: 'state', 'data-state': state }, icon(state), state);

export function setBadge(element, state) {
  if (element.dataset.state === state) return;
  element.dataset.state = state;
  element.replaceChildren(icon(state), state);
}

/** `3 min ago`, kept right by `tick`. */
export function ago(iso) {
  if (!iso) return '–';
  const element = h('time', { datetime: iso, title: fullTime(iso), 'data-ago': iso });
  refresh(element);
  return element;
}

/** How long from one time to another, or until now. */
export function elapsed(from, to) {
  if (!from) return '–';
  const element = h('span', { title: fullTime(from), 'data-from': from, 'data-to': to });
  refresh(element);
  return element;
}

function refresh(element) {
  const { ago: past, from, to } = element.dataset;
  if (past) {
    const seconds = (now() - Date.parse(past)) / 1000;
    setText(element, seconds < -1 ? `in ${roughly(seconds)}` : seconds < 1 ? 'now' : `${roughly(seconds)} ago`);
  } else {
    const seconds = sinceSeconds(from, to);
    setText(element, duration(to ? seconds : Math.max(0, Math.floor(seconds))));
  }
}

/** Ages and running durations of the whole page, once a second. */
export function tick() {
  for (const element of document.querySelectorAll('[data-ago], [data-from]:not([data-to])')) refresh(element);
}

/** A table with a caption. `head`: names, a leading `#` for columns of numbers. Cells: text or elements. */
export function table(caption, head, rows, props) {
  const numeric = head.map((name) => name.startsWith('#'));
  const cell = (value, i) => (i === 0
    ? h('th', { scope: 'row', class: numeric[0] ? 'number' : null }, value)
    : h('td', { class: numeric[i] ? 'number' : null }, value));
  return h('div.scroll', { tabindex: 0, role: 'region', 'aria-label': caption },
    h('table', props,
      h('caption', null, caption),
      h('thead', null, h('tr', null, head.map((name, i) => h('th', { scope: 'col', class: numeric[i] ? 'number' : null }, name ? name.replace('#', '') : h('span.unseen', null, 'As a bar'))))),
      h('tbody', null, rows.map((row) => h('tr', null, row.map(cell))))));
}

/** Names and values. Pairs with a null value are left out. */
export function facts(pairs, props) {
  return h('dl.facts', props, pairs.filter(([, value]) => value != null)
    .map(([name, value, more]) => h('div', { class: more ?? null }, h('dt', null, name), h('dd', null, value))));
}

/** A bar of a share between 0 and 1; the number stands beside it, so the bar is decoration. */
export function bar(part) {
  const percent = Math.max(part > 0 ? 0.5 : 0, Math.min(100, part * 100 || 0));
  return h('span.bar', { 'aria-hidden': 'true' }, h('span', { 'width%': percent }));
}

export function section(title, props, ...children) {
  const id = `h-${title.toLowerCase().replace(/\W+/g, '-')}`;
  return h('section.card', { 'aria-labelledby': id, ...props }, h('h2', { id }, title), ...children);
}

/** What a failed request has to say: title, detail, all problems. */
export function problemBox(error, { again, testid = 'problem' } = {}) {
  const more = error.title ? error.detail : error.message;
  return h('div.problem', { role: 'alert', testid },
    h('p.wrap', null, icon('warning'), h('strong', null, error.title ?? 'Something went wrong in this page')),
    more && h('p.wrap', null, more),
    problemTable(error.problems),
    error.requestId && h('p.muted', null, `${error.answer}, request `, h('code', null, error.requestId)),
    again && h('p', null, h('button', { type: 'button', onclick: again, testid: 'try-again' }, 'Try again')));
}

export function problemTable(problems, jump) {
  if (!problems?.length) return null;
  const field = (p) => {
    const name = p.field || 'whole file';
    const go = jump?.(p);
    const line = p.line && h('small', null, ` line ${p.line}`);
    return go ? h('button.link', { type: 'button', onclick: go.run, testid: 'problem-jump' }, name, line) : h('span', null, h('code', null, name), line);
  };
  const got = problems.some((p) => p.got != null);
  return table(`${count(problems.length)} ${problems.length === 1 ? 'problem' : 'problems'} by field`,
    got ? ['Field', 'What is wrong', 'Got'] : ['Field', 'What is wrong'],
    problems.map((p) => [field(p), p.message, ...(got ? [p.got == null ? '–' : h('code', null, String(p.got))] : [])]),
    { class: 'problems', 'data-testid': 'problems' });
}

/** Tells a screen reader; for changes of state, not for every tick. */
export function announce(text) {
  byId('announcer').textContent = text;
}

/** A line above the view that stays until the next page. */
export function notice(...content) {
  byId('notice').replaceChildren(...content);
  show(byId('notice'), content.length > 0);
  if (content.length) announce(byId('notice').textContent);
}

/**
 * Asks before something that cannot be undone. The answer comes from the button, not from the dialog's `close`: that is told later, and may
 * come when the dialog asks again. No answer, and a view that goes (`signal`), are a no.
 */
export function confirmed({ title, text, yes, no, signal }) {
  const dialog = byId('confirm');
  byId('confirm-title').textContent = title;
  byId('confirm-text').textContent = text;
  byId('confirm-yes').textContent = yes;
  byId('confirm-no').textContent = no;
  return new Promise((resolve) => {
    const answer = (it) => () => {
      signal.removeEventListener('abort', gone);
      resolve(it);
      dialog.close();
    };
    const gone = answer(false);
    signal.addEventListener('abort', gone);
    byId('confirm-yes').onclick = answer(true);
    byId('confirm-no').onclick = gone;
    dialog.onclose = () => { if (!dialog.open) gone(); }; // Escape
    dialog.showModal();
    byId('confirm-no').focus();
  });
}

export function debounce(f, ms) {
  let timer;
  const later = (...args) => {
    clearTimeout(timer);
    timer = setTimeout(f, ms, ...args);
  };
  later.stop = () => clearTimeout(timer);
  return later;
}
