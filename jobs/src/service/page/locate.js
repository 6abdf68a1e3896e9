// Finds the line of a field such as `extract.noise.tolerance` or `input.paths[1]` in a job file.
// No YAML parser: keys are followed down by their indentation, or inside of braces; when a key is not
// there (it may be the one that is missing), the deepest one that was found stands for it.

const indentOf = (line) => line.match(/^[ ]*/)[0].length;
const blank = (line) => /^\s*(#|$)/.test(line);
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');

/** `{line, start, end, exact}`: line from 1, offsets into the text; null when nothing of it is found. */
export function locate(text, field) {
  const steps = field.match(/[^.[\]]+|\[\d+\]/g) ?? [];
  const lines = text.split('\n');
  const starts = [];
  lines.reduce((at, line) => (starts.push(at), at + line.length + 1), 0);
  let range = { first: 0, last: lines.length, column: 0 };
  let found = null;
  let exact = true;
  for (const step of steps) {
    const next = step.startsWith('[') ? item(lines, range, Number(step.slice(1, -1))) : key(lines, range, step);
    if (!next) {
      exact = false;
      break;
    }
    found = next;
    range = next.range;
  }
  if (!found) return null;
  return { line: found.line + 1, start: starts[found.line] + found.column, end: starts[found.line] + lines[found.line].trimEnd().length, exact };
}

/** The shallowest line of the range with this key; `column` on the first line leaves out what is before the parent's value. */
function key(lines, range, name) {
  const pattern = new RegExp(`(^|[\\s{,])(["']?)${escaped(name)}\\2\\s*:(?=\\s|$|[\\[{"'])`);
  let best = null;
  for (let i = range.first; i < range.last; i += 1) {
    if (blank(lines[i])) continue;
    const from = i === range.first ? range.column : 0;
    const match = pattern.exec(lines[i].slice(from));
    if (!match) continue;
    const column = from + match.index + match[1].length;
    if (best && column >= best.column) continue;
    best = { line: i, column, range: { first: i, last: blockEnd(lines, i, range.last), column: from + match.index + match[0].length } };
    if (i === range.first && range.column > 0) break; // in the parent's own line: a flow mapping
  }
  return best;
}

function item(lines, range, index) {
  let n = -1;
  let depth = null;
  for (let i = range.first + 1; i < range.last; i += 1) {
    const dash = /^(\s*)-(\s|$)/.exec(lines[i]);
    if (!dash || (depth != null && dash[1].length !== depth)) continue;
    depth = dash[1].length;
    n += 1;
    if (n === index) return { line: i, column: depth, range: { first: i, last: blockEnd(lines, i, range.last), column: depth + 1 } };
  }
  // A list in one line: the key's own line has to do.
  return { line: range.first, column: Math.max(0, indentOf(lines[range.first])), range };
}

/** The first line after `at` that is not deeper; a list may stand as deep as its key. */
function blockEnd(lines, at, last) {
  const depth = indentOf(lines[at]);
  for (let i = at + 1; i < last; i += 1) {
    if (blank(lines[i])) continue;
    const deep = indentOf(lines[i]);
    if (deep < depth || (deep === depth && (!/^\s*-/.test(lines[i]) || /^\s*-/.test(lines[at])))) return i;
  }
  return last;
}
