"""Decoded records that are read again: the command and a member."""
