"""A self-contained HTML page about a plan, for `commplan report`: ops, times, choices and proofs.

`document` defines the JSON document for the page. `gather` creates it, with one module for each part
(`graph`, `choices`, `timeline`, `trace`, `recorded`, `machine`), and `page` combines it with the files in
`assets`. All data is computed elsewhere: drawings in `explain.graph`, times in `cost`, proofs in `commplan
verify`.

A panel consists of a struct in `document`, a function in this package that fills it, and a function in
`assets/panels.js` that draws it into a section of `assets/page.html`. `assets/graph.js` and
`assets/timeline.js` are reusable components that do not depend on the page; their headers document their
inputs. Texts of plans are transferred as JSON and inserted as text, never as markup.

Only the command imports this package.
"""
