"""A self-contained HTML page about a plan, for `commplan report`: what it became, when, why, and proved how.

Python gathers, the page shows. `document` is the typed JSON document between the two, `gather` fills it
from what the other rooms know, one module for each part of it (`graph`, `choices`, `timeline`, `trace`,
`recorded`, `machine`), and `page` puts the document and the files of `assets` into one file. Nothing is
computed twice: drawings come from `explain.graph`, times from `cost`, proofs from `commplan verify`.

A panel is a struct in `document`, a function here that fills it, and a function in `assets/panels.js` that
draws it into a section of `assets/page.html`. `assets/graph.js` and `assets/timeline.js` are components of
their own: they know nothing of the page, and their heads say what they take. Texts of plans reach the page
as JSON and are put there as text, never as markup.

Imported by the command alone.
"""
