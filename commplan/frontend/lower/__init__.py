"""The plan graph, with sizes and shapes, becomes a schedule without any choice being made.

`stages` walks through the phases, `server_ops` lowers what workers exchange with servers, and `builder`
collects the ops and values of the phase at hand. A new stage verb is lowered in `stages`.
"""
