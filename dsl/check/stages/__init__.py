"""Stages, a file for those that are alike: what each takes, what it makes of a placement, what it binds."""
