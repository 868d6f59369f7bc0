"""Syntax highlighting of plans: token categories (`categories`) and a lexer for Pygments.

The words are those of the commplan lexer and checker.
"""
