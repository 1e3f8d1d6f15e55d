"""The report's HTML. `@name@` marks what `report` fills in."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@title@ · training report</title>
<style>
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --plate: #fff; --ink: #1c2733; --muted: #697586; --line: #e3e7ed; --accent: #2f6fde; --good: #0f9b8e;
}
@media (prefers-color-scheme: dark) {
  :root { --page: #12171d; --plate: #1a2129; --ink: #e4e9ef; --muted: #97a3b1; --line: #2b343f; --accent: #7aa7f5;
          --good: #4cc4b8; }
  figure img { filter: invert(.9) hue-rotate(180deg); mix-blend-mode: lighten; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); -webkit-font-smoothing: antialiased;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 28px; line-height: 1.2; letter-spacing: -.015em; margin: 0; display: flex; gap: 12px;
     align-items: center; flex-wrap: wrap; }
h1 small { font-size: 13px; font-weight: 600; letter-spacing: 0; padding: 3px 10px; border-radius: 99px;
           color: var(--accent); border: 1px solid currentColor; }
h1 small.done { color: var(--good); }
h2 { font-size: 18px; letter-spacing: -.01em; margin: 40px 0 12px; }
h3 { font-size: 13px; margin: 0 0 6px; color: var(--muted); font-weight: 600; }
header p { margin: 6px 0 0; color: var(--muted); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 1px; margin: 24px 0;
         background: var(--line); border: 1px solid var(--line); border-radius: 12px; overflow: hidden; }
.cards div { background: var(--plate); padding: 14px 16px; }
.cards b { display: block; font-size: 23px; font-weight: 650; letter-spacing: -.02em; line-height: 1.25;
           font-variant-numeric: tabular-nums; }
.cards span { color: var(--muted); font-size: 12.5px; line-height: 1.35; display: block; }
.plates { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
figure { margin: 0; background: var(--plate); border: 1px solid var(--line); border-radius: 12px;
         padding: 16px 16px 14px; isolation: isolate; }
figure.wide { grid-column: 1 / -1; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: var(--muted); font-size: 13px; line-height: 1.45; margin-top: 10px; max-width: 78ch; }
pre { background: var(--plate); border: 1px solid var(--line); border-radius: 12px; padding: 16px; margin: 0;
      white-space: pre-wrap; overflow-wrap: anywhere; max-height: 420px; overflow-y: auto;
      font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; font-weight: 400; color: var(--muted); padding: 3px 16px 3px 0; vertical-align: top; }
td { text-align: right; padding: 3px 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
tr + tr { border-top: 1px solid var(--line); }
tr.changed th, tr.changed td { color: var(--accent); }
.panel { background: var(--plate); border: 1px solid var(--line); border-radius: 12px; padding: 14px 18px; }
.config { columns: 3 280px; column-gap: 32px; }
.config > div { break-inside: avoid; margin-bottom: 18px; }
.note, .empty { color: var(--muted); font-size: 13px; }
summary { cursor: pointer; font-size: 18px; font-weight: 650; letter-spacing: -.01em; margin: 40px 0 12px; }
@media (max-width: 860px) { .plates { grid-template-columns: 1fr; } main { padding: 24px 16px; } }
@media print { body { background: #fff; } figure, .panel { break-inside: avoid; } }
</style>
<main>
<header>
<h1>@title@ <small class="@done@">@state@</small></h1>
<p>@subtitle@</p>
</header>
<div class="cards">@cards@</div>
<div class="plates">
@plates@
</div>
@sample@
<h2>Run</h2>
<div class="panel">@facts@</div>
<details>
<summary>Config</summary>
<p class="note">Coloured fields differ from the defaults of trillium_moe/config.py.</p>
<div class="panel config">@config@</div>
</details>
</main>
</html>
"""
