"""The style sheet of the report."""

STYLE = """
:root { --ground: #fbfbfa; --card: #fff; --ink: #1b1f24; --soft: #69707a; --edge: #e3e5e8; --faint: #f0f1f3;
  --tone1: #2f6fdb; --tone2: #128a6b; --tone3: #8a55c8; --tone4: #cf3f3a; --good: #e5f5ec; --bad: #fbe6e4;
  --hint: #fdf3d8; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --card: #1b1f25; --ink: #e7eaee; --soft: #98a1ad;
  --edge: #2d333b; --faint: #242931; --tone1: #6ea3ff; --tone2: #41c79e; --tone3: #bb90f2; --tone4: #ff7b72;
  --good: #17372a; --bad: #44211f; --hint: #3b3218; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; }
main { max-width: 1340px; margin: 0 auto; padding: 32px 24px 48px; }
h1 { font-size: 30px; line-height: 1.2; margin: 2px 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 10px; }
header p { margin: 0; color: var(--soft); }
.over { font-size: 13px; letter-spacing: .02em; }
section { margin-top: 24px; }
.banner { margin: 12px 0 0; padding: 9px 14px; border-radius: 8px; background: var(--hint); }
.banner.good { background: var(--good); } .banner.bad { background: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tile { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 12px 16px; }
.tile span { display: block; color: var(--soft); font-size: 13px; } .tile b { font-size: 25px; font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(350px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 10px;
  padding: 14px 14px 6px; }
figcaption { color: var(--soft); font-size: 13px; padding: 0 4px 6px; }
figcaption b { color: var(--ink); font-size: 15px; margin-right: 6px; }
.plot { display: block; width: 100%; height: auto; }
.plot text { font-size: 13px; fill: var(--soft); } .plot .note { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--edge); fill: none; } .grid.faint { stroke: var(--faint); }
.base { stroke: var(--soft); fill: none; }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; } .area { opacity: .16; stroke: none; }
.dot { fill: var(--card); stroke: var(--ink); stroke-width: 2; }
.line.tone1 { stroke: var(--tone1); } .line.tone2 { stroke: var(--tone2); } .line.tone3 { stroke: var(--tone3); }
.line.tone4 { stroke: var(--tone4); } .area.tone1 { fill: var(--tone1); } .area.tone2 { fill: var(--tone2); }
.area.tone3 { fill: var(--tone3); } .area.tone4 { fill: var(--tone4); }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: right; padding: 7px 14px; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; } td:last-child { white-space: normal; }
.few { max-width: 560px; }
@media print { body { background: #fff; } figure, .tile { break-inside: avoid; } }
"""
