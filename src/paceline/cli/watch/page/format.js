/** Numbers with units. */

export const MISSING = "–";
const isNumber = value => typeof value === "number" && Number.isFinite(value);

// Made once: toLocaleString looks the language up at every call.
const grouped = new Intl.NumberFormat("en", {maximumFractionDigits: 20}),
  dated = new Intl.DateTimeFormat("sv", {dateStyle: "short", timeStyle: "medium"}); // 2026-11-15 14:30:00
const PREFIXES = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

export const count = value => (isNumber(value) ? grouped.format(Math.round(value)) : MISSING);

export const counted = (value, what) => `${count(value)} ${what}${value === 1 ? "" : "s"}`;

/** Four significant digits. value: a number, or its name if JSON has none for it. */
export function num(value) {
  if (value === null || value === undefined) return MISSING;
  value = Number(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7))
    return value
      .toExponential(3)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  if (size >= 1e4) return grouped.format(Math.round(value));
  return String(Number(value.toPrecision(4)));
}

/** Of a number on an axis: as short as its neighbours allow. */
export function tick(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  for (const [limit, unit] of PREFIXES)
    if (size >= limit) return `${Number((value / limit).toPrecision(4))}${unit}`;
  return String(Number(value.toPrecision(4)));
}

/** Where a logarithmic axis has ticks: round numbers, five or so; on less than half a decade, in equal steps. */
export function logTicks(low, high) {
  const decades = Math.log10(high / low),
    ticks = [];
  if (decades < 0.5) {
    const rough = (high - low) / 4,
      power = 10 ** Math.floor(Math.log10(rough)),
      step = power * [1, 2, 5, 10].find(factor => factor * power >= rough);
    for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(i * step);
    return ticks;
  }
  const factors = decades > 2.5 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5],
    every = Math.ceil(decades / 6);
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++)
    for (const factor of factors)
      if (power % every === 0 && factor * 10 ** power >= low && factor * 10 ** power <= high)
        ticks.push(factor * 10 ** power);
  return ticks;
}

/** Halves are rounded to even, as in the sentences that come from Python. */
export function percent(value) {
  if (!isNumber(value)) return MISSING;
  if (value > 0 && value < 0.0995) return `${(100 * value).toFixed(1)}%`;
  const rounded = Math.round(100 * value);
  return `${rounded - 100 * value === 0.5 && rounded % 2 ? rounded - 1 : rounded}%`;
}

export function bytes(value) {
  if (!isNumber(value)) return MISSING;
  for (const [limit, unit] of PREFIXES)
    // 999.6 kB has four digits, or three as 1.00 MB.
    if (value >= 0.9995 * limit) return `${(value / limit).toPrecision(3)} ${unit}B`;
  return `${Math.round(value)} B`;
}

export function rate(value, what = "samples") {
  if (!isNumber(value)) return MISSING;
  const [scaled, unit] = value >= 0.9995e6 ? [value / 1e6, "M"] : value >= 1e4 ? [value / 1e3, "k"] : [value, ""];
  return `${grouped.format(Number(scaled.toPrecision(3)))}${unit} ${what}/s`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return MISSING;
  if (seconds < 0.9995) return `${Math.round(seconds * 1e3)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
}

/**
 * How long ago a Unix time was, in whole seconds, minutes, hours or days: each change of a text costs a frame.
 * interval_s: how often the text is written. Seconds that stand still would look as if nothing happened.
 */
export function ago(unixTime, now, interval_s = 1) {
  if (!isNumber(unixTime)) return MISSING;
  const seconds = Math.max(0, now - unixTime);
  if (interval_s > 1 && seconds < 2 * interval_s) return "seconds ago";
  return seconds < 1 ? "now" : `${duration(Math.floor(seconds)).replace(".0", "").split(" ", 2).join(" ")} ago`;
}

/** Local date and time. */
export function moment(unixTime) {
  const date = new Date(isNumber(unixTime) ? unixTime * 1e3 : NaN);
  return isNumber(date.getTime()) ? dated.format(date) : MISSING;
}

/** A value of x: the axis is "step", "epoch" or "time". */
export function axisValue(axis, value) {
  if (axis === "time") return duration(value);
  return axis === "epoch" ? `epoch ${Number(value.toFixed(3))}` : `step ${count(value)}`;
}

/** A setting's value as text. */
export function setting(value) {
  if (value === undefined) return MISSING;
  return typeof value === "string" ? value : JSON.stringify(value);
}
