// What a finished job made: totals, columns, corrections, one sequence decoded.

import { aborted, download, jobPath, json } from './api.js';
import { bar, facts, h, problemBox, section, setText, show, table } from './dom.js';
import { bytes, count, counted, duration, fixed, share } from './format.js';
import { inWords, picture, pictures } from './picture.js';
import { correctionsHistogram } from './plot.js';

const MAX_TOKENS = 4096; // shown at once

export function resultView({ job, signal }) {
  const overview = h('div', null, h('p.muted', null, 'Reading the data set…'));
  const sequence = h('div');
  const problem = h('div');
  const save = (label, rest, name, testid) => h('button', { type: 'button', testid, onclick: async (e) => {
    const button = e.currentTarget;
    button.disabled = true;
    try {
      await download(jobPath(job.id, rest), name, rest === '/report' ? { row: current } : null);
      problem.replaceChildren();
    } catch (error) {
      problem.replaceChildren(problemBox(error));
    }
    button.disabled = false;
  } }, label);
  let current = 0;
  let rows = job.result?.rows ?? 0;
  let request;

  const number = h('input', { type: 'number', min: 0, max: Math.max(0, rows - 1), step: 1, value: 0, required: true, testid: 'row-input', onchange: () => { if (number.reportValidity()) load(Number(number.value)); } });
  const of = h('span.muted');
  const previous = h('button', { type: 'button', 'aria-label': 'Previous sequence', testid: 'row-previous', onclick: () => load(current - 1) }, '‹');
  const next = h('button', { type: 'button', 'aria-label': 'Next sequence', testid: 'row-next', onclick: () => load(current + 1) }, '›');
  const picker = h('form.row.tools', { onsubmit: (e) => { e.preventDefault(); if (number.reportValidity()) load(Number(number.value)); } },
    h('label', null, 'Sequence ', number), of, previous, next);

  async function load(row) {
    request?.abort();
    request = new AbortController();
    const mine = request;
    signal.addEventListener('abort', () => mine.abort());
    sequence.setAttribute('aria-busy', 'true');
    try {
      const report = await json(jobPath(job.id, '/report'), { query: { row }, signal: mine.signal });
      problem.replaceChildren();
      if (row === current || !overview.dataset.filled) fillOverview(report);
      current = row;
      number.value = row;
      previous.disabled = row <= 0;
      next.disabled = row + 1 >= rows;
      sequence.replaceChildren(report.row ? sequenceView(report) : h('p.muted', null, 'The data set has no such sequence.'));
    } catch (error) {
      if (!aborted(error)) problem.replaceChildren(problemBox(error, { again: () => load(row) }));
      if (!overview.dataset.filled && !aborted(error)) overview.replaceChildren();
    }
    if (mine === request) sequence.removeAttribute('aria-busy');
  }

  function fillOverview(report) {
    overview.dataset.filled = 'yes';
    const splits = Object.entries(report.totals ?? {});
    const sum = (name) => splits.reduce((n, [, t]) => n + (t[name] ?? 0), 0);
    const [tokens, size] = [sum('tokens'), sum('bytes')];
    const s = report.statistics ?? {};
    rows = sum('rows') || sum('sequences') || rows;
    number.max = Math.max(0, rows - 1);
    setText(of, `of 0 to ${count(rows - 1)}`);
    const all = report.columns?.reduce((n, c) => n + c.bytes, 0) ?? 0;
    overview.replaceChildren(
      facts([
        ['Tokens', count(tokens)], ['Sequences', count(rows)], ['Bytes per token', tokens ? fixed(size / tokens, 2) : '–'],
        ['Perplexity', report.perplexity == null ? null : fixed(report.perplexity, 2)],
        ['Corrections per token', report.corrections_mean == null ? null : fixed(report.corrections_mean, 2)],
        ['Most corrections', s.corrections_max ? count(s.corrections_max) : null],
        ['Largest total variation', s.total_variation_max ? s.total_variation_max.toExponential(2) : null],
        ['Documents', s.documents == null ? null : count(s.documents)],
        ['Sources', s.sources == null ? null : Object.entries(s.sources).map(([name, n]) => `${name} ${share(n.text_tokens / s.text_tokens)} (${count(n.kept_documents)} documents)`).join(', '), 'long'],
        ['Documents without a token', s.empty_documents ? count(s.empty_documents) : null],
        ['Tokens dropped by packing', s.dropped_tokens == null ? null : count(s.dropped_tokens)],
        ['Records skipped', s.skipped == null ? '0' : `${count(Object.values(s.skipped).reduce((n, m) => n + m, 0))}: ${Object.entries(s.skipped).map(([reason, n]) => `${count(n)} ${reason}`).join(', ')}`, s.skipped == null ? null : 'long'],
        ['Documents dropped', s.dropped == null ? null : `${count(Object.values(s.dropped).reduce((n, m) => n + m, 0))}: ${Object.entries(s.dropped).map(([reason, n]) => `${count(n)} ${reason}`).join(', ')}`, 'long'],
        ...(report.operator_statistics ?? []).map((o) => [o.meaning, 'sum' in o ? count(o.sum) : `${fixed(o.max, 4)} at most`]),
        ['Size', bytes(size)], ['Sequence length', count(report.length)], ['Duration', job.result ? duration(job.result.seconds) : null],
        ['Tokenizer', report.tokenizer, 'long'], ['Teacher', report.teacher, 'long'],
      ], { class: 'facts tiles', 'data-testid': 'result-facts' }),
      table('Totals by split', ['Split', '#Shards', '#Sequences', '#Tokens', '#Size'], splits.map(([name, t]) => [name, count(t.shards), count(t.rows ?? t.sequences), count(t.tokens), bytes(t.bytes)])),
      report.columns?.length ? table('Bytes per token by column', ['Column', '#Bytes per token', '#Share', '', 'Type', 'Shape'],
        report.columns.map((c) => [h('code', null, c.name), fixed(c.bytes_per_token, 3), share(c.bytes / all), bar(c.bytes / all), h('code', null, c.data_type), h('code', null, c.shape ?? '–')]), { 'data-testid': 'columns' }) : '');
    const bins = s.corrections_histogram;
    const plot = bins?.length ? correctionsHistogram(bins) : null;
    if (plot) overview.append(h('h3', null, 'Corrections'), plot);
    show(picker, rows > 0);
  }

  load(0);
  return section('Result', { testid: 'result' },
    h('div.row.tools', null, save('Download manifest.json', '/manifest', `${job.name}-manifest.json`, 'download-manifest'), save('Download report.json', '/report', `${job.name}-report.json`, 'download-report')),
    problem, overview, h('h3', null, 'One sequence'), picker, sequence);
}

