"""How the page looks: dark and light as the reader's system is, and readable in a narrow window."""

CSS = """\
:root {
  color-scheme: light dark;
  --ground: #fbfaf7; --card: #ffffff; --ink: #1c2321; --soft: #5c6764; --edge: #dcdfd9; --track: #eceee8;
  --training: #3f8f7b; --snapshot: #1f4e9c; --fault: #c43d2b; --down: #8b8f96; --restore: #e0a43a;
  --good: #1e6f50; --bad: #b3261e; --unsure: #8a5a00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #141817; --card: #1d2322; --ink: #e7ece9; --soft: #9aa6a2; --edge: #333c39; --track: #29312f;
    --training: #4da48d; --snapshot: #8fb8ff; --fault: #ff7a66; --down: #6d7480; --restore: #edb95a;
    --good: #6fd3a7; --bad: #ff8a7d; --unsure: #f0bd62;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 2rem; line-height: 1.15; }
h2 { margin: 0 0 .75rem; font-size: 1.2rem; }
h3 { margin: 1.25rem 0 .5rem; font-size: 1rem; }
header p { margin: .5rem 0; max-width: 46rem; }
.kicker { color: var(--soft); font-size: .85rem; letter-spacing: .04em; }
.verdict { border-left: .35rem solid; padding: .5rem .9rem; font-weight: 600; background: var(--card);
  border-radius: .25rem; }
.verdict::first-letter { text-transform: uppercase; }
.verdict.held, .outcome.held { color: var(--good); }
.verdict.broken, .outcome.broken { color: var(--bad); }
.verdict.unproved, .outcome.not-judged { color: var(--unsure); }
.facts { color: var(--soft); display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; }
.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem;
  margin: 1.25rem 0 0;
}
.figures div, section { background: var(--card); border: 1px solid var(--edge); border-radius: .5rem; }
.figures div { padding: .6rem .8rem; }
.figures dt { color: var(--soft); font-size: .85rem; line-height: 1.3; }
.figures dd { margin: .15rem 0 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
section { margin-top: 1.25rem; padding: 1rem; }
section > p { margin: 0; color: var(--soft); }
.legend {
  list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: 0 0 1rem; padding: 0;
  font-size: .875rem;
}
.legend li { display: flex; align-items: center; gap: .4rem; }
.swatch { width: 1rem; height: .8rem; border-radius: .15rem; }
.row { display: grid; grid-template-columns: 5rem minmax(0, 1fr); align-items: center; margin: .35rem 0; }
.row .name { font-size: .875rem; color: var(--soft); }
.row > div { position: relative; }
.track { height: 1.6rem; background: var(--track); border-radius: .25rem; overflow: hidden; }
.track i, .track b { position: absolute; top: 0; bottom: 0; }
.track i { min-width: 2px; }
.track i.snapshot { top: 55%; }
.track i.fault { bottom: 55%; }
.track b { width: 0; border-left: 2px dashed var(--fault); margin-left: -1px; }
.training { background: var(--training); }
.snapshot { background: var(--snapshot); }
.fault { background: var(--fault); }
.down { background: repeating-linear-gradient(45deg, var(--down) 0 4px, transparent 4px 8px), var(--track); }
.restore { background: var(--restore); }
.number { display: inline-grid; place-items: center; min-width: 1.2rem; height: 1.2rem; padding: 0 .2rem;
  border-radius: .6rem; background: var(--fault); color: var(--ground); font-size: .75rem; font-weight: 700;
  line-height: 1; }
.chips .number { position: absolute; transform: translateX(-50%); }
.axis > div { height: 1.2rem; }
.axis div span {
  position: absolute; transform: translateX(-50%); white-space: nowrap; font-size: .8rem; color: var(--soft);
  font-variant-numeric: tabular-nums;
}
.axis div span:first-child { transform: none; }
table { width: 100%; border-collapse: collapse; }
th { text-align: left; font-size: .85rem; font-weight: 600; color: var(--soft); padding: 0 .75rem .35rem 0; }
td { vertical-align: top; padding: .6rem .75rem .6rem 0; border-top: 1px solid var(--edge); }
td:first-child { white-space: nowrap; width: 11rem; }
td:nth-child(2) { width: 40%; }
td:last-child { padding-right: 0; }
.outcome { font-weight: 600; }
.attacked {
  font-size: .75rem; border: 1px solid var(--fault); color: var(--fault); border-radius: .6rem;
  padding: 0 .4rem; white-space: nowrap;
}
code, pre { font: .82rem/1.5 ui-monospace, monospace; }
code { display: block; }
pre { overflow-x: auto; margin: .75rem 0 0; }
summary { cursor: pointer; }
details ul { margin: .75rem 0 0; padding-left: 1.2rem; font-size: .9rem; }
.timeline + details { margin-top: 1rem; }
figure { margin: 0; }
svg { display: block; width: 100%; height: 7rem; background: var(--track); border-radius: .25rem; }
svg .area { fill: var(--training); opacity: .25; }
svg .line { fill: none; stroke: var(--training); stroke-width: 2; vector-effect: non-scaling-stroke; }
figcaption {
  display: flex; justify-content: space-between; gap: .5rem; color: var(--soft); font-size: .8rem;
  margin-top: .25rem;
}
.bars { margin: 0; }
.bars div { display: grid; grid-template-columns: minmax(7rem, 14rem) minmax(0, 1fr); gap: .75rem; margin: .35rem 0; }
.bars dt { font-size: .9rem; }
.bars dd {
  margin: 0; display: flex; align-items: center; gap: .5rem; font-size: .9rem;
  font-variant-numeric: tabular-nums;
}
.bar { height: .8rem; background: var(--fault); border-radius: .15rem; }
@media (max-width: 40rem) {
  h1 { font-size: 1.6rem; }
  main { padding: 1rem .75rem 3rem; }
  section { padding: .8rem; }
  .row { grid-template-columns: minmax(0, 1fr); margin: .5rem 0; }
  .chips .name { display: none; }
  thead { display: none; }
  tr { display: block; border-top: 1px solid var(--edge); padding: .6rem 0; }
  td, td:first-child, td:nth-child(2) {
    display: block; width: auto; white-space: normal; border: 0; padding: .15rem 0;
  }
  .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .bars div { grid-template-columns: minmax(0, 1fr); gap: 0; }
}
"""
