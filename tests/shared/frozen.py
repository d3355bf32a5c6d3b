"""Imported last in the process that others are forked from: a collection of garbage in them leaves its pages alone."""

import gc

gc.collect()
gc.freeze()
