// A server of one's own, a browser of one's own, and what every view has to satisfy.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdir, mkdtemp, readFile, readdir, rm, writeFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { gunzipSync } from 'node:zlib';
import { chromium } from 'playwright-core';

const ROOT = fileURLToPath(new URL('../../', import.meta.url));
const BINARY = path.resolve(process.env.STILLHOUSE_BIN ?? path.join(ROOT, 'target/debug/stillhouse'));
/** A folder to take the page's files from instead of the binary, so that editing them needs no build. */
const PAGE = process.env.STILLHOUSE_PAGE;
const SCREENSHOTS = process.env.SCREENSHOTS;
const AXE = createRequire(import.meta.url).resolve('axe-core/axe.min.js');
export const ASSETS = path.join(ROOT, 'assets');

/** A queue waits for a worker, a worker for a busy machine. */
export const LONG = 120_000;
const STATE = '#view h1 + [data-testid=state]';

/** A folder with `work/` (where the server is started and jobs may read and write) and `data/`. */
export async function folders() {
  const root = await mkdtemp(path.join(tmpdir(), 'stillhouse-page-'));
  const [work, data] = [path.join(root, 'work'), path.join(root, 'data')];
  await mkdir(work);
  const corpus = gunzipSync(await readFile(path.join(ASSETS, 'corpus/sotu-small.jsonl.gz'))).toString().trimEnd().split('\n');
  await writeFile(path.join(work, 'corpus.jsonl'), `${corpus.slice(0, 7).join('\n')}\n`);
  return { root, work, data };
}

/** A job file with the teacher: by default one of two seconds, `split_megabytes` and `sql` make others. */
export function jobFile({ name, paths = ['corpus.jsonl'], sql = 'SELECT text FROM input LIMIT 2', split, length = 64, out = `out/${name}` }) {
  const teacher = path.join(ASSETS, 'teacher-nano-gpt2');
  return `version: 1
name: ${name}
seed: 42
input:
  format: jsonl
  paths: ${JSON.stringify(paths)}
  text: text
${split ? `  split_megabytes: ${split}` : `  sql: ${JSON.stringify(sql)}`}
tokenizer: {path: ${teacher}}
pack: {mode: wrap, length: ${length}, separator: eos, boundary: bos_eos, remainder: drop}
extract:
  teacher: {path: ${teacher}, device: cpu, dtype: f32}
  noise: {codec: replay, tolerance: 1e-3, draws: 1}
  topk: 0
subtokens: {length: 4}
partitions: {views: 2, schedule: linear, sampling: stratified}
output: {path: ${out}, shard_megabytes: 2}
`;
}

/** Eight splits and about 10 seconds. They come in two waves of four, since so many are at work at once: `Server.hold` keeps a job between them. */
export const longJob = (name) => jobFile({ name, split: 0.025 });

/** `stillhouse serve` on a free port; started again on the same one. */
export class Server {
  constructor({ work, data, config }) {
    Object.assign(this, { work, data, config, port: 0 });
  }

  async start() {
    const what = this.config ? ['--config', this.config] : ['--data', this.data, '--allow', ASSETS, '--allow', this.work];
    this.process = spawn(BINARY, ['serve', '--listen', `127.0.0.1:${this.port}`, '--log-format', 'json', ...what], { cwd: this.work, stdio: ['ignore', 'ignore', 'pipe'] });
    this.exit = once(this.process, 'exit');
    const log = createInterface({ input: this.process.stderr });
    const listening = new Promise((resolve, reject) => {
      const said = [];
      log.on('line', (line) => {
        said.push(line);
        const at = /"message":"serving","listen":"127\.0\.0\.1:(\d+)"/.exec(line);
        if (at) resolve(Number(at[1]));
      });
      log.on('close', () => reject(new Error(`the server ended:\n${said.slice(-20).join('\n')}`)));
    });
    listening.catch(() => {});
    this.port = await Promise.race([listening, this.exit.then(() => listening)]);
    return this;
  }

  get url() {
    return `http://127.0.0.1:${this.port}/`;
  }

  async kill(signal = 'SIGTERM') {
    this.process.kill(signal);
    await this.exit;
  }

  /** The processes of its jobs. */
  async workers() {
    const threads = `/proc/${this.process.pid}/task`;
    const lists = (await readdir(threads)).map((thread) => readFile(path.join(threads, thread, 'children'), 'utf8').catch(() => ''));
    return (await Promise.all(lists)).flatMap((list) => list.split(' ').filter(Boolean)).map(Number);
  }

