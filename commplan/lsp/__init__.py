"""The language server.

`document` stores a text and its analysis, and `symbols` resolves names. `completion`, `hover`, `rename`,
`repairs` and `hints` answer queries (document, line, column) independently of the protocol, which `server`
implements with pygls. `compiled` compiles plans in a separate process. Lines and columns count from 1 in
characters, as in diagnostics; only `server` uses those of the protocol.
"""
