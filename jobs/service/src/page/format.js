// Numbers, sizes and times as a person reads them.

const THIN_SPACE = '\u202f'; // narrow and no-break: a number never wraps

/** Added to this machine's clock to get the server's: ages stay right when the clocks differ. */
let skew = 0;

export function noteServerTime(header) {
  const server = Date.parse(header ?? '');
  // The header has whole seconds only; small differences are its rounding.
  if (Number.isFinite(server)) skew = Math.abs(server - Date.now()) > 3000 ? server - Date.now() : 0;
}

export const now = () => Date.now() + skew;

export function count(n) {
  if (n == null || !Number.isFinite(n)) return '–';
  return String(Math.round(n)).replace('-', '−').replace(/\B(?=(\d{3})+$)/g, THIN_SPACE);
}

export const counted = (n, thing) => `${count(n)} ${thing}${n === 1 ? '' : 's'}`;

export function fixed(x, digits) {
  if (x == null || !Number.isFinite(x)) return '–';
  const [whole, part] = Math.abs(x).toFixed(digits).split('.');
  return (x < 0 ? '−' : '') + count(Number(whole)) + (part ? `.${part}` : '');
}

function scaled(n, units) {
  let value = n;
  let i = 0;
  while (value >= 999.95 && i < units.length - 1) {
    value /= 1000;
    i += 1;
  }
  return i === 0 ? `${count(n)}${THIN_SPACE}${units[0]}` : `${fixed(value, value < 10 ? 2 : 1)}${THIN_SPACE}${units[i]}`;
}

export const bytes = (n) => (n == null ? '–' : scaled(n, ['B', 'kB', 'MB', 'GB', 'TB', 'PB']));

/** A short form for axes: 1.5k, 20M. */
export function short(n) {
  for (const [limit, unit] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (n >= limit) return `${Number((n / limit).toPrecision(3))}${unit}`;
  }
  return String(Number(n.toPrecision(3)));
}

export function rate(n) {
  if (n == null) return '–';
  return `${n > 0 && n < 10 ? fixed(n, 1) : count(n)} tokens/s`;
}

export function share(part) {
  if (!Number.isFinite(part)) return '–';
  if (part > 0 && part < 5e-6) return `<${THIN_SPACE}0.001${THIN_SPACE}%`;
  return `${fixed(part * 100, part > 0 && part < 0.001 ? 3 : 1)}${THIN_SPACE}%`;
}

const two = (n) => String(n).padStart(2, '0');

export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return '–';
  if (seconds > 0 && seconds < 10) return `${fixed(seconds, seconds < 1 ? 2 : 1)} s`;
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${two(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${two(Math.floor(s / 60) % 60)} min`;
  return `${count(Math.floor(s / 86400))} d ${Math.floor(s / 3600) % 24} h`;
}

/** One unit only, whole. */
export function roughly(seconds) {
  const s = Math.abs(seconds);
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h`;
  return `${count(Math.floor(s / 86400))} d`;
}

const absolute = new Intl.DateTimeFormat(undefined, { dateStyle: 'medium', timeStyle: 'long' });

export const fullTime = (iso) => `${absolute.format(new Date(iso))} (${iso})`;

export function clock(iso) {
  const t = new Date(iso);
  return `${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())}`;
}

export const sinceSeconds = (iso, end) => ((end ? Date.parse(end) : now()) - Date.parse(iso)) / 1000;

export const plainLine = (text) => String(text ?? '').split('\n', 1)[0];
