"""The commands: they parse and print.

Must not know: how anything is done; a command calls `recipes` and decides nothing.
"""
