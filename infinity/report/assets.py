"""Style and script of a run's page: they follow the reader's light or dark, and are written into it."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark;
  --ink: #1c2128; --soft: #57606a; --paper: #ffffff; --raised: #f6f8fa; --line: #d0d7de; --accent: #0b6bcb;
  --bad: #b42318; --bad-paper: #fef3f2 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa5b1; --paper: #0f1318; --raised: #171c22; --line: #30363d; --accent: #6cb6ff;
    --bad: #ff9a8f; --bad-paper: #2b1715 }
}
* { box-sizing: border-box }
html { scroll-padding-top: 3.5rem }
body { margin: 0 auto; max-width: 76rem; padding: 0 1rem 3rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums }
h1 { font-size: 1.6rem; margin: 1.25rem 0 0; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .25rem }
a { color: var(--accent); text-underline-offset: .2em } p { color: var(--soft); margin: .25rem 0 .6rem }
a:focus-visible, figure:focus-visible, pre:focus-visible, summary:focus-visible, .scroll:focus-visible {
  outline: 2px solid var(--accent); outline-offset: 2px; border-radius: .25rem }
nav { position: sticky; top: 0; z-index: 2; display: flex; gap: .25rem 1rem; overflow-x: auto; white-space: nowrap;
      padding: .6rem 0; background: var(--paper); border-bottom: 1px solid var(--line) }
nav a { text-decoration: none } nav a:hover { text-decoration: underline }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1rem 0 }
dl div { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .75rem; background: var(--raised) }
dt { color: var(--soft); font-size: .85rem } dd { margin: 0; font-size: 1.15rem; overflow-wrap: anywhere }
figure { box-sizing: content-box; margin: 0; border: 1px solid var(--line); border-radius: .5rem; overflow: hidden }
.notice { border: 1px solid var(--bad); border-radius: .5rem; background: var(--bad-paper); padding: .6rem .9rem;
          margin: 1rem 0; overflow-wrap: anywhere }
.notice strong { color: var(--bad) } .notice p { color: var(--ink); white-space: pre-wrap; margin: .25rem 0 }
.time { display: flex; height: 1.4rem; border-radius: .35rem; overflow: hidden; margin: .5rem 0;
        background: var(--line) }
.time span { min-width: 1px } .key { display: inline-block; width: .8em; height: .8em; border-radius: .2em;
        margin-right: .45em }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--soft); font-weight: 600; font-size: .85rem }
td:first-child { white-space: nowrap }
td.number, th.number { text-align: right; white-space: nowrap }
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; font-size: .85rem;
      background: var(--raised) }
summary { cursor: pointer } details { margin: .5rem 0 } ul { margin: .25rem 0; padding-left: 1.2rem }
@media (max-width: 37.5rem) { /* the last column, which is words, goes below its row */
  th, td { padding: .3rem .25rem; font-size: .8rem } td:first-child { white-space: normal }
  table.words tr { display: grid; grid-template-columns: 1fr 5rem 5.7rem; border-bottom: 1px solid var(--line) }
  table.words :is(th, td) { border: 0 } table.words th:last-child { display: none }
  table.words td:last-child { grid-column: 1 / -1; color: var(--soft); padding-top: 0 }
  table.words td:last-child:empty { display: none }
}
@media print { nav { display: none } figure { break-inside: avoid } }
"""
# Colours follow the page; keys move and zoom a figure that has the focus, and the wheel zooms only there: elsewhere it
# scrolls the page.
SCRIPT = """
const root = getComputedStyle(document.documentElement);
const colour = name => root.getPropertyValue(name).trim();
const isAxis = name => /^[xy]axis[0-9]*$/.test(name);
function look(layout, width) {
  const narrow = width < 600;
  const ink = colour('--ink'), line = colour('--line'), soft = colour('--soft');
  const result = Object.assign({}, layout, {
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', autosize: true, dragmode: 'pan',
    font: {color: ink, family: 'system-ui, sans-serif', size: narrow ? 10 : 12},
    margin: {l: narrow ? 44 : 60, r: narrow ? 10 : 20, t: 20, b: 60}, hoverlabel: {namelength: -1},
    legend: Object.assign({orientation: 'h', x: 0, y: 1.02, yanchor: 'bottom'},
      narrow ? {entrywidth: 0.48, entrywidthmode: 'fraction'} : {}),
    shapes: (layout.shapes || []).map(
      one => Object.assign({}, one, {line: Object.assign({}, one.line, {color: soft, width: 1})})),
    annotations: (layout.annotations || []).map(
      one => Object.assign({}, one, {font: Object.assign({}, one.font, {color: soft})})),
  });
  for (const name of new Set(['xaxis', 'yaxis', ...Object.keys(layout).filter(isAxis)]))
    result[name] = Object.assign({}, layout[name], {gridcolor: line, zerolinecolor: line, linecolor: line});
  return result;
}
const figures = JSON.parse(document.getElementById('figures').textContent);
function draw() {
  for (const [name, figure] of Object.entries(figures)) {
    const place = document.getElementById(name);
    Plotly.react(place, figure.data, look(figure.layout, place.clientWidth), figure.config);
  }
}
draw();
const sizes = new ResizeObserver(entries => entries.forEach(entry => Plotly.Plots.resize(entry.target)));
for (const name of Object.keys(figures)) {
  const place = document.getElementById(name);
  sizes.observe(place);
  place.addEventListener('pointerdown', () => place.focus({preventScroll: true}), {capture: true});
  place.addEventListener('wheel', event => {
    if (document.activeElement !== place) event.stopPropagation();
  }, {capture: true, passive: true});
}
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
document.addEventListener('keydown', event => {
  const figure = document.activeElement;
  if (!figure || figure.tagName !== 'FIGURE' || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === 'Escape') { figure.blur(); return; }
  const [from, to] = figure._fullLayout.xaxis.range, width = to - from;
  const moves = {ArrowLeft: [-.1, -.1], ArrowRight: [.1, .1], '+': [.1, -.1], '=': [.1, -.1], '-': [-.15, .15]};
  const change = moves[event.key];
  if (event.key === '0') { Plotly.relayout(figure, {'xaxis.autorange': true}); event.preventDefault(); }
  if (!change) return;
  Plotly.relayout(figure, {'xaxis.range': [from + change[0] * width, to + change[1] * width]});
  event.preventDefault();
});
"""
