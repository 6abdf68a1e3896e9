// The log of a job: followed while it runs, the last lines kept, paused without losing any of those.

import { jobPath, FINAL } from './api.js';
import { h, icon, problemBox, setText } from './dom.js';
import { count, counted } from './format.js';
import { follow } from './stream.js';

const MAX_LINES = 5000;
const RENDER_INTERVAL_MS = 150;

export function logView({ id, stateOf, signal }) {
  let partialLine = ''; // a line that has not ended yet
  let waiting = []; // read, not shown yet
  let clearOnNext = false; // what is shown goes when more is
  let paused = false;
  let running = false;

  const box = h('div.log', { tabindex: 0, role: 'region', 'aria-label': 'Log lines', testid: 'log', onscroll: () => {
    // Scrolling away lets go of the end; coming back takes hold of it.
    tail.checked = atEnd();
  } });
  const tail = h('input', { type: 'checkbox', checked: true, testid: 'log-follow', onchange: () => { if (tail.checked) toEnd(); } });
  const pause = h('button', { type: 'button', 'aria-pressed': 'false', testid: 'log-pause', onclick: () => {
    paused = !paused;
    pause.setAttribute('aria-pressed', String(paused));
    setText(pause, paused ? 'Resume' : 'Pause');
    flush();
  } }, 'Pause');
  const status = h('span.muted', { testid: 'log-status' });
  const problem = h('div');
  const element = h('div', null,
    h('div.row.tools', null, h('label', null, tail, ' Stay at the end'), pause, status), problem, box);

  const atEnd = () => box.scrollHeight - box.scrollTop - box.clientHeight < 8;
  const toEnd = () => { box.scrollTop = box.scrollHeight; };

  function flush() {
    if (!paused && waiting.length) {
      const stay = tail.checked;
      if (clearOnNext) box.replaceChildren();
      clearOnNext = false;
      box.append(...waiting.map(lineElement));
      waiting = [];
      while (box.childElementCount > MAX_LINES) box.firstChild.remove();
      if (stay) toEnd();
    }
    tell();
  }

  let connection = '';
  function tell() {
    const parts = [connection];
    if (paused) parts.push(`paused, ${counted(waiting.length, 'new line')}`);
    const lines = box.childElementCount;
    parts.push(lines === MAX_LINES ? `the last ${count(lines)} lines` : lines || waiting.length ? counted(lines, 'line') : 'no lines yet');
    setText(status, parts.filter(Boolean).join(' · '));
  }

  const timer = setInterval(() => { if (waiting.length) flush(); }, RENDER_INTERVAL_MS);
  signal.addEventListener('abort', () => clearInterval(timer));

  async function start() {
    if (running) return;
    running = true;
    await follow(jobPath(id, '/logs'), {
      signal, tail: MAX_LINES,
      isOver: () => FINAL.includes(stateOf()),
      onStart: () => {
        partialLine = '';
        waiting = [];
        clearOnNext = true;
      },
      onText: (text) => {
        const fresh = (partialLine + text).split(/\r?\n/);
        partialLine = fresh.pop();
        for (const line of fresh) waiting.push(line);
        if (waiting.length > 2 * MAX_LINES) waiting = waiting.slice(-MAX_LINES);
      },
      onStatus: ({ state, error }) => {
        connection = { connecting: 'connecting', live: FINAL.includes(stateOf()) ? '' : 'live', lost: 'connection lost, trying again', paused: 'paused until this tab is visible', ended: '', failed: 'stopped' }[state];
        problem.replaceChildren();
        if (state === 'failed') problem.append(problemBox(error, { again: () => { problem.replaceChildren(); start(); } }));
        if (state === 'ended' && partialLine) {
          waiting.push(partialLine);
          partialLine = '';
        }
        flush();
      },
    });
    running = false;
  }
  return { element, start };
}

function lineElement(line) {
  const level = /\b(WARN(?:ING)?|ERROR)\b/i.exec(line.slice(0, 60))?.[1].toLowerCase();
  return h(level ? `div.${level.startsWith('warn') ? 'warn' : 'error'}` : 'div', null, level ? icon('warning') : null, line || ' ');
}
