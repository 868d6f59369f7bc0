"""Seconds of a whole phase: tasks on lanes (`timeline`, `list_scheduler`), and the trace that shows them.

Collectives that run at once share links in `list_scheduler`; the messages of one in
`network.message_simulation`.
"""
