// Requests. The token lives in sessionStorage (this tab, until it closes) and travels in a header, never in a URL.

import { noteServerTime } from './format.js';

// Relative to this file, so that the page also works behind a proxy that adds a prefix.
const BASE = new URL('../api/v1/', import.meta.url);
const TOKEN = 'stillhouse.token';

export const FINAL = ['succeeded', 'failed', 'cancelled'];
export const STATES = ['queued', 'running', 'cancelling', 'retrying', ...FINAL];

export const getToken = () => sessionStorage.getItem(TOKEN);

export function setToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

/** Who is signed in; filled from /version. */
export const session = { auth: 'open', user: null, scopes: [], onUnauthorized: () => {} };

export const may = (scope) => session.scopes.includes(scope);

class ApiError extends Error {
  constructor(fields) {
    super(fields.detail || fields.title);
    Object.assign(this, fields);
  }

  static async from(response) {
    const text = await response.text().catch(() => '');
    let problem = {};
    if (/json/.test(response.headers.get('content-type') ?? '')) {
      try { problem = JSON.parse(text) ?? {}; } catch { /* then the text is shown as it is */ }
    }
    const answer = `${response.status} ${problem.title ?? response.statusText}`;
    // What the server says in its own words comes first; the name of the status helps nobody but its operator.
    const { detail } = problem;
    return new ApiError({
      status: response.status,
      answer,
      title: detail ? detail[0].toUpperCase() + detail.slice(1) : `The server answered ${answer}`,
      detail: problem.title ? null : text.slice(0, 500),
      problems: Array.isArray(problem.problems) ? problem.problems : [],
      requestId: problem.request_id ?? response.headers.get('x-request-id'),
    });
  }
}

export const aborted = (error) => error?.name === 'AbortError';

export async function request(path, { method = 'GET', query, body, headers = {}, accept = 'application/json', signal, token = getToken(), quiet } = {}) {
  const url = new URL(path, BASE);
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value != null && value !== '') url.searchParams.set(name, value);
  }
  const sent = { Accept: accept, ...headers };
  if (token) sent.Authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(url, { method, headers: sent, body, signal, cache: 'no-store', credentials: 'omit', redirect: 'error', referrerPolicy: 'no-referrer' });
  } catch (error) {
    if (aborted(error)) throw error;
    throw new ApiError({ status: 0, title: 'The server cannot be reached', detail: `${error.message}. Is it running, and is the network up?`, problems: [] });
  }
  noteServerTime(response.headers.get('date'));
  if (response.ok) return response;
  const error = await ApiError.from(response);
  if (error.status === 401 && !quiet) session.onUnauthorized(error);
  throw error;
}

export async function json(path, options) {
  const response = await request(path, options);
  try {
    return await response.json();
  } catch (error) {
    if (aborted(error)) throw error;
    throw new ApiError({ status: response.status, title: 'The answer could not be read', detail: `${path}: ${error.message}`, problems: [] });
  }
}

export const jobPath = (id, rest = '') => `jobs/${encodeURIComponent(id)}${rest}`;

export const isJson = (text) => /^\s*[{[]/.test(text);

export const fileHeaders = (text) => ({ 'Content-Type': isJson(text) ? 'application/json' : 'application/yaml' });

/** Saves an answer as a file: fetched with the token, since a plain link could not carry it. */
export async function download(path, name, query) {
  const response = await request(path, { query, accept: '*/*' });
  const url = URL.createObjectURL(await response.blob());
  const link = document.createElement('a');
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
