"""Colours of a plan: what each token is (`categories`), and a lexer for Pygments that says so.

The words come from the lists that the lexer and the checker read.
"""
