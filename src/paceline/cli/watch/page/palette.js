/** Colours that the colour-blind can tell apart (Okabe and Ito, 2008), lightened on dark pages. */

const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#b5578e", "#c98a00", "#3f9fd9", "#6b6f76"];
const DARK = ["#4aa8e8", "#f0813a", "#2cc295", "#dc93bd", "#f0b429", "#8fd0f7", "#a3aab5"];
/** Beyond the colours, the pattern of the line tells curves apart. */
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

/** What a worker does, from the bottom of its lane. */
export const KINDS = [
  {name: "computing", label: "computing"},
  {name: "exchange", label: "exchange"},
  {name: "data", label: "waiting for data"},
  {name: "waiting", label: "waiting for others"},
  {name: "rest", label: "rest"},
];

const STORED = "paceline-theme";
let theme = null;

/** The theme's colours, from the style sheet: canvases cannot use its names. Read once per theme. */
export function colors() {
  if (theme) return theme;
  const probe = document.createElement("i");
  document.body.append(probe);
  const resolve = name => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const names = ["muted", "grid", "accent", "bad", "warn", "good", "lane", ...KINDS.map(kind => `kind-${kind.name}`)];
  theme = new Map(names.map(name => [name, resolve(name)]));
  probe.remove();
  theme.curves = isDark() ? DARK : LIGHT;
  return theme;
}

export const curveColor = index => colors().curves[index % LIGHT.length];
export const curveDash = index => DASHES[Math.floor(index / LIGHT.length) % DASHES.length];

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Calls `changed` when the theme does; `toggleTheme` keeps the choice in this browser. */
export function onTheme(changed) {
  const again = () => {
    theme = null;
    changed();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  document.addEventListener("theme", again);
}

export function toggleTheme() {
  const {dataset} = document.documentElement;
  dataset.theme = isDark() ? "light" : "dark";
  try {
    localStorage.setItem(STORED, dataset.theme);
  } catch {
    /* the choice lasts until the page is closed */
  }
  document.dispatchEvent(new Event("theme"));
}

/** The choice of an earlier visit. A browser may refuse storage, for example to a page from disk. */
export function recallTheme() {
  try {
    const theme = localStorage.getItem(STORED);
    if (theme) document.documentElement.dataset.theme = theme;
  } catch {
    /* as the system has it */
  }
}
