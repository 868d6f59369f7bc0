"""The language server: what editors ask of a plan.

`document` holds a text with all that is known of it, and `symbols` which name is which; `completion`,
`hover`, `rename`, `repairs` and `hints` answer questions of (document, line, column) and know nothing of the
protocol. `server` speaks it, by pygls, and `compiled` says what stages become, in a process of its own. Lines
and columns count from 1 in characters, as in diagnostics; `server` alone has the protocol's.
"""