  /** Keeps its jobs where they are, so that what a test has found at work does not end while it looks; gives what lets them go on. */
  async hold() {
    const held = await this.workers();
    assert.ok(held.length > 0, 'no job is at work');
    held.forEach((pid) => process.kill(pid, 'SIGSTOP'));
    return () => {
      for (const pid of held.splice(0)) process.kill(pid, 'SIGCONT');
    };
  }

  /** What the API says of something, without the page. */
  async get(rest) {
    const response = await fetch(`${this.url}api/v1/${rest}`);
    assert.ok(response.ok, `${rest}: ${response.status}`);
    return response.json();
  }
}

export async function newToken(data, ...args) {
  const child = spawn(BINARY, ['token', 'create', '--data', data, '--json', ...args], { stdio: ['ignore', 'pipe', 'inherit'] });
  let said = '';
  child.stdout.on('data', (text) => { said += text; });
  await once(child, 'close');
  return JSON.parse(said).token;
}

export const launch = () => chromium.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
  args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
});

/**
 * A page in a profile of its own, and what went wrong in it. A browser writes every answer of 400 and more to
 * the console by itself: `expected` says which ones belong to the test.
 */
export async function openPage(browser, server, hash, { expected = [], ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, colorScheme: 'light', ...options });
  const wrong = [];
  await context.addInitScript({ path: AXE });
  await context.addInitScript(() => document.addEventListener('securitypolicyviolation', (e) => console.error(`policy: ${e.violatedDirective} ${e.blockedURI}`)));
  context.on('console', (message) => {
    const text = message.text();
    if (['error', 'warning'].includes(message.type()) && !expected.some((e) => e.test(text))) wrong.push(`console: ${text} (${message.location().url})`);
  });
  context.on('weberror', (e) => wrong.push(`error: ${e.error().stack}`));
  context.on('request', (request) => {
    if (!request.url().startsWith(server.url) && !/^(data|blob):/.test(request.url())) wrong.push(`request to another origin: ${request.url()}`);
  });
  if (PAGE) {
    await context.route(({ pathname }) => pathname === '/' || pathname.startsWith('/page/'), async (route) => {
      const name = path.basename(new URL(route.request().url()).pathname) || 'index.html';
      await route.fulfill({ response: await route.fetch(), body: await readFile(path.join(PAGE, name)) });
    });
  }
  const page = await context.newPage();
  page.setDefaultTimeout(30_000);
  await page.goto(server.url + hash);
  return {
    page,
    id: (name) => page.getByTestId(name),
    state: (...wanted) => page.waitForFunction(([selector, states]) => states.includes(document.querySelector(selector)?.dataset.state), [STATE, wanted], { timeout: LONG }),
    async end() {
      const notice = page.getByTestId('notice');
      if (await notice.isVisible()) assert.doesNotMatch(await notice.innerText(), /went wrong/);
      await context.close();
      assert.deepEqual(wrong, []);
    },
  };
}

/** Every view: nothing serious from axe in light and dark, nothing to scroll sideways at 360 pixels; screenshots. */
export async function look(page, name) {
  const size = page.viewportSize();
  const shot = async (kind) => {
    if (SCREENSHOTS) await page.screenshot({ path: path.join(SCREENSHOTS, `${name}-${kind}.png`), fullPage: !(await page.getByTestId('confirm').isVisible()) });
  };
  for (const colorScheme of ['light', 'dark']) {
    await page.emulateMedia({ colorScheme, reducedMotion: 'reduce' });
    const found = await page.evaluate(async () => (await globalThis.axe.run(document, { resultTypes: ['violations'] })).violations
      .map(({ impact, id, nodes }) => ({ impact, id, at: nodes.map((n) => `${n.target}: ${n.failureSummary}`) })));
    assert.deepEqual(found.filter(({ impact }) => ['serious', 'critical'].includes(impact)), [], `${name}, ${colorScheme}`);
    await shot(colorScheme);
  }
  await page.emulateMedia({ colorScheme: 'light' });
  await page.setViewportSize({ width: 360, height: 760 });
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(wide <= 0, `${name}: ${wide} pixels too wide at 360`);
  await shot('360');
  await page.setViewportSize(size);
}

export const removed = (folder) => rm(folder, { recursive: true, force: true });
