"""Lower the plan graph, with sizes and shapes, to a schedule, without making any choices.

`stages` visits the phases, `server_ops` lowers the traffic between workers and servers, and `builder`
collects the ops and values of a phase. Lower new stage verbs in `stages`.
"""
