// The list of jobs: filters, pages, live through one stream for all jobs.

import { FINAL, STATES, json } from './api.js';
import { ago, badge, debounce, elapsed, h, icon, problemBox, setBadge, setText, show } from './dom.js';
import { count, counted, duration, plainLine, rate } from './format.js';
import { events } from './stream.js';

const PAGE_SIZE = 50;

export function jobsView({ query, signal, onConnection, navigate }) {
  const filter = { states: new Set((query.get('state') ?? '').split(',').filter((s) => STATES.includes(s))), name: query.get('name') ?? '', user: query.get('user') ?? '' };
  const cursor = query.get('cursor');
  const rows = new Map();
  let request;

  const body = h('tbody', { testid: 'jobs' });
  const problem = h('div');
  const empty = h('p.empty', { testid: 'empty', hidden: true });
  const older = h('a.button', { testid: 'older', hidden: true }, 'Older jobs');
  const newest = h('a.button', { testid: 'newest', hidden: !cursor, href: `#/${search()}` }, 'Newest jobs');
  const head = ['State', 'Job', 'User', 'Progress', '#Rate', '#Created', '#Duration'];
  const view = h('div', null,
    h('div.row.title', null, h('h1', { tabindex: -1 }, 'Jobs'), h('a.button.primary', { href: '#/submit' }, 'Submit a job')),
    filters(), problem,
    // Roles are given in full because narrow screens lay the rows out as blocks, which takes them away.
    h('table.jobs', { role: 'table', 'aria-label': 'Jobs, newest first' },
      h('thead', { role: 'rowgroup' }, h('tr', { role: 'row' }, head.map((name) => h('th', { role: 'columnheader', scope: 'col', class: name[0] === '#' ? 'number' : null }, name.replace('#', ''))))),
      body),
    empty,
    h('nav.row', { 'aria-label': 'Pages' }, newest, older));
  body.setAttribute('role', 'rowgroup');

  function search(more) {
    const params = new URLSearchParams();
    if (filter.states.size) params.set('state', [...filter.states].join(','));
    if (filter.name) params.set('name', filter.name);
    if (filter.user) params.set('user', filter.user);
    if (more) params.set('cursor', more);
    const text = params.toString();
    return text ? `?${text}` : '';
  }

  function filters() {
    const changed = () => {
      // Another filter begins at its first page; `replace` keeps the focus where it is.
      if (cursor) return navigate(`#/${search()}`);
      history.replaceState(null, '', `#/${search()}`);
      newest.href = `#/${search()}`;
      show(clear, search() !== '');
      load();
    };
    const soon = debounce(changed, 300);
    const field = (name, label) => h('label.field', null, label,
      h('input', { type: 'search', value: filter[name], testid: `filter-${name}`, autocomplete: 'off', spellcheck: 'false', oninput: (e) => { filter[name] = e.target.value.trim(); soon(); } }));
    const clear = h('a.button', { href: '#/', hidden: search() === '', testid: 'filter-clear' }, 'Clear');
    signal.addEventListener('abort', soon.stop);
    return h('form.filters', { role: 'search', 'aria-label': 'Filter jobs', onsubmit: (e) => { e.preventDefault(); soon.stop(); changed(); } },
      h('div.chips', { role: 'group', 'aria-label': 'States to show' }, STATES.map((state) => h('button.chip', {
        type: 'button', 'data-state': state, 'aria-pressed': String(filter.states.has(state)), testid: `filter-state-${state}`,
        onclick: (e) => {
          const on = !filter.states.delete(state);
          if (on) filter.states.add(state);
          e.currentTarget.setAttribute('aria-pressed', String(on));
          changed();
        },
      }, icon(state), state))),
      field('name', 'Exact name'), field('user', 'User'), clear);
  }

  async function load() {
    request?.abort();
    request = new AbortController();
    const mine = request;
    try {
      const page = await json('jobs', { query: { state: [...filter.states].join(','), name: filter.name, user: filter.user, limit: PAGE_SIZE, cursor }, signal: mine.signal });
      if (signal.aborted || mine !== request) return;
      problem.replaceChildren();
      fill(page.jobs);
      older.href = `#/${search(page.next_cursor)}`;
      show(older, page.next_cursor != null);
    } catch (error) {
      if (error.name === 'AbortError' || signal.aborted) return;
      problem.replaceChildren(problemBox(error, { again: load }));
    }
  }

  function fill(jobs) {
    const seen = new Set(jobs.map((job) => job.id));
    for (const [id, row] of rows) {
      if (seen.has(id)) continue;
      row.element.remove();
      rows.delete(id);
    }
    jobs.forEach((job, i) => {
      let row = rows.get(job.id);
      if (!row) rows.set(job.id, row = jobRow());
      row.update(job);
      // Only what stands in the wrong place moves: moving takes the focus away.
      if (body.children[i] !== row.element) body.insertBefore(row.element, body.children[i] ?? null);
    });
    show(empty, jobs.length === 0);
    setText(empty, search() ? 'No job matches the filters.' : cursor ? 'There are no older jobs.' : 'No jobs yet. Submit the first one.');
  }

  // A change of one job also changes the queue positions of others, so the page is read again, but not for every event of a burst.
  const soon = debounce(load, 250);
  signal.addEventListener('abort', () => { soon.stop(); request?.abort(); });

  events('events', {
    signal,
    onStatus: (status) => {
      onConnection(status);
      if (status.state === 'live') soon(); // changes of progress have no history
    },
    onEvent: (type, event) => {
      if (!event) return;
      const row = rows.get(event.job);
      if (type === 'progress') row?.progress(event.data);
      else if (type === 'state') {
        if (row) row.update({ ...row.job, state: event.data.to, reason: event.data.reason });
        soon();
      }
    },
  });
  load();
  return { element: view, title: 'Jobs' };
}

