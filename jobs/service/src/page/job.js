// One job: its state, what it does, what became of it.

import { FINAL, jobPath, json, may, request, session } from './api.js';
import { ago, announce, badge, bar, confirmed, debounce, elapsed, facts, h, icon, problemBox, problemTable, section, setBadge, setText, show, table } from './dom.js';
import { eventList } from './eventlist.js';
import { executorList } from './executors.js';
import { bytes, count, counted, duration, rate } from './format.js';
import { logView } from './log.js';
import { RatePlot } from './plot.js';
import { resultView } from './result.js';
import { events } from './stream.js';
import { setDraft } from './submit.js';

export function jobView({ id, signal, onConnection, navigate, setTitle }) {
  let job = null;
  let watching = null; // the stream of events that is open
  let result = null;

  const heading = h('h1', { tabindex: -1, testid: 'job-name' }, 'Job');
  const state = badge('queued');
  show(state, false);
  const reason = h('p.wrap', { testid: 'reason', hidden: true });
  const actions = makeActions();
  const problem = h('div');
  const facing = h('div');
  const failure = h('section.card.failure', { 'aria-label': 'Failure', testid: 'failure', hidden: true });
  const overall = h('progress', { max: 1, value: 0, 'aria-label': 'Splits done', testid: 'job-progress' });
  const overallText = h('p', { testid: 'progress-text' }, 'Not started yet.');
  const counters = h('div');
  const stages = h('div');
  const plot = new RatePlot();
  const list = eventList(signal);
  const executors = executorList(signal);
  const log = logView({ id, stateOf: () => job?.state, signal });
  const resultBox = h('div');
  const rest = h('div', { hidden: true }, failure, resultBox,
    section('Progress', { testid: 'progress' }, overall, overallText, counters, executors.element, stages),
    section('Rate', null, plot.element),
    section('Events', null, list.element),
    section('Log', null, log.element),
    section('Job file', null, jobFile()));
  const element = h('div', null,
    h('p.crumb', null, h('a', { href: '#/' }, 'Jobs'), ' / ', h('code', null, id)),
    h('div.row.title', null, h('div.row', null, heading, state), actions.element),
    reason, problem, facing, rest);
  signal.addEventListener('abort', () => plot.stop());

  function makeActions() {
    const button = (name, label, run, props) => h('button', { type: 'button', testid: `action-${name}`, hidden: true, onclick: run, ...props }, label);
    const cancel = button('cancel', 'Cancel…', async () => {
      if (await confirmed({ title: `Cancel ${job.name}?`, text: 'The job stops. Committed shards stay, and a retry continues from them.', yes: 'Cancel the job', no: 'Let it run', signal })) act('POST', '/cancel');
    }, { class: 'danger' });
    const retry = button('retry', 'Retry', () => act('POST', '/retry'));
    const again = button('copy', 'Use for a new job', copy);
    const remove = button('delete', 'Delete…', async () => {
      if (await confirmed({ title: `Delete ${job.name}?`, text: `The job, its events and its log are deleted. The data set at ${job.output} stays.`, yes: 'Delete the job', no: 'Keep it', signal })) act('DELETE', '');
    }, { class: 'danger' });
    const box = h('div.row', { role: 'group', 'aria-label': 'Actions' }, cancel, retry, again, remove);

    async function act(method, rest) {
      for (const b of box.children) b.disabled = true;
      try {
        if (method === 'DELETE') {
          leaving = true;
          await request(jobPath(id, rest), { method });
          navigate('#/', `Deleted the job ${job.name}. Its data set at ${job.output} stays.`);
          return;
        }
        await answered(async () => (await request(jobPath(id, rest), { method })).json());
        problem.replaceChildren();
      } catch (error) {
        leaving = false;
        if (!signal.aborted) problem.replaceChildren(problemBox(error));
        load();
      } finally {
        for (const b of box.children) b.disabled = false;
      }
    }
    async function copy() {
      try {
        setDraft(await (await request(jobPath(id, '/file'), { accept: '*/*', signal })).text());
        navigate('#/submit');
      } catch (error) {
        if (!signal.aborted) problem.replaceChildren(problemBox(error));
      }
    }
    return {
      element: box,
      update() {
        const held = box.contains(document.activeElement);
        const final = FINAL.includes(job.state);
        const mine = may('submit') && (job.user === session.user || may('admin'));
        show(cancel, mine && !final && job.state !== 'cancelling');
        show(retry, mine && ['failed', 'cancelled'].includes(job.state));
        show(remove, mine && final);
        show(again, may('submit'));
        // A button that disappears takes the focus with it; the heading is the next best place.
        if (held && document.activeElement?.hidden !== false) heading.focus();
      },
    };
  }

  function jobFile() {
    const box = h('div');
    return h('details', { testid: 'job-file', ontoggle: async (e) => {
      if (!e.currentTarget.open || box.childElementCount) return;
      try {
        const response = await request(jobPath(id, '/file'), { accept: '*/*', signal });
        box.replaceChildren(h('pre', { tabindex: 0, role: 'region', 'aria-label': 'The job file' }, await response.text()));
      } catch (error) {
        if (!signal.aborted) box.replaceChildren(problemBox(error));
      }
    } }, h('summary', null, 'As it was submitted'), box);
  }

  // A job that is being deleted is not asked for: it would not be there.
  let leaving = false;
  // Answers may come in another order than they were asked for: what was asked before the newest that came is old.
  let asked = 0;
  let newest = 0;
  async function answered(ask) {
    asked += 1;
    const at = asked;
    const next = await ask();
    if (at < newest) return;
    newest = at;
    update(next);
  }

  async function load() {
    if (leaving) return;
    try {
      await answered(() => json(jobPath(id), { signal }));
      problem.replaceChildren();
    } catch (error) {
      if (!signal.aborted) problem.replaceChildren(problemBox(error, { again: error.status === 404 ? null : load }));
    }
  }
  const reload = debounce(load, 300);
  signal.addEventListener('abort', reload.stop);

  function update(next) {
    if (signal.aborted) return;
    const before = job;
    // Live progress may be newer than the answer to a request that was on its way.
    const live = before?.attempt === next.attempt && before.progress?.seconds > next.progress?.seconds;
    job = live ? { ...next, progress: before.progress } : next;
    const final = FINAL.includes(job.state);
    setText(heading, job.name);
    setBadge(state, job.state);
    show(state, true);
    show(rest, true);
    setTitle(`${job.name}: ${job.state}`);
    if (before && before.state !== job.state) announce(`${job.name} is now ${job.state}`);
    setText(reason, job.failure ? '' : job.reason ?? '');
    show(reason, reason.textContent !== '');
    actions.update();
    facing.replaceChildren(about());
    fail();
    progress(job.progress);

    if (job.state === 'succeeded' && !result) {
      result = resultView({ job, signal });
      resultBox.replaceChildren(result);
    } else if (job.state !== 'succeeded' && result) {
      result = null;
      resultBox.replaceChildren();
    }
    if (!before || (FINAL.includes(before.state) && !final)) {
      watch();
      log.start();
    }
  }

  function about() {
    const waits = job.state === 'queued' && job.queue_position ? count(job.queue_position) : null;
    return facts([
      ['Position in the queue', waits],
      ['Next attempt', job.state === 'retrying' && job.not_before ? ago(job.not_before) : null],
      ['Duration', job.started_at ? elapsed(job.started_at, job.finished_at) : null],
      ['Created', ago(job.created_at)],
      ['Started', job.started_at && ago(job.started_at)],
      ['Finished', job.finished_at && ago(job.finished_at)],
      ['User', job.user],
      ['Attempt', `${count(job.attempt)} of ${count(job.max_attempts)}${job.failures ? `, ${counted(job.failures, 'failure')}` : ''}`],
      ['Device', `${job.device}${job.gpu == null ? '' : ` ${job.gpu}`}`],
      ['Priority', String(job.priority)],
      ['Limits', `${duration(job.time_limit_seconds)}, ${bytes(job.output_limit_bytes)}${job.overwrite ? ', may overwrite' : ''}${job.append ? ', appends' : ''}`],
      ['Teacher', job.teacher, 'long'],
      ['Output', h('code', null, job.output), 'full'],
    ], { 'data-testid': 'facts' });
  }

  const KINDS = {
    job: 'The job itself is wrong: another attempt would fail in the same way.',
    machine: 'Something on the machine went wrong: another attempt may succeed.',
    limit: 'The job exceeded one of its limits.',
  };

  function fail() {
    const f = job.failure;
    show(failure, Boolean(f));
    if (!f) return failure.replaceChildren();
    const [first, ...more] = String(f.message ?? '').split('\n');
    failure.replaceChildren(
      h('h2', null, icon('failed'), job.state === 'failed' ? 'The job failed' : 'The last attempt failed'),
      h('p.wrap', { testid: 'failure-message' }, h('strong', null, first)),
      f.problems?.length || !more.join('').trim() ? '' : h('pre', { tabindex: 0, role: 'region', 'aria-label': 'The whole message' }, more.join('\n').trim()),
      h('p.muted', null, KINDS[f.kind] ?? `Kind: ${f.kind}`),
      problemTable(f.problems) ?? '');
  }

  function progress(p) {
    show(overall, Boolean(p));
    if (!p) {
      setText(overallText, FINAL.includes(job.state) ? 'The job ended before it made any progress.' : 'Not started yet.');
      counters.replaceChildren();
      stages.replaceChildren();
      return;
    }
    overall.max = p.splits || 1;
    overall.value = p.splits_done;
    const running = job.state === 'running';
    setText(overallText, [
      `${count(p.splits_done)} of ${counted(p.splits, 'split')}`,
      running ? rate(p.tokens_per_second) : null,
      running && p.seconds_left != null ? `about ${duration(Math.ceil(p.seconds_left))} left` : null,
    ].filter(Boolean).join(' · '));
    counters.replaceChildren(job.attempt > 1 ? h('p.muted', null, `Attempt ${job.attempt} only, except for committed data:`) : '', facts([
      ['Documents', count(p.documents)], ['Text', bytes(p.text_bytes)], ['Tokens', count(p.tokens)], ['Sequences', count(p.sequences)],
      ['Teacher tokens', count(p.teacher_tokens)], ['Committed', bytes(p.bytes)], ['Time', duration(p.seconds)],
    ], { 'data-testid': 'counters' }));
    const busiest = Math.max(...(p.stages ?? []).map((s) => s.seconds), 1e-9);
    // The table keeps its place and its scroll position while its rows change.
    const fresh = table('Stages of this attempt: rows and seconds busy', ['Stage', '#Rows', '#Busy', ''], (p.stages ?? []).map((s) => [s.name, count(s.rows), duration(s.seconds), bar(s.seconds / busiest)]), { 'data-testid': 'stages' });
    const old = stages.querySelector('tbody');
    if (old) old.replaceWith(fresh.querySelector('tbody'));
    else if (p.stages?.length) stages.replaceChildren(fresh);
  }

  let lastSeq = null;
  function watch() {
    watching?.abort();
    watching = new AbortController();
    signal.addEventListener('abort', () => watching.abort());
    loadRates();
    events(jobPath(id, '/events'), {
      signal: watching.signal,
      after: lastSeq,
      onMissed: () => { // all of the job's events come again
        lastSeq = null;
        list.clear();
        executors.clear();
      },
      onStatus: (status) => {
        if (status.state === 'live') reload();
        onConnection(status);
        if (status.state === 'failed') problem.replaceChildren(problemBox(status.error));
      },
      onEvent: (type, event) => {
        if (type === 'end') return void ended();
        if (!event) return;
        if (type === 'progress') {
          job = { ...job, progress: event.data };
          progress(event.data);
          plot.add(event.time, event.attempt, event.data.tokens_per_second);
          return;
        }
        if (event.seq != null) lastSeq = event.seq;
        list.add(event);
        executors.add(event);
        if (['state', 'started', 'finished', 'attempt'].includes(type)) reload();
      },
    });
  }

  /** The stream ends with the job. Should the job have been retried at the same moment, it is watched again. */
  async function ended() {
    await load();
    if (!signal.aborted && !FINAL.includes(job?.state)) setTimeout(() => { if (!signal.aborted) watch(); }, 1000);
  }

  async function loadRates() {
    try {
      plot.load((await json(jobPath(id, '/rates'), { signal })).points);
    } catch (error) {
      if (!signal.aborted) setText(plot.summary, `The rates could not be read: ${error.message}`);
    }
  }

  load();
  return { element, title: `Job ${id}` };
}
