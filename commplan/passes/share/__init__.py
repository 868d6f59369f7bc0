"""share: what is the same for all members of an ensemble is made once, then moved.

`share` is the pass; `frontier` finds where members part, `cost` asks what each design costs on `machine`.
"""
