// Columns as pictures: images, attention masks, times of blocks, digits that are masked, values of tokens. A canvas has a pixel for each value; the style sheet makes it large.

import { counted } from './format.js';
import { h } from './dom.js';

const MAX_CELLS = 256; // of a mask's side
const MAX_BARS = 512;
const EMPTY = [242, 240, 236];
const FULL = [27, 90, 140];

// An image as it is: a pixel of the canvas for each, which the style sheet makes large.
export function picture({ height, width, channels }, tokens) {
  const canvas = h('canvas.picture', { width, height, role: 'img', 'aria-label': `The image, ${width} by ${height} pixels`, testid: 'picture' });
  const context = canvas.getContext('2d');
  if (!context) return null;
  const image = context.createImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = tokens[i * channels + Math.min(c, channels - 1)]?.id ?? 0;
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** The facts of an operator that its pictures do not say: those with a name, but for the head of the drawing in characters. */
export const inWords = (view) => (view.facts ?? []).filter(([name]) => name && name !== 'sees');

/** Every picture of the operators, each with a sentence that says what is to be seen. */
export function pictures(views) {
  const drawn = views.flatMap((v) => v.pictures ?? []).map((p) => DRAW[p.kind]?.(p)).filter(Boolean);
  return drawn.length ? h('div.pictures', { testid: 'pictures' }, drawn) : null;
}

/** A canvas of `width` by `height` cells, `shade(x, y)` from 0 to 1 in each; none where there is nothing. */
function cells(kind, width, height, label, shade) {
  const canvas = h(`canvas.${kind}`, { width, height, role: 'img', 'aria-label': label });
  const context = canvas.getContext('2d');
  if (!context || !width || !height) return null;
  const image = context.createImageData(width, height);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const part = shade(x, y);
      if (part === null) continue;
      for (let c = 0; c < 3; c++) image.data[4 * (y * width + x) + c] = Math.round(EMPTY[c] + (FULL[c] - EMPTY[c]) * part);
      image.data[4 * (y * width + x) + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function figure(testid, canvas, title, sentence) {
  return canvas && h('figure', { testid }, canvas, h('figcaption', null, h('strong', null, title), ` ${sentence}`));
}

// Rows are tokens in the order of generation, columns what they may see. Of a long sequence a cell is the mean of its part.
function mask({ title, sees }) {
  const n = sees.length;
  const side = Math.min(n, MAX_CELLS);
  const part = (cell) => Math.floor(cell * n / side);
  const shade = (x, y) => {
    const [from, to, first, last] = [part(x), part(x + 1), part(y), part(y + 1)];
    let pairs = 0;
    for (let query = first; query < last; query++) pairs += Math.min(Math.max(sees[query], from), to) - from;
    return pairs / ((to - from) * (last - first));
  };
  const blind = sees.filter((count) => count === 0).length;
  const sentence = `${counted(n, 'token')} in the order of generation, one per row; dark cells are the tokens that it may see. ${counted(blind, 'token')} see nothing, the last sees ${sees[n - 1] ?? 0}.`;
  return figure('mask', cells('mask', side, side, `${title} mask. ${sentence}`, shade), title, sentence);
}

// A column for each block, filled up to its share from below.
function shares({ title, length, values }) {
  const height = 24;
  const sentence = `${counted(values.length, 'block')} of ${counted(length, 'token')}, from left to right; a full column is 1.`;
  return figure('shares', cells('strip', values.length, height, `${title}. ${sentence}`, (x, y) => Number(values[x] * height > height - 1 - y)), title, sentence);
}

// A column for each token, its first digit on top.
function grid({ title, height, cells: values }) {
  const width = values.length / height;
  const ones = values.split('1').length - 1;
  const sentence = `${counted(width, 'token')} from left to right, the most significant digit on top; ${ones} of ${values.length} are dark.`;
  return figure('grid', cells('strip', width, height, `${title}. ${sentence}`, (x, y) => Number(values[x * height + y])), title, sentence);
}

const bound = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toFixed(2))));

// A bar for each token, filled up from the lower to the upper end; a token without a value has no bar. Of a long row a bar is the mean of its part.
function strip({ title, low, high, values }) {
  const height = 24;
  const width = Math.min(values.length, MAX_BARS);
  const part = (bar) => Math.floor(bar * values.length / width);
  const bars = Array.from({ length: width }, (_, n) => {
    const there = values.slice(part(n), part(n + 1)).filter((value) => value !== null);
    return there.length ? there.reduce((sum, value) => sum + value, 0) / there.length : null;
  });
  const full = (value) => (value - low) / (high - low) * height;
  const shade = (x, y) => (bars[x] === null ? null : Number(full(bars[x]) > height - 1 - y));
  const given = values.filter((value) => value !== null).length;
  const sentence = `${counted(values.length, 'token')} from left to right, ${given} of them predicted; a full bar is ${bound(high)}, an empty one ${bound(low)}.`;
  return figure('strip', cells('strip', width, height, `${title}. ${sentence}`, shade), title, sentence);
}

const DRAW = { mask, shares, grid, strip };
