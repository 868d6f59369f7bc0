"""What every pass is (`base`), which there are (`registry`), and how pipelines of them run (`manager`).

`python -m commplan.passes.pipeline.reproducer FILE` runs a pass that failed once more. A new pass is entered
in `registry`.
"""
