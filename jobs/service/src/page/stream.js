// Streams that stay open: server-sent events and followed logs, read with fetch because EventSource sends no token.

import { aborted, request } from './api.js';

const FIRST_BACKOFF_MS = 1000;
const MAX_BACKOFF_MS = 30000;
// The server writes a comment every 15 s; silence for three of them means that the connection is dead.
const SILENCE_TIMEOUT_MS = 50000;
// A browser opens six connections to an HTTP/1.1 server: tabs that nobody looks at give theirs back.
const HIDDEN_TIMEOUT_MS = 30000;

/**
 * Calls `once(signal, alive)` again and again until it returns true or `signal` ends it.
 * `onStatus({state: 'connecting' | 'live' | 'lost' | 'paused' | 'ended' | 'failed', error?, retryAt?, retryNow?})`
 */
async function keepOpen(once, { signal, onStatus = () => {}, silenceTimeout = SILENCE_TIMEOUT_MS }) {
  let wait = FIRST_BACKOFF_MS;
  while (!signal.aborted) {
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    signal.addEventListener('abort', stop);
    let silence;
    let hidden;
    let why = null;
    const alive = () => {
      clearTimeout(silence);
      if (silenceTimeout) silence = setTimeout(() => { why = new Error('The server sent nothing for too long'); attempt.abort(); }, silenceTimeout);
    };
    const watch = () => {
      clearTimeout(hidden);
      if (document.hidden) hidden = setTimeout(() => { why = 'hidden'; attempt.abort(); }, HIDDEN_TIMEOUT_MS);
    };
    document.addEventListener('visibilitychange', watch);
    watch();
    let error = null;
    try {
      alive();
      onStatus({ state: 'connecting' });
      const over = await once(attempt.signal, () => {
        wait = FIRST_BACKOFF_MS;
        alive();
      }, () => onStatus({ state: 'live' }));
      if (signal.aborted) return;
      if (over) return void onStatus({ state: 'ended' });
      error = new Error('The server closed the connection');
    } catch (e) {
      if (signal.aborted) return;
      error = aborted(e) ? why : e;
    } finally {
      clearTimeout(silence);
      clearTimeout(hidden);
      document.removeEventListener('visibilitychange', watch);
      signal.removeEventListener('abort', stop);
      attempt.abort();
    }
    if (error === 'hidden') {
      onStatus({ state: 'paused' });
      await untilVisible(signal);
      continue;
    }
    // What the server refuses it will refuse again.
    if (error?.status >= 400 && error.status < 500 && ![408, 425, 429].includes(error.status)) return void onStatus({ state: 'failed', error });
    const pause = wait * (0.75 + Math.random() / 2);
    wait = Math.min(MAX_BACKOFF_MS, wait * 2);
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, pause);
      const retryNow = () => { clearTimeout(timer); resolve(); };
      signal.addEventListener('abort', retryNow, { once: true });
      onStatus({ state: 'lost', error, retryAt: Date.now() + pause, retryNow });
    });
  }
}

function untilVisible(signal) {
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener('visibilitychange', look);
      resolve();
    };
    document.addEventListener('visibilitychange', look);
    signal.addEventListener('abort', look, { once: true });
    look();
  });
}

/** Text of an answer as it comes. */
async function* chunks(response, onData) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      onData();
      yield decoder.decode(value, { stream: true });
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Server-sent events. `onEvent(type, data)`; an event `end` ends it for good. After a lost connection it goes on after the last event that came;
 * `onMissed()` where the server has not kept what follows.
 */
export function events(path, { signal, onEvent, onStatus, onMissed = () => {}, after }) {
  let lastId = after ?? null;
  return keepOpen(async (attempt, alive, live) => {
    const open = (headers) => request(path, { accept: 'text/event-stream', headers, signal: attempt });
    let response;
    try {
      response = await open(lastId == null ? {} : { 'Last-Event-ID': String(lastId) });
    } catch (error) {
      if (error.status !== 409 || lastId == null) throw error;
      lastId = null;
      onMissed();
      response = await open({});
    }
    live();
    let rest = '';
    let message = { type: 'message', data: [] };
    for await (const chunk of chunks(response, alive)) {
      const lines = (rest + chunk).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === '') {
          const { type, data } = message;
          message = { type: 'message', data: [] };
          if (data.length) onEvent(type, parse(data.join('\n')));
          if (type === 'end') return true;
          continue;
        }
        const colon = line.indexOf(':');
        if (colon === 0) continue; // a comment that keeps the connection open
        const name = colon < 0 ? line : line.slice(0, colon);
        const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
        if (name === 'event') message.type = value;
        else if (name === 'data') message.data.push(value);
        else if (name === 'id') lastId = value;
      }
    }
    return false;
  }, { signal, onStatus });
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** A log: its last lines, then what comes. Every connection begins it anew: `onStart()`, then `onText(text)`; `isOver()` says whether the job is. */
export function follow(path, { signal, tail, onStart, onText, onStatus, isOver }) {
  return keepOpen(async (attempt, alive, live) => {
    const over = isOver();
    const response = await request(path, { query: { follow: !over, tail }, accept: 'text/plain', signal: attempt });
    live();
    onStart();
    for await (const text of chunks(response, alive)) onText(text);
    // The log of a job ends a moment before the page hears of the job's end.
    if (!over && !isOver()) await new Promise((resolve) => { setTimeout(resolve, 1500); });
    return over || isOver();
  }, { signal, onStatus, silenceTimeout: null }); // a quiet job writes nothing
}