function jobRow() {
  const state = badge('queued');
  const link = h('a', { testid: 'job-link' });
  const id = h('code.muted');
  const user = h('td', { role: 'cell', 'data-label': 'User' });
  const meter = h('progress', { max: 1 });
  const done = h('span.number');
  const note = h('span.muted.clip', { testid: 'note' });
  const speed = h('td.number', { role: 'cell', 'data-label': 'Rate', testid: 'rate' });
  const created = h('td.number', { role: 'cell', 'data-label': 'Created' });
  const took = h('td.number', { role: 'cell', 'data-label': 'Duration' });
  const meterRow = h('div.meter', null, meter, done);
  const element = h('tr', { role: 'row', testid: 'job-row' },
    h('td', { role: 'cell' }, state),
    h('th.name', { role: 'rowheader', scope: 'row' }, link, id),
    user, h('td.wide', { role: 'cell', testid: 'progress' }, meterRow, note), speed, created, took);

  const row = {
    element,
    job: null,
    update(job) {
      const before = row.job;
      row.job = job;
      element.dataset.id = job.id;
      setBadge(state, job.state);
      setText(link, job.name);
      link.href = `#/jobs/${encodeURIComponent(job.id)}`;
      setText(id, job.id);
      setText(user, job.user);
      row.progress(job.progress);
      if (before?.created_at !== job.created_at) created.replaceChildren(ago(job.created_at));
      if (!before || before.started_at !== job.started_at || before.finished_at !== job.finished_at) {
        took.replaceChildren(elapsed(job.started_at, job.finished_at));
        took.classList.toggle('none', !job.started_at);
      }
    },
    progress(p) {
      const { job } = row;
      row.job = { ...job, progress: p };
      show(meterRow, Boolean(p));
      if (p) {
        meter.max = p.splits || 1;
        meter.value = p.splits_done;
        meter.setAttribute('aria-label', `Splits of ${job.name}`);
        setText(done, `${count(p.splits_done)} / ${counted(p.splits, 'split')}`);
      }
      setText(speed, p && !['queued', 'retrying'].includes(job.state) ? rate(p.tokens_per_second) : '–');
      speed.classList.toggle('none', speed.textContent === '–'); // narrow screens leave it out
      const line = noteOf(row.job);
      setText(note, line);
      note.title = line;
    },
  };
  return row;
}

/** One line on what a job waits for or ended with. */
function noteOf(job) {
  if (job.state === 'queued') return job.queue_position ? `position ${count(job.queue_position)} in the queue` : 'waiting';
  if (job.state === 'retrying') return `attempt ${job.attempt + 1} of ${job.max_attempts} follows: ${plainLine(job.failure?.message ?? job.reason)}`;
  if (job.state === 'failed') return plainLine(job.failure?.message ?? job.reason);
  if (job.state === 'running' && job.progress?.seconds_left != null) return `about ${duration(Math.ceil(job.progress.seconds_left))} left`;
  if (FINAL.includes(job.state)) return job.result ? `${counted(job.result.tokens, 'token')}` : plainLine(job.reason);
  return plainLine(job.reason);
}

