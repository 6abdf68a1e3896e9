// A new job: the file, checked while it is written, and the options of the service.

import { aborted, fileHeaders, isJson, json, may, request } from './api.js';
import { announce, debounce, h, icon, problemBox, problemTable, setText } from './dom.js';
import { counted } from './format.js';

// Kept while the page stays open, so that looking at a job does not lose what was written.
const draft = { text: '', folder: '', priority: '0', attempts: '', hours: '', gigabytes: '', overwrite: false, append: false };

export function setDraft(text) {
  draft.text = text;
}

/** crypto.randomUUID would need https; this also works on plain http. */
function freshKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, '0')).join('');
}

export function submitView({ signal, navigate }) {
  // One key for one content: pressing twice, or again after a lost answer, submits once.
  let key = { of: null, value: null };
  let checking;
  let busy = false;
  let shown = []; // problems that are listed

  const text = h('textarea', {
    id: 'file', rows: 22, wrap: 'off', spellcheck: 'false', autocapitalize: 'off', autocomplete: 'off', testid: 'job-text',
    placeholder: 'version: 1\nname: demo\ninput:\n  format: jsonl\n  paths: ["corpus/*.jsonl.gz"]\n…', 'aria-describedby': 'verdict',
    oninput: () => { draft.text = text.value; gutter(); checkSoon(); },
    onscroll: () => { numbers.scrollTop = text.scrollTop; },
  });
  text.value = draft.text;
  const numbers = h('div.numbers', { 'aria-hidden': 'true' });
  const verdict = h('p', { id: 'verdict', testid: 'verdict', role: 'status' });
  const list = h('div', { testid: 'validation' });
  const problem = h('div');
  const allowed = may('submit');
  const button = h('button.primary', { type: 'submit', disabled: !allowed, testid: 'submit' }, 'Submit the job');
  const file = h('input', { type: 'file', accept: '.yaml,.yml,.json', hidden: true, testid: 'job-file-input', onchange: async () => {
    const chosen = file.files[0];
    if (!chosen) return;
    if (chosen.size > 5e6) problem.replaceChildren(problemBox({ title: 'This is not a job file', detail: `${chosen.name} has ${chosen.size} bytes.` }));
    else {
      text.value = draft.text = await chosen.text();
      problem.replaceChildren();
      gutter();
      check();
    }
    file.value = '';
  } });

  const option = (name, label, hint, props) => {
    const input = h('input', { name, testid: `option-${name}`, value: draft[name], 'aria-describedby': hint && `hint-${name}`, oninput: () => { draft[name] = input.value; if (name === 'folder') checkSoon(); }, ...props });
    return h('div.field', null, h('label', null, label, input), hint && h('small.muted', { id: `hint-${name}` }, hint));
  };
  // one or the other: ticking one takes the other back
  const boxes = {};
  const box = (name, other) => {
    boxes[name] = h('input', { type: 'checkbox', testid: `option-${name}`, checked: draft[name], onchange: () => {
      draft[name] = boxes[name].checked;
      if (draft[name]) draft[other] = boxes[other].checked = false;
    } });
    return boxes[name];
  };

  const form = h('form', { onsubmit: (e) => { e.preventDefault(); submit(); }, testid: 'submit-form' },
    h('div.columns', null,
      h('div', null,
        h('div.row.title', null, h('label', { for: 'file' }, h('strong', null, 'Job file'), h('span.muted', null, ' YAML or JSON')),
          h('button', { type: 'button', onclick: () => file.click() }, 'Open a file…'), file),
        h('div.editor', null, numbers, text),
        verdict, list),
      h('fieldset.card', null, h('legend', null, 'Options'),
        option('folder', 'Folder', 'The folder on the server that relative paths in the file start from. Empty: the server’s default.', { placeholder: '/data/jobs', spellcheck: 'false' }),
        option('priority', 'Priority', '−100 to 100; higher runs first.', { type: 'number', min: -100, max: 100, step: 1 }),
        option('attempts', 'Maximum attempts', 'Empty: the server’s default.', { type: 'number', min: 1, max: 1000, step: 1 }),
        option('hours', 'Time limit in hours', 'Empty: the server’s default.', { type: 'number', min: 0, step: 'any' }),
        option('gigabytes', 'Output limit in GB', 'Empty: the server’s default.', { type: 'number', min: 0, step: 'any' }),
        h('label.check', null, box('overwrite', 'append'), ' Replace another data set in the output folder'),
        h('label.check', null, box('append', 'overwrite'), ' The input has new files: add splits only for these'),
        problem, button)));

  function query() {
    const scaled = (value, by) => (value === '' ? null : Math.round(Number(value) * by));
    return {
      folder: draft.folder.trim(), priority: draft.priority, max_attempts: draft.attempts, overwrite: String(draft.overwrite), append: String(draft.append),
      time_limit_seconds: scaled(draft.hours, 3600), output_limit_bytes: scaled(draft.gigabytes, 1e9),
    };
  }

  function gutter() {
    const bad = new Set(shown.map((p) => p.line));
    numbers.replaceChildren(...text.value.split('\n').map((_, i) => h(bad.has(i + 1) ? 'div.bad' : 'div', null, `${bad.has(i + 1) ? '▸' : ''}${i + 1}`)));
    numbers.scrollTop = text.scrollTop;
  }

  function jump(p) {
    if (!p.line) return null;
    return { run: () => {
      const lines = text.value.split('\n');
      const line = lines[p.line - 1] ?? '';
      const start = lines.slice(0, p.line - 1).reduce((at, before) => at + before.length + 1, 0);
      // the server counts characters, the browser units of UTF-16
      const column = [...line].slice(0, (p.column ?? 1) - 1).join('').length;
      text.focus();
      text.setSelectionRange(start + column, start + line.trimEnd().length);
      text.scrollTop = Math.max(0, (p.line - 5) * parseFloat(getComputedStyle(text).lineHeight));
      text.scrollLeft = 0;
    } };
  }

  function say(kind, words) {
    const state = { good: 'succeeded', bad: 'failed' }[kind];
    if (verdict.dataset.words === words) return;
    verdict.dataset.words = words;
    verdict.dataset.kind = kind;
    verdict.replaceChildren(state ? icon(state) : '', words);
  }

  function listProblems(problems) {
    shown = problems;
    list.replaceChildren(problemTable(problems, jump) ?? '');
    gutter();
  }

  async function check() {
    checkSoon.stop();
    checking?.abort();
    if (!allowed) return say('bad', 'This token may only read: the server does not check or accept jobs from it.');
    if (!text.value.trim()) {
      listProblems([]);
      return say('', 'Paste or write a job file; it is checked as you write.');
    }
    checking = new AbortController();
    const mine = checking;
    try {
      const answer = await json('validate', { method: 'POST', query: { folder: draft.folder.trim() }, headers: fileHeaders(text.value), body: text.value, signal: mine.signal });
      if (signal.aborted || mine !== checking) return;
      listProblems(answer.problems ?? []);
      if (answer.valid) say('good', `${isJson(text.value) ? 'JSON' : 'YAML'}, valid${answer.name ? `: job “${answer.name}”` : ''}.`);
      else say('bad', `Not valid yet: ${counted(answer.problems?.length ?? 0, 'problem')}.`);
    } catch (error) {
      if (aborted(error) || signal.aborted) return;
      say('bad', 'The job file could not be checked.');
      shown = error.problems ?? [];
      list.replaceChildren(problemBox(error, { again: check }));
    }
  }
  const checkSoon = debounce(check, 400);
  signal.addEventListener('abort', () => { checkSoon.stop(); checking?.abort(); });

  async function submit() {
    if (busy) return;
    if (!text.value.trim()) {
      say('bad', 'The job file is empty.');
      return text.focus();
    }
    const content = JSON.stringify([text.value, query()]);
    if (key.of !== content) key = { of: content, value: freshKey() };
    busy = true;
    button.disabled = true;
    setText(button, 'Submitting…');
    try {
      const response = await request('jobs', { method: 'POST', query: query(), headers: { ...fileHeaders(text.value), 'Idempotency-Key': key.value }, body: text.value });
      const job = await response.json();
      announce(`Submitted ${job.name}`);
      if (!signal.aborted) navigate(`#/jobs/${encodeURIComponent(job.id)}`);
    } catch (error) {
      if (signal.aborted) return;
      problem.replaceChildren(problemBox({ ...error, problems: [] }, { testid: 'submit-problem' }));
      if (error.problems?.length) {
        checking?.abort();
        checkSoon.stop();
        listProblems(error.problems);
        say('bad', `The server refused the job: ${counted(error.problems.length, 'problem')}.`);
      }
    } finally {
      busy = false;
      button.disabled = false;
      setText(button, 'Submit the job');
    }
  }

  check();
  queueMicrotask(gutter);
  return { element: h('div', null, h('h1', { tabindex: -1 }, 'Submit a job'), form), title: 'Submit a job' };
}
