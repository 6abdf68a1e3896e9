// The frame of the page: who is signed in, which view is shown, whether the connection stands.

import { getToken, json, session, setToken } from './api.js';
import { announce, byId, h, icon, notice, problemBox, setText, show, tick } from './dom.js';
import { jobView } from './job.js';
import { jobsView } from './list.js';
import { submitView } from './submit.js';

let leave = new AbortController(); // ends everything that the shown view has going on
let carried = null; // a notice for the next view
let ready = false;

function connection(status) {
  const box = byId('connection');
  const words = { connecting: 'Connecting…', live: 'Live', lost: 'Connection lost', paused: 'Paused', ended: '', failed: 'Not live' }[status.state];
  show(box, words !== '');
  if (box.dataset.state === status.state && status.state !== 'lost') return;
  if (status.state === 'lost' && box.dataset.told !== 'lost') announce('The connection to the server is lost; trying again');
  if (status.state === 'live' && box.dataset.told === 'lost') announce('The connection is restored');
  if (['lost', 'live'].includes(status.state)) box.dataset.told = status.state;
  box.dataset.state = status.state;
  box.replaceChildren(icon({ live: 'succeeded', lost: 'warning', failed: 'warning' }[status.state] ?? 'queued'), words);
  if (status.state === 'lost') {
    const seconds = Math.max(1, Math.round((status.retryAt - Date.now()) / 1000));
    box.title = `${status.error?.message ?? ''} Next try in ${seconds} s.`;
    box.append(h('button.link', { type: 'button', onclick: status.retryNow, testid: 'reconnect' }, 'Try now'));
  } else box.title = status.error?.message ?? '';
}

function navigate(hash, message) {
  carried = message ?? null;
  if (location.hash === hash) route();
  else location.hash = hash;
}

function place(view, { focus = true } = {}) {
  byId('view').replaceChildren(view.element);
  setTitle(view.title);
  notice(...(carried ? [carried] : []));
  carried = null;
  window.scrollTo(0, 0);
  if (focus) byId('view').querySelector('h1')?.focus();
}

const setTitle = (title) => { document.title = `${title} · Stillhouse`; };

let first = true;
function route() {
  if (!ready) return;
  leave.abort();
  leave = new AbortController();
  show(byId('connection'), false);
  byId('connection').dataset.state = '';
  const [path, search] = location.hash.replace(/^#/, '').split('?');
  const parts = path.split('/').filter(Boolean);
  const { signal } = leave;
  const common = { signal, navigate, onConnection: (status) => { if (!signal.aborted) connection(status); } };
  let view;
  if (parts[0] === 'submit') view = submitView(common);
  else if (parts[0] === 'jobs' && parts[1]) view = jobView({ ...common, id: decode(parts[1]), setTitle });
  else if (!parts.length || (parts[0] === 'jobs' && parts.length === 1)) view = jobsView({ ...common, query: new URLSearchParams(search) });
  else view = { element: h('div', null, h('h1', { tabindex: -1 }, 'There is no such page'), h('p', null, h('a', { href: '#/' }, 'To the jobs'))), title: 'No such page' };
  for (const link of document.querySelectorAll('[data-nav]')) {
    const here = link.dataset.nav === (parts[0] === 'submit' ? 'submit' : 'jobs');
    if (here) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  place(view, { focus: !first });
  first = false;
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function signInView(error) {
  leave.abort();
  ready = false;
  const field = h('input', { id: 'token', type: 'password', required: true, autocomplete: 'off', spellcheck: 'false', placeholder: 'sh_…', testid: 'token-input', 'aria-describedby': 'token-hint' });
  const problem = h('div', null, error ? problemBox(error) : null);
  const button = h('button.primary', { type: 'submit', testid: 'token-submit' }, 'Sign in');
  const form = h('form.card.narrow', { testid: 'token-form', onsubmit: async (e) => {
    e.preventDefault();
    const token = field.value.trim();
    button.disabled = true;
    try {
      // A token goes into a header, which holds printable ASCII only.
      if (!/^[\x21-\x7e]+$/.test(token)) throw new Error('A token looks like sh_ID_SECRET, without spaces.');
      const version = await json('version', { token, quiet: true });
      if (!version.user) throw new Error('The server does not know this token, or it has expired.');
      setToken(token);
      enter(version);
    } catch (e2) {
      problem.replaceChildren(problemBox(e2.status != null ? e2 : { title: 'The token was not accepted', detail: e2.message }));
      field.focus();
      field.select();
    }
    button.disabled = false;
  } },
  h('h1', { tabindex: -1 }, 'Sign in'),
  h('p', { id: 'token-hint' }, 'This server asks for a token. It is kept in this tab only, until you sign out or close it.'),
  h('label.field', null, 'Token', field), problem, button);
  place({ element: form, title: 'Sign in' }, { focus: false });
  field.focus();
}

function enter(version) {
  Object.assign(session, { auth: version.auth, user: version.user, scopes: version.scopes ?? [] });
  // A server without tokens lets everybody do everything.
  if (version.auth === 'open' && !session.scopes.length) session.scopes = ['read', 'submit', 'admin'];
  setText(byId('version'), `Stillhouse ${version.version}`);
  // A plain link carries no token.
  for (const link of document.querySelectorAll('.plain')) show(link, version.auth === 'open');
  who();
  ready = true;
  route();
}

function who() {
  const signedIn = session.auth === 'token' && session.user;
  setText(byId('who'), signedIn ? session.user : '');
  byId('who').title = signedIn ? `Scopes: ${session.scopes.join(', ')}` : '';
  show(byId('sign-out'), Boolean(signedIn));
}

function signOut(error) {
  setToken(null);
  session.user = null;
  session.scopes = [];
  show(byId('connection'), false);
  who();
  signInView(error instanceof Error ? error : null);
}

async function start() {
  try {
    const version = await json('version', { quiet: true }).catch((error) => {
      // A token that is no longer good must not keep us from asking who is asking.
      if (error.status === 401 && getToken()) return json('version', { token: null, quiet: true });
      throw error;
    });
    if (version.auth === 'token' && !version.user) {
      setText(byId('version'), `Stillhouse ${version.version}`);
      const stale = getToken() ? new Error('The token of this tab is no longer valid.') : null;
      setToken(null);
      return signInView(stale);
    }
    enter(version);
  } catch (error) {
    byId('view').replaceChildren(h('h1', { tabindex: -1 }, 'Stillhouse'), problemBox(error, { again: start }));
  }
}

session.onUnauthorized = (error) => { if (ready) signOut(error); };
byId('sign-out').addEventListener('click', () => signOut());
byId('skip').addEventListener('click', (e) => { // the hash belongs to the routes
  e.preventDefault();
  byId('main').focus();
});
window.addEventListener('hashchange', route);
window.addEventListener('error', (e) => { notice(`Something went wrong in this page: ${e.message}`); });
window.addEventListener('unhandledrejection', (e) => {
  if (e.reason?.name !== 'AbortError') notice(`Something went wrong in this page: ${e.reason?.message ?? e.reason}`);
});
setInterval(tick, 1000);
start();
