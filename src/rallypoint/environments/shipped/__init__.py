"""The reward functions that ship: answers compared with the truth, the form of a response, code by its tests.

Must not know: batches, tensors, processes. Each is called as a user's function is, in a process that may be ended, and
needs the standard library only; what else one needs is imported when it is first called.
"""
