"""The grammars of editors, written from the lists of the language by `python -m editors.grammars`."""
