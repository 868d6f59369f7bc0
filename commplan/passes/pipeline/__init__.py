"""The list of passes (`registry`), and pipelines (`manager`).

`python -m commplan.passes.pipeline.reproducer FILE` repeats a failed pass. New passes are added to
`registry`.
"""
