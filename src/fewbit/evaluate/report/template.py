"""The frame of a report's page: its styles and its script."""

import base64
import hashlib
from string import Template

MARKER = "<!doctype html>\n<!-- A report of fewbit. -->\n"
"""What every report begins with; a file that does not is never replaced unasked."""

_STYLE = """
:root { color-scheme: light; --back: #ffffff; --text: #1b1f24; --dim: #57606a; --line: #d0d7de; --box: #f6f8fa; --link: #0757ba }
@media screen and (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --back: #14171b; --text: #e4e7eb; --dim: #a3adb8; --line: #3a424c; --box: #1d2228; --link: #7cb7ff }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
header, main { max-width: 76rem; margin: 0 auto; padding: 0 1rem }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 1.5rem 0 .5rem }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem }
h4 { font-size: .9rem; margin: 0; overflow-wrap: anywhere }
p, ul { margin: .5rem 0; max-width: 50rem }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; max-width: none }
a { color: var(--link) }
code { font: .9em ui-monospace, monospace }
.dim { color: var(--dim); font-size: .875rem }
.box { overflow-x: auto; max-width: 100%; border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0 }
.tall { max-height: 36rem; overflow-y: auto }
.box:focus-visible, a:focus-visible, summary:focus-visible, input:focus-visible, select:focus-visible {
  outline: 2px solid var(--link); outline-offset: 1px }
.chart { padding: .5rem; width: fit-content }
svg { display: block }
svg * { stroke-linejoin: round; stroke-linecap: butt }
svg text { font-family: system-ui, sans-serif !important }
table { border-collapse: collapse; font-size: .875rem; min-width: 100% }
th, td { padding: .3rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); overflow-wrap: normal }
thead th { background: var(--box); position: sticky; top: 0; vertical-align: bottom; min-width: 4.75rem }
tbody tr:last-child > * { border-bottom: 0 }
tbody th { font-weight: normal }
.number { text-align: right; font-variant-numeric: tabular-nums }
td.number { white-space: nowrap }
.path { font-family: ui-monospace, monospace; font-size: .8125rem; white-space: nowrap }
.model { min-width: clamp(9rem, 18vw, 14rem); overflow-wrap: anywhere }
.why { min-width: 12rem }
.histograms { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 23rem), 1fr)); gap: .75rem; margin: .5rem 0 }
figure { margin: 0; padding: .75rem; border: 1px solid var(--line); border-radius: 6px; min-width: 0 }
figcaption { font-size: .8125rem; color: var(--dim) }
figure svg, .fitted svg { max-width: 100%; height: auto }
.histograms figure .box { border: 0; margin: 0; padding: 0 }
.find { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: end }
.find label { display: grid; grid-template-columns: minmax(0, 1fr); gap: .15rem; font-size: .875rem; max-width: 100% }
input, select { font: inherit; color: inherit; background: var(--back); border: 1px solid var(--dim); border-radius: 4px;
  padding: .3rem .5rem; min-width: 0; width: 16rem; max-width: 100% }
#weight { width: 30rem }
#chosen { margin: .5rem 0; scroll-margin-top: 13rem }
#chosen:focus-visible { outline: 2px solid var(--link); outline-offset: 1px }
#chosen svg { width: 100%; height: 15rem; margin-top: .5rem }
#chosen text { fill: currentColor; font-size: 12px; text-anchor: middle }
#chosen .bars { fill: #3987c9; opacity: .8 }
#chosen .grid { fill: none; stroke: currentColor; stroke-width: .8 }
tr[data-weight] { cursor: pointer }
tr[data-weight]:hover { background: var(--box) }
summary { cursor: pointer; padding: .25rem 0 }
@media print {
  .box { overflow: visible; border: 0 } .tall { max-height: none } thead th { position: static } nav, .find { display: none }
  svg { max-width: 100%; height: auto } figure, tr { break-inside: avoid } .path { white-space: normal }
  table, table .dim { font-size: .65rem } th, td { padding: .15rem .3rem; min-width: 0 !important } h2, h3 { break-after: avoid }
}
"""

