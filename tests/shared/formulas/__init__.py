"""The formulas of the papers, token by token, in plain Python floats: what `rallypoint.algorithms` is compared with."""
