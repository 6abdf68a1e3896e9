// The page at `/` against the service itself, in a browser. `make service-test`, or
//   STILLHOUSE_BIN=target/debug/stillhouse SCREENSHOTS=/tmp/shots node --test tests/page/page.test.mjs
// No state is waited for by sleeping, and nothing is tried twice.

import assert from 'node:assert/strict';
import { copyFile, mkdir, readFile, writeFile } from 'node:fs/promises';
import path from 'node:path';
import { after, before, test } from 'node:test';
import { ASSETS, LONG, Server, folders, jobFile, launch, longJob, look, newToken, openPage, removed } from './helpers.mjs';

const lasts = (minutes) => ({ timeout: minutes * 60_000 });
const REFUSED = /the server responded with a status of 422/;

let browser;
let here;
let server; // open, for all tests that need nothing else

before(async () => {
  if (process.env.SCREENSHOTS) await mkdir(process.env.SCREENSHOTS, { recursive: true });
  browser = await launch();
  here = await folders();
  server = await new Server(here).start();
}, lasts(2));

after(async () => {
  await browser?.close();
  await server?.kill();
  if (here) await removed(here.root);
}, lasts(2));

/** Another server with folders of its own, gone after the test. */
async function ownServer(t, options = async () => ({})) {
  const own = await folders();
  const it = new Server({ ...own, ...await options(own) });
  t.after(async () => {
    if (it.process) await it.kill('SIGKILL');
    await removed(own.root);
  });
  return it.start();
}