_SCRIPT = """
const search = document.getElementById("search"), filter = document.getElementById("filter");
const shown = document.getElementById("shown");
const rows = Array.from(document.querySelectorAll("tr[data-state]"), row =>
  [row, Array.from(row.cells, cell => cell.textContent).join(" ").toLowerCase()]);
function finder(query) {
  const words = query.toLowerCase().split(" ").filter(word => word);
  return text => words.every(word => text.includes(word));
}
function show() {
  const isFound = finder(search.value);
  let count = 0;
  for (const [row, text] of rows) {
    const fits = (filter.value === "all" || filter.value === row.dataset.state) && isFound(text);
    row.hidden = !fits;
    count += fits;
  }
  shown.textContent = `${count} of ${rows.length} tensors`;
}
const {models, lines, grids, weights} = JSON.parse(document.getElementById("weights").textContent);
const [weightSearch, list, found, caption, chart] =
  ["weight-search", "weight", "weights-found", "chosen-caption", "chosen-chart"].map(id => document.getElementById(id));
let chosen = 0;
function draw() {
  const [, , , , grid, low, high, code] = weights[chosen], numbers = grids[grid];
  const heights = Uint8Array.from(atob(code), letter => letter.charCodeAt(0));
  const {width, height} = chart.getBoundingClientRect(), margin = 16, floor = height - 40;
  const x = value => (margin + (value - low) / (high - low) * (width - 2 * margin)).toFixed(2);
  const edge = i => x(low + i / heights.length * (high - low));
  const bars = Array.from(heights, (bin, i) => `V${(floor * (1 - bin / 255)).toFixed(2)}H${edge(i + 1)}`).join("");
  const top = numbers.length > lines ? .92 * floor : 0;
  const least = (high - low) * 44 / (width - 2 * margin), power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(step => step >= least);
  let text = "";
  for (let i = Math.ceil(low / step); i * step <= high; i++) {
    text += `<text x="${x(i * step)}" y="${floor + 16}">${+(i * step).toPrecision(6)}</text>`;
  }
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.innerHTML = `<path class="bars" d="M${x(low)} ${floor}${bars}V${floor}Z"/>` +
    `<path class="grid" d="M${x(low)} ${floor}H${x(high)}${numbers.map(number => `M${x(number)} ${floor}V${top}`).join("")}"/>` +
    `${text}<text x="${width / 2}" y="${height - 6}">weight / block scale</text>`;
}
function offer() {
  const isFound = finder(weightSearch.value), groups = models.map(() => []);
  for (const [i, [model, path, stored]] of weights.entries()) {
    if (isFound(`${models[model]} ${path} ${stored}`.toLowerCase())) groups[model].push(new Option(path, i));
  }
  list.replaceChildren(...groups.flatMap((options, model) => {
    if (models.length === 1 || !options.length) return options;
    const group = document.createElement("optgroup");
    group.label = models[model];
    group.append(...options);
    return [group];
  }));
  found.textContent = `${list.options.length} of ${weights.length} weights`;
}
function choose(index) {
  if (!weights[index]) return;
  chosen = index;
  list.value = index;
  if (list.selectedIndex < 0) {
    weightSearch.value = "";
    offer();
    list.value = index;
  }
  const [model, path, stored, details] = weights[index];
  caption.textContent = `${models.length > 1 ? `${models[model]}, ` : ""}${path}: ${stored}, ${details}`;
  draw();
}
if (weights.length) {
  document.getElementById("chooser").hidden = false;
  offer();
  choose(0);
  weightSearch.addEventListener("input", () => {
    offer();
    list.value = chosen;
    if (list.selectedIndex < 0 && list.options.length) choose(list.options[0].value);
  });
  list.addEventListener("change", () => choose(list.value));
  addEventListener("resize", draw);
  document.addEventListener("click", event => {
    const row = event.target.closest("tr[data-weight]");
    if (!row) return;
    if (event.target.closest("a")) choose(row.dataset.weight);
    else if (getSelection().isCollapsed) row.querySelector("a").click();
  });
}
function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.has("q")) search.value = given.get("q");
  if (given.has("show")) filter.value = given.get("show");
  show();
  if (given.has("weight")) {
    choose(weights.findIndex(([, path]) => path === given.get("weight")));
    document.getElementById("chosen").scrollIntoView();
  }
}
search.addEventListener("input", show);
filter.addEventListener("change", show);
addEventListener("hashchange", readHash);
readHash();
"""

_PAGE = Template("""\
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="$policy">
<title>$title</title>
<link rel="icon" href="data:,">
<style>$style</style>
</head>
<body>
$body
<script type="application/json" id="weights">$data</script>
<script>$script</script>
</body>
</html>
""")


def framed(title: str, body: str, data: str) -> str:
    """The page of a body: with its styles, the search of its rows and the chart of a chosen weight.

    Args:
        title: the title, escaped.
        body: the body, as HTML.
        data: the result of `histogram_data`.

    Returns:
        The page, which begins with `MARKER`. Browsers run no script but its own, and load nothing.
    """
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    return MARKER + _PAGE.substitute(policy=policy, title=title, style=_STYLE, body=body, data=data, script=_SCRIPT)
