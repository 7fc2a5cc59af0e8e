"""The style sheet of a report, for light and dark mode, narrow screens and paper."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #55606f; --line: #d5dae1; --page: #fff; --card: #f5f7f9;
  --chosen: #0b62c4; --default: #9a5b00; --bad: #b3261e; --dot: #5d7a99; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #a3adba; --line: #3a4350; --page: #14181e; --card: #1d232b;
    --chosen: #6db3ff; --default: #f0b35a; --bad: #ff8a80; --dot: #8fa9c4; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 3rem 0 .25rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
p { margin: .25rem 0; max-width: 48rem; overflow-wrap: anywhere; }
a { color: var(--chosen); text-underline-offset: .15em; }
:focus-visible { outline: 2px solid var(--chosen); outline-offset: 2px; }
.soft { color: var(--soft); }
.figures { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; }
.figures div { flex: 1 1 10rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .6rem .85rem; }
.figures dt { color: var(--soft); font-size: .85rem; }
.figures dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .2rem 1.25rem; margin: .75rem 0; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
code, pre { font: .875em/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
code { overflow-wrap: anywhere; }
pre { margin: .4rem 0 1rem; padding: .7rem .85rem; background: var(--card); border: 1px solid var(--line);
  border-left: 4px solid var(--bad); border-radius: .25rem; white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 24rem; overflow: auto; }
.tall { max-height: 32rem; }
.scroll { overflow: auto; border: 1px solid var(--line); border-radius: .5rem; margin: .5rem 0; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .9rem; }
caption { text-align: left; padding: .5rem .65rem; color: var(--soft); position: sticky; left: 0;
  max-width: calc(100vw - 3.5rem); }
th, td { padding: .35rem .65rem; text-align: left; vertical-align: top; border-top: 1px solid var(--line); }
thead th { position: sticky; top: 0; background: var(--card); white-space: nowrap; }
td { overflow-wrap: anywhere; }
.calls :is(th, td):nth-child(n+3):nth-child(-n+7),
.field :is(th, td):is(:first-child, :nth-child(n+3):nth-child(-n+6)) {
  text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.calls td:first-child, .field td:last-child { white-space: nowrap; }
.calls td:nth-child(2) { min-width: 12rem; }
.field td:nth-child(2) { min-width: 16rem; }
.field td:nth-child(2) { font: .95em/1.55 ui-monospace, "DejaVu Sans Mono", monospace; }
tr.chosen td, tr.default td { background: var(--card); font-weight: 600; }
.tag { display: inline-block; border: 1px solid; border-radius: .75rem; padding: 0 .5rem; font-size: .8rem;
  font-weight: 600; white-space: nowrap; }
.tag.chosen { color: var(--chosen); } .tag.default { color: var(--default); } .tag.bad { color: var(--bad); }
figure { margin: 1rem 0; }
figure .plot { overflow-x: auto; }
figcaption { color: var(--soft); font-size: .875rem; }
svg { display: block; width: 100%; min-width: 48rem; height: auto; font: 25px system-ui, sans-serif; fill: var(--ink); }
svg path, svg line { fill: none; stroke: var(--soft); stroke-width: 2; }
svg .axis text { fill: var(--soft); }
svg .grid { stroke: var(--line); }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg .dots { stroke: var(--dot); stroke-width: 11; stroke-linecap: round; stroke-opacity: .45; }
svg .many { stroke-width: 7; }
svg .bars { stroke: var(--ink); stroke-width: 5; }
svg .wrong { stroke: var(--bad); stroke-width: 4; }
svg .mark text { font-weight: 600; }
svg .mark line { stroke-dasharray: 6 6; }
svg .chosen line, svg .default rect { stroke: var(--chosen); }
svg .chosen circle, svg .chosen text { fill: var(--chosen); }
svg .default line, svg .default rect { stroke: var(--default); stroke-width: 4; fill: none; }
svg .default text { fill: var(--default); }
svg .hit { fill: transparent; }
svg .hit:hover { fill: var(--dot); fill-opacity: .2; }
@media (max-width: 40rem) { .facts { grid-template-columns: 1fr; gap: 0; } .facts dd { margin-bottom: .5rem; } }
@media print {
  body { max-width: none; padding: 0; font-size: 9pt; }
  .scroll, pre { max-height: none; overflow: visible; }
  table { font-size: 8pt; }
  caption, thead th { position: static; }
  caption { break-after: avoid; max-width: none; }
  svg { min-width: 0; }
  tr, figure, .figures div { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  a { color: inherit; } }
"""