async function submit({ page, id }, text) {
  await id('job-text').fill(text);
  await id('verdict').getByText('valid: job').waitFor();
  await id('submit').click();
  await page.waitForURL(/#\/jobs\/\w+$/);
  return page.url().split('/').at(-1);
}

const listed = (id) => id('problems').locator('tbody tr').allInnerTexts();
const saved = async (page, button) => {
  const [download] = await Promise.all([page.waitForEvent('download'), button.click()]);
  return [download.suggestedFilename(), JSON.parse(await readFile(await download.path()))];
};
const fact = (box, name) => box.locator('div', { has: box.page().getByText(name, { exact: true }) }).locator('dd').innerText();

test('a job is written, corrected, submitted once, watched and looked at', lasts(5), async () => {
  const it = await openPage(browser, server, '', { acceptDownloads: true });
  const { page, id, state } = it;
  await id('empty').waitFor();
  await look(page, 'list-empty');
  await id('nav-submit').click();

  const good = longJob('speeches');
  await id('job-text').fill(good.replace('length: 64', 'length: 1').replace('codec: replay', 'codec: reply'));
  await id('problems').waitFor();
  assert.equal((await listed(id)).length, 2);
  await look(page, 'submit-problems');
  assert.match((await listed(id)).join(), /pack\.length line 10\ttoo small; valid: 2 or more\t1/);
  // To the field from its problem, and corrected by typing.
  await id('problem-jump').filter({ hasText: 'pack.length' }).click();
  assert.equal(await id('job-text').evaluate((t) => t.value.slice(t.selectionStart, t.selectionStart + 9)), 'length: 1');
  await page.keyboard.press('ArrowLeft');
  for (let i = 0; i < 'length: '.length; i += 1) await page.keyboard.press('ArrowRight');
  await page.keyboard.press('Delete');
  await page.keyboard.type('64');
  await page.waitForFunction(() => document.querySelectorAll('[data-testid=problems] tbody tr').length === 1);
  assert.match((await listed(id)).join(), /extract\.noise\.codec line 13\t.*"replay", "dense"\t"reply"/);
  await id('job-text').fill(good);
  await id('verdict').getByText('valid: job “speeches”').waitFor();
  await id('submit').dblclick();

  await page.waitForURL(/#\/jobs\/\w+$/);
  await state('running');
  await id('progress-text').getByText(/^[1-7] of 8 splits · .*tokens\/s/).waitFor({ timeout: LONG });
  await page.waitForFunction(() => document.querySelectorAll('[data-testid=stages] tbody tr').length === 8);
  await id('rate-plot').locator('svg').waitFor();
  await look(page, 'job-running');
  await state('succeeded');
  assert.deepEqual((await server.get('jobs')).jobs.map((j) => j.name), ['speeches']);

  await id('tokens').waitFor({ timeout: LONG });
  const made = id('result-facts');
  const job = page.url().split('/').at(-1);
  const report = await server.get(`jobs/${job}/report`);
  const total = report.totals.train;
  assert.equal((await fact(made, 'Tokens')).replace(/\D/g, ''), String(total.tokens));
  assert.equal(await fact(made, 'Perplexity'), report.perplexity.toFixed(2));
  assert.equal(await fact(made, 'Bytes per token'), (total.bytes / total.tokens).toFixed(2));
  assert.equal(await id('columns').locator('tbody tr').count(), report.columns.length);
  assert.equal(await id('corrections-plot').locator('rect').count(), report.statistics.corrections_histogram.length);
  assert.match(await id('progress-text').innerText(), /^8 of 8 splits/);
  assert.equal(await id('events').locator('[data-type=split_committed]').count(), 8);
  await id('log').getByText('done').waitFor();

  const tokens = id('tokens').locator('.token');
  assert.equal(await tokens.count(), 64);
  for (const group of [0, 1]) assert.ok(await id('tokens').locator(`[data-group="${group}"]`).count() > 0, `group ${group}`);
  await tokens.first().focus();
  await page.keyboard.press('ArrowRight');
  await page.keyboard.press('ArrowRight');
  assert.equal(await fact(id('token-details'), 'Position'), '2');
  assert.equal(await fact(id('token-details'), 'Id'), String(report.row.tokens[2].id));
  const [text, last] = [await id('tokens').innerText(), total.rows - 1];
  await id('row-input').fill(String(last));
  await page.keyboard.press('Enter');
  await page.waitForFunction((before) => document.querySelector('[data-testid=tokens]')?.innerText !== before, text);
  const row = (await server.get(`jobs/${job}/report?row=${last}`)).row;
  assert.equal(await fact(id('sequence'), 'Sequence id'), String(row.sequence_id));
  assert.ok(await id('row-next').isDisabled());
  for (const summary of await page.locator('summary').all()) await summary.click();
  await id('job-file').getByText('name: speeches').waitFor();
  await look(page, 'job-succeeded');

  const [manifestName, manifest] = await saved(page, id('download-manifest'));
  const [reportName, again] = await saved(page, id('download-report'));
  assert.deepEqual([manifestName, reportName], ['speeches-manifest.json', 'speeches-report.json']);
  assert.equal(manifest.columns.length, report.columns.length);
  assert.deepEqual(again.row, row);

  // A copy of it is the same file; the job itself can be forgotten.
  await id('action-copy').click();
  assert.equal(await id('job-text').inputValue(), good);
  await page.goBack();
  await id('action-delete').click();
  await id('confirm-yes').click();
  await id('notice').getByText('Deleted the job speeches').waitFor();
  await id('empty').waitFor();
  await it.end();
});

test('images, orders, masks of digits and blocks, signals and what the teacher wrote are pictures', lasts(6), async () => {
  const pixels = (canvas) => canvas.evaluate((c) => {
    const { data } = c.getContext('2d').getImageData(0, 0, c.width, c.height);
    return Array.from({ length: c.height }, (_, y) => Array.from({ length: c.width }, (__, x) => (data[4 * (y * c.width + x)] < 100 ? 1 : 0)).join(''));
  });
  const cut = (text) => text.replace(/extract:[^]*topk: 0\n/, '');
  const jobs = {
    ordered: cut(jobFile({ name: 'ordered', length: 16 })).replace('{views: 2, schedule: linear, sampling: stratified}', '{level: subtoken}\norders: {kind: strided, streams: [2]}'),
    blocks: cut(jobFile({ name: 'blocks', length: 16 })).replace('{views: 2, schedule: linear, sampling: stratified}', '{level: block, block_length: 4, views: 2}'),
    signals: jobFile({ name: 'signals', length: 16 })
      .replace(/partitions:.*\n/, '')
      .replace(/topk: 0\n/, `topk: 3
  logz_temperatures: [1.0, 2.0]
  entropy: true
  candidates: [262, 11]
  samples: {draws: 8}
  top_p: {mass: 0.5, most: 40}
  hidden_states: {layers: [0, 2]}
`),
    image: `version: 1
name: image
seed: 1
input: {format: images, paths: rgb.png, images: {size: 8, height: 6, fit: stretch, labels: none}}
pack: {length: 144, separator: none, boundary: none}
output: {path: out/image}
`,
    writing: `version: 1
name: writing
seed: 42
input: {format: none, documents: 2}
pack: {mode: pad, length: 16}
extract:
  mode: sequential
  teacher: {path: ${path.join(ASSETS, 'teacher-nano-gpt2')}, device: cpu, dtype: f32}
output: {path: out/writing}
`,
  };
  await copyFile(path.join(ASSETS, '../operators/testdata/images/rgb.png'), path.join(here.work, 'rgb.png'));
  for (const [name, text] of Object.entries(jobs)) {
    const it = await openPage(browser, server, '#/submit');
    const job = await submit(it, text);
    await it.state('succeeded');
    await it.id('tokens').waitFor({ timeout: LONG });
    const { row } = await server.get(`jobs/${job}/report`);
    const drawn = (row.operators ?? []).flatMap((o) => o.pictures ?? []);
    const box = (kind) => it.id('pictures').getByTestId(kind);
    if (name === 'ordered') {
      // N = 16, S = 2: 0 8 1 9 …, blocks 1 2 3 3 4 4 …: the strictly causal mask begins with a token that sees nothing
      const [strict, causal] = [await pixels(box('mask').nth(0).locator('canvas')), await pixels(box('mask').nth(1).locator('canvas'))];
      const block = Array.from({ length: 16 }, (_, n) => (n < 2 ? n + 1 : 2 + Math.floor(n / 2)));
      const expected = (sees) => block.map((b) => block.map((k) => Number(sees(k, b))).join(''));
      assert.deepEqual(strict, expected((k, b) => k < b));
      assert.deepEqual(causal, expected((k, b) => k <= b));
      assert.match(await box('mask').nth(0).innerText(), /16 tokens in the order of generation.* 1 token see nothing, the last sees 14\./);
      const { cells } = drawn.find((p) => p.kind === 'grid');
      const digits = await pixels(box('grid').locator('canvas'));
      assert.deepEqual(digits, [0, 1, 2, 3].map((y) => Array.from({ length: 16 }, (_, x) => cells[4 * x + y]).join('')));
      assert.equal(await fact(it.id('sequence'), 'order'), row.operators.find((o) => o.operator === 'orders').facts[0][1]);
    } else if (name === 'signals') {
      const strips = drawn.filter((p) => p.kind === 'strip');
      assert.deepEqual(strips.map((p) => p.title), [
        'mass of the 3 likeliest', 'ln Σ exp(l/1)', 'ln Σ exp(l/2)', 'entropy in nat', 'probability of candidate 262', 'probability of candidate 11',
        'distinct tokens drawn', 'tokens kept by top-p', 'mass outside of top-p', 'length of the state of layer 0', 'length of the state of layer 2',
      ]);
      assert.equal(await box('strip').count(), strips.length);
      for (const [n, { values, low, high }] of strips.entries()) {
        const filled = await box('strip').nth(n).locator('canvas').evaluate((c) => {
          const { data } = c.getContext('2d').getImageData(0, 0, c.width, c.height);
          const column = (x) => Array.from({ length: c.height }, (_, y) => 4 * (y * c.width + x));
          return Array.from({ length: c.width }, (_, x) => (column(x).every((at) => data[at + 3] === 0) ? null : column(x).filter((at) => data[at] < 100).length));
        });
        assert.deepEqual(filled, values.map((v) => (v === null ? null : Array.from({ length: 24 }, (_, y) => (v - low) / (high - low) * 24 > y).filter(Boolean).length)));
        // the row begins with a BOS, which nobody predicts
        assert.deepEqual(filled.map((bar) => bar === null), Array.from({ length: 16 }, (_, x) => x === 0));
      }
      assert.match(await box('strip').nth(3).innerText(), /entropy in nat 16 tokens from left to right, 15 of them predicted; a full bar is 10\.82, an empty one 0\./);
      assert.match(await fact(it.id('sequence'), 'predicted by the teacher'), /^15 of 16 positions$/);
    } else if (name === 'image') {
      // 6 rows of 8 pixels, a pixel of the canvas for each, in their own colours
      const canvas = it.id('picture');
      const shown = await canvas.evaluate((c) => ({ size: [c.width, c.height], data: Array.from(c.getContext('2d').getImageData(0, 0, c.width, c.height).data) }));
      assert.deepEqual(shown.size, [8, 6]);
      const colours = shown.data.filter((_, i) => i % 4 < 3);
      assert.deepEqual(colours, row.tokens.map((t) => t.id));
      assert.ok(new Set(colours).size > 20, 'a picture of something');
    } else if (name === 'blocks') {
      assert.equal(await box('shares').count(), 2);
      const columns = await pixels(box('shares').first().locator('canvas'));
      const filled = [0, 1, 2, 3].map((x) => columns.filter((line) => line[x] === '1').length);
      assert.deepEqual(filled, drawn[0].values.map((t) => Array.from({ length: 24 }, (_, y) => t * 24 > y).filter(Boolean).length));
    } else {
      const [given, written] = [await it.id('tokens').locator('[data-by=given]').count(), await it.id('tokens').locator('[data-by=written]').count()];
      assert.deepEqual([given, given + written], [1, row.tokens.filter((t) => t.valid).length]);
    }
    await look(it.page, `pictures-${name}`);
    await it.end();
  }
});

test('a running job is cancelled and goes on after a retry', lasts(6), async (t) => {
  const it = await openPage(browser, server, '#/submit');
  const { page, id, state } = it;
  const job = await submit(it, longJob('stopped'));
  await id('progress-text').getByText(/^[1-7] of 8 splits/).waitFor({ timeout: LONG });
  const goOn = await server.hold();
  t.after(goOn);
  await id('action-cancel').click();
  await look(page, 'job-cancel');
  await page.keyboard.press('Escape');
  await id('confirm').waitFor({ state: 'hidden' });
  assert.equal((await server.get(`jobs/${job}`)).state, 'running');
  await id('action-cancel').click();
  await id('confirm-yes').click();
  const asked = performance.now();
  goOn();
  await state('cancelled');
  assert.ok(performance.now() - asked < 10_000, 'it took seconds to cancel');
  await look(page, 'job-cancelled');
  const done = (await server.get(`jobs/${job}`)).progress.splits_done;
  assert.ok(done >= 1 && done < 8, `${done} splits`);

  await id('action-retry').click();
  await state('running');
  await state('succeeded');
  await id('tokens').waitFor({ timeout: LONG });
  await id('events').getByText(`${done} done before`).waitFor();
  assert.equal((await server.get(`jobs/${job}`)).result.rows, (await server.get(`jobs/${job}/report`)).totals.train.rows);
  await it.end();
});

test('a job on a cluster shows which executor runs which split', lasts(3), async () => {
  const it = await openPage(browser, server, '');
  const { page, id } = it;
  await id('nav-submit').waitFor();
  // A server without a cluster tells of no executors, so its events are made up here.
  await page.evaluate(async () => {
    const { executorList } = await import('/page/executors.js');
    const list = executorList(new AbortController().signal);
    document.querySelector('#view').append(list.element);
    window.executors = list;
  });
  const tell = (...events) => page.evaluate((all) => all.forEach((e) => window.executors.add(e)), events);
  const begun = (split, executor) => ({ type: 'split_started', data: { split, dataset_split: 'train', executor } });
  const made = (split) => ({ type: 'split_committed', data: { split } });
  const rows = () => id('executors').locator('tbody tr').allInnerTexts();
  const until = (text) => id('executors-text').getByText(text, { exact: true }).waitFor();
  await tell(begun(0), made(0));
  assert.equal(await id('executors').isVisible(), false, 'a job of its own worker has none');
  await tell(begun(1, 'rack <b>7</b>'), begun(2, 'box process 3'), begun(3, 'box process 3'), made(2));
  await until('2 executors, 2 splits in progress; 1 split finished before its executor was reported.');
  assert.deepEqual(await rows(), ['box process 3\t3\t1', 'rack <b>7</b>\t1\t0']);
  await look(page, 'executors');
  // A split of one that died is another one's; those at work stand first.
  await tell(begun(1, 'box process 3'));
  await page.waitForFunction(() => document.querySelector('[data-testid=executors] tbody').innerText.includes('1, 3'));
  assert.deepEqual(await rows(), ['box process 3\t1, 3\t1', 'rack <b>7</b>\t\t0']);
  await tell({ type: 'state', data: { to: 'cancelled' } });
  await until('2 executors, 0 splits in progress; 1 split finished before its executor was reported.');
  await page.evaluate(() => window.executors.clear());
  await id('executors').waitFor({ state: 'hidden' });
  await it.end();
});

test('what is wrong with the input is told by field', lasts(3), async () => {
  const it = await openPage(browser, server, '#/submit', { expected: [REFUSED] });
  const { page, id, state } = it;
  await id('job-text').fill(jobFile({ name: 'outside', paths: ['/etc/passwd'] }));
  await id('problems').waitFor();
  await id('submit').click();
  await id('submit-problem').waitFor();
  assert.match((await listed(id)).join(), /input\.paths\[0\] line 6\t.*does not allow reading.*\t"\/etc\/passwd"/);
  assert.match(page.url(), /#\/submit$/);
  await look(page, 'submit-refused');

  await submit(it, jobFile({ name: 'a-job-with-a-long-name-that-reads-what-is-not-there', paths: ['speeches/of/many/years/and/many/more/folders/that/are/not/there/speeches-00000-of-00512.jsonl'], out: 'out/below/many/folders/with/rather/long/names/speeches-of-many-years' }));
  await state('failed');
  await id('failure-message').waitFor();
  assert.match((await listed(id)).join(), /input\.paths\[0\].*no such file/s);
  await look(page, 'job-failed');
  await id('nav-jobs').click();
  await id('job-row').filter({ hasText: 'a-job-with-a-long-name' }).getByText('the job file has 1 problem').waitFor();
  await look(page, 'list');
  await id('filter-state-succeeded').click();
  await page.waitForFunction(() => [...document.querySelectorAll('[data-testid=job-row] [data-testid=state]')].every((b) => b.dataset.state === 'succeeded'));
  await id('filter-clear').click();
  await id('filter-name').fill('a-job-with-a-long-name-that-reads-what-is-not-there');
  await page.waitForFunction(() => document.querySelectorAll('[data-testid=job-row]').length === 1);
  await it.end();
});

test('a server with tokens lets in who has one', lasts(3), async (t) => {
  const withTokens = await ownServer(t, async ({ root, work, data }) => {
    const config = path.join(root, 'service.yaml');
    await writeFile(config, `auth: token\ndata: ${data}\naccess: {read: [${ASSETS}, ${work}], write: [${work}]}\n`);
    return { config };
  });
  const full = await newToken(withTokens.data, '--user', 'ada');
  const reader = await newToken(withTokens.data, '--user', 'grace', '--scope', 'read');
  const it = await openPage(browser, withTokens, '#/submit', { expected: [/status of 401/] });
  const { page, id, state } = it;
  const signIn = async (token) => {
    await id('token-input').fill(token);
    await id('token-submit').click();
  };
  await signIn(`${full.slice(0, -1)}${full.endsWith('0') ? '1' : '0'}`);
  await id('problem').waitFor();
  await look(page, 'sign-in-refused');

  await signIn(reader);
  await id('user').getByText('grace').waitFor();
  await id('verdict').getByText('may only read').waitFor();
  await id('job-text').fill(jobFile({ name: 'small' }));
  assert.ok(await id('submit').isDisabled());
  await look(page, 'submit-reader');

  await id('sign-out').click();
  await signIn(full);
  await id('user').getByText('ada').waitFor();
  await submit(it, jobFile({ name: 'small' }));
  await state('succeeded');
  await id('tokens').waitFor({ timeout: LONG });
  // Still signed in after a reload, and the token is in no address.
  await page.reload();
  await id('tokens').waitFor({ timeout: LONG });
  assert.ok(!page.url().includes(full));
  await it.end();
});

test('the page and the job outlive the server', lasts(6), async (t) => {
  const mortal = await ownServer(t);
  const it = await openPage(browser, mortal, '#/submit', { expected: [/net::ERR_(CONNECTION_(REFUSED|RESET)|INCOMPLETE_CHUNKED_ENCODING|EMPTY_RESPONSE)/] });
  const { page, id, state } = it;
  const job = await submit(it, longJob('survivor'));
  await id('progress-text').getByText(/^[1-7] of 8 splits/).waitFor({ timeout: LONG });
  await mortal.kill('SIGKILL');
  const connection = (word) => page.locator(`#connection[data-state=${word}]`).waitFor({ timeout: 60_000 });
  await connection('lost');
  await look(page, 'job-connection-lost');
  await mortal.start();
  await connection('live');
  await state('succeeded');
  await id('tokens').waitFor({ timeout: LONG });
  assert.match(await id('progress-text').innerText(), /^8 of 8 splits/);
  // What came before the crash and what came after it, each once.
  const { events } = await mortal.get(`jobs/${job}/events`);
  await page.waitForFunction((n) => document.querySelectorAll('[data-testid=events] li').length === n, events.length);
  await look(page, 'job-survived');
  await it.end();
});

test('what is asked and answered in quick succession is not mixed up', lasts(4), async () => {
  const it = await openPage(browser, server, '#/submit');
  const { page, id, state } = it;
  await submit(it, longJob('in-haste'));
  await state('running');
  // Asked again before the browser has told of the end of the first question, and asked, answered by Escape.
  const press = (...names) => page.evaluate((all) => all.forEach((name) => document.querySelector(`[data-testid=${name}]`).click()), names);
  await press('action-cancel', 'confirm-no', 'action-cancel');
  await page.keyboard.press('Escape');
  await id('confirm').waitFor({ state: 'hidden' });
  await press('action-cancel', 'confirm-no', 'action-cancel');
  // The answer to the cancelling comes after the job's end is known.
  let answer;
  const ended = new Promise((resolve) => { answer = resolve; });
  await page.route('**/cancel', async (route) => {
    const response = await route.fetch();
    assert.equal((await response.json()).state, 'cancelling');
    await ended;
    await route.fulfill({ response });
  });
  await press('confirm-yes');
  await state('cancelled');
  const told = page.waitForResponse('**/cancel');
  answer();
  await told;
  await page.waitForFunction(() => !document.querySelector('[data-testid=action-retry]').disabled);
  assert.equal(await page.locator('#view h1 + [data-testid=state]').getAttribute('data-state'), 'cancelled');
  // A question goes with the view that asked it.
  await press('action-delete');
  await page.goBack();
  await id('confirm').waitFor({ state: 'hidden' });
  await it.end();
});

test('everything can be reached with the keyboard', lasts(4), async () => {
  const it = await openPage(browser, server, '');
  const { page, id, state } = it;
  await id('jobs').waitFor({ state: 'attached' });
  const tabTo = async (what) => {
    for (let i = 0; i < 60; i += 1) {
      await page.keyboard.press('Tab');
      if (await page.evaluate((selector) => document.activeElement.matches(selector), what)) return;
    }
    assert.fail(`${what} was not reached`);
  };
  const focused = (what) => page.waitForFunction((selector) => document.activeElement?.matches(selector), what);
  await page.keyboard.press('Tab');
  await focused('#skip');
  await page.keyboard.press('Enter');
  await focused('#main');
  await tabTo('a[href="#/submit"]');
  await page.keyboard.press('Enter');
  await focused('h1');
  await tabTo('[data-testid=job-text]');
  await page.keyboard.insertText(longJob('by-keyboard'));
  await id('verdict').getByText('valid: job').waitFor();
  await tabTo('[data-testid=submit]');
  await page.keyboard.press('Enter');
  await page.waitForURL(/#\/jobs\/\w+$/);
  await focused('h1');
  await state('running');
  await tabTo('[data-testid=action-cancel]');
  await page.keyboard.press('Enter');
  await focused('[data-testid=confirm-no]');
  await page.keyboard.press('Enter');
  await focused('[data-testid=action-cancel]');
  await page.keyboard.press('Enter');
  await tabTo('[data-testid=confirm-yes]');
  await page.keyboard.press('Enter');
  await state('cancelled');
  await page.evaluate(() => document.querySelector('#skip').focus());
  await tabTo('[data-testid=nav-jobs]');
  await page.keyboard.press('Enter');
  await id('job-row').filter({ hasText: 'by-keyboard' }).waitFor();
  await tabTo('[data-testid=job-link]');
  await page.keyboard.press('Enter');
  await id('job-name').getByText('by-keyboard').waitFor();
  await it.end();
});
