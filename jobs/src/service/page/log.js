// The log of a job: followed while it runs, the last lines kept, paused without losing any of those.

import { jobPath, FINAL } from './api.js';
import { h, icon, problemBox, setText, show } from './dom.js';
import { count, counted } from './format.js';
import { follow } from './stream.js';

const MOST_LINES = 5000;
const EVERY = 150; // ms between two writes to the page

export function logView({ id, stateOf, signal }) {
  let offset = 0;
  let half = ''; // a line that has not ended yet
  let waiting = []; // read, not shown yet
  let lines = 0;
  let dropped = 0;
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
    setText(pause, paused ? 'Go on' : 'Pause');
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
      box.append(...waiting.map(lineElement));
      lines += waiting.length;
      waiting = [];
      while (lines > MOST_LINES) {
        box.firstChild.remove();
        lines -= 1;
        dropped += 1;
      }
      if (stay) toEnd();
    }
    tell();
  }

  let connection = '';
  function tell() {
    const parts = [connection];
    if (paused) parts.push(`paused, ${counted(waiting.length, 'new line')}`);
    parts.push(lines || waiting.length ? counted(lines, 'line') : 'no lines yet');
    if (dropped) parts.push(`${count(dropped)} older ones left out`);
    setText(status, parts.filter(Boolean).join(' · '));
  }

  const timer = setInterval(() => { if (waiting.length) flush(); }, EVERY);
  signal.addEventListener('abort', () => clearInterval(timer));

  async function start() {
    if (running) return;
    running = true;
    await follow(jobPath(id, '/logs'), {
      signal, from: offset,
      isOver: () => FINAL.includes(stateOf()),
      onOffset: (n) => { offset = n; },
      onText: (text) => {
        const fresh = (half + text).split(/\r?\n/);
        half = fresh.pop();
        for (const line of fresh) waiting.push(line);
        if (waiting.length > 2 * MOST_LINES) {
          dropped += waiting.length - MOST_LINES;
          waiting = waiting.slice(-MOST_LINES);
        }
      },
      onStatus: ({ state, error }) => {
        connection = { connecting: 'connecting', live: FINAL.includes(stateOf()) ? '' : 'live', lost: 'connection lost, trying again', paused: 'waiting for this tab to be looked at', ended: '', failed: 'stopped' }[state];
        problem.replaceChildren();
        if (state === 'failed') problem.append(problemBox(error, { again: () => { problem.replaceChildren(); start(); } }));
        if (state === 'ended' && half) {
          waiting.push(half);
          half = '';
        }
        flush();
      },
    });
    running = false;
  }
  show(problem, true);
  return { element, start };
}

function lineElement(line) {
  const level = /\b(WARN(?:ING)?|ERROR)\b/i.exec(line.slice(0, 60))?.[1].toLowerCase();
  return h(level ? `div.${level.startsWith('warn') ? 'warn' : 'error'}` : 'div', null, level ? icon('warning') : null, line || ' ');
}
