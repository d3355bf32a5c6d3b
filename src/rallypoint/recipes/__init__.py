"""The pages: one training step for each recipe, and `loop`, the frame of all of them.

Must not know: processes, devices, formulas; a page calls roles and algorithms by name.
"""