const groupOf = (token) => (token.group == null ? null : Number(token.group));
// What cannot be seen is drawn; line breaks also break the line.
const visible = (text) => (text === '' ? '∅' : text.replace(/\t/g, '⇥\t').replace(/\r/g, '␍').replace(/\n/g, '⏎\n'));

function details(token, i, views) {
  return [['Position', count(i)], ['Token', h('code.token-text', null, visible(token.text))], ['Id', String(token.id)],
    ['Group', groupOf(token) == null ? null : String(groupOf(token))],
    ['Log-probability', token.logprob == null ? null : fixed(token.logprob, 4)],
    ['Probability', token.logprob == null ? null : share(Math.exp(token.logprob))],
    ['Corrections', token.corrections == null ? null : count(token.corrections)],
    ['Sub-tokens', token.subtokens?.join(' ') || null], ['Valid', token.valid === false ? 'no' : null],
    ...views.filter((v) => v.tokens?.[i]).map((v) => [v.operator, v.tokens[i]])];
}

function sequenceView(report) {
  const { row } = report;
  const tokens = row.tokens ?? [];
  const writer = (row.operators ?? []).find((v) => v.operator === 'generate')?.tokens; // who each token is by
  const views = row.operators ?? []; // what operators show that the page knows nothing else of
  const grouped = tokens.some((t) => t.group != null);
  const panel = h('div.inspect', { testid: 'token-details' });
  const hint = 'Point at a token, or go through them with the arrow keys.';
  const describe = (i) => panel.replaceChildren(i == null ? h('p.muted', null, hint) : facts(details(tokens[i], i, views)));
  let active = 0;

  const box = h('div.tokens', {
    role: 'listbox', 'aria-label': 'Tokens of the sequence', testid: 'tokens', 'aria-orientation': 'horizontal',
    onmouseover: (e) => { if (e.target.dataset.i) describe(Number(e.target.dataset.i)); },
    onmouseleave: () => describe(box.contains(document.activeElement) ? active : null),
    onfocusin: (e) => { if (e.target.dataset.i) pick(Number(e.target.dataset.i)); },
    onclick: (e) => { if (e.target.dataset.i) e.target.focus(); },
    onkeydown: (e) => {
      const last = box.children.length - 1;
      const to = { ArrowRight: active + 1, ArrowLeft: active - 1, ArrowDown: active + 10, ArrowUp: active - 10, Home: 0, End: last }[e.key];
      if (to == null) return;
      e.preventDefault();
      box.children[Math.max(0, Math.min(last, to))].focus();
    },
  });
  // One stop of the tab key for all of them; the arrow keys move inside.
  function pick(i) {
    box.children[active].tabIndex = -1;
    box.children[active].removeAttribute('aria-selected');
    active = i;
    box.children[i].tabIndex = 0;
    box.children[i].setAttribute('aria-selected', 'true');
    describe(i);
  }
  const option = (t, i) => h('span.token', {
    role: 'option', tabindex: i === 0 ? 0 : -1, 'data-i': i, 'data-group': groupOf(t), 'data-by': writer?.[i] || null, 'data-invalid': t.valid === false,
    'aria-label': `${JSON.stringify(t.text)}, id ${t.id}${writer?.[i] ? `, ${writer[i]}` : ''}${grouped ? `, group ${groupOf(t)}` : ''}${t.logprob == null ? '' : `, log-probability ${t.logprob.toFixed(2)}`}${t.corrections == null ? '' : `, ${counted(t.corrections, 'correction')}`}`,
  }, visible(t.text));
  box.append(...tokens.slice(0, MAX_TOKENS).map(option));
  const more = tokens.length > MAX_TOKENS && h('button', { type: 'button', onclick: (e) => {
    box.append(...tokens.slice(MAX_TOKENS).map((t, i) => option(t, i + MAX_TOKENS)));
    e.currentTarget.remove();
  } }, `Show all ${count(tokens.length)} tokens`);
  describe(null);

  const ones = tokens.filter((t) => groupOf(t) === 1).length;
  return h('div', { testid: 'sequence' },
    facts([['Shard', h('code', null, row.shard), 'long'], ['Row in the shard', count(row.row)], ['Sequence id', String(row.sequence_id)],
      ['Documents', count(row.documents?.length)], ['Partition at t', row.partition_t == null ? null : fixed(row.partition_t, 4)],
      ...views.flatMap((v) => (v.pictures ? inWords(v) : v.facts ?? []))]),
    row.picture && picture(row.picture, tokens),
    pictures(views),
    writer && h('p.legend', null, h('span.token', { 'data-by': 'given' }, 'given'), ` ${counted(writer.filter((by) => by === 'given').length, 'token')} `,
      h('span.token', { 'data-by': 'written' }, 'written'), ` underlined, by the teacher, ${counted(writer.filter((by) => by === 'written').length, 'token')}`),
    grouped && h('p.legend', null, h('span.token', { 'data-group': 0 }, 'group 0'), ` plain, ${counted(tokens.length - ones, 'token')} `, h('span.token', { 'data-group': 1 }, 'group 1'), ` underlined, ${counted(ones, 'token')}`),
    h('div', null, panel, box), more, documents(row), blueprints(row)); // the panel sticks beside its tokens only
}

function documents(row) {
  if (!row.documents?.length) return null;
  return h('details', null, h('summary', null, `${counted(row.documents.length, 'document')} in this sequence`),
    table('Documents', ['#From token', '#Document', '#Record', 'File'], row.documents.map((d) => [count(d.offset), String(d.document_id), count(d.record), h('code', null, d.file ?? '–')])));
}

function blueprints(row) {
  if (!row.blueprints?.length) return null;
  return h('details', null, h('summary', null, 'What a student sees of the noise'),
    row.blueprints.map((b) => [
      h('p', null, `Position ${count(b.position)}, `, h('code.token-text', null, visible(b.text)), `: rank ${count(b.rank)}, weight ${share(b.weight)}, log-probability ${fixed(b.logprob, 3)}`),
      table(`Heaviest tokens at position ${b.position}`, ['Token', '#Id', '#Weight', '#ξ', ''], (b.top ?? []).map((t) => [h('code.token-text', null, visible(t.text)), String(t.id), share(t.weight), fixed(t.xi, 3), bar(t.weight)])),
    ]));
}
