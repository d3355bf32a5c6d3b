"""What one kind of layer does on packed rows: its pass, its cut over ranks, its states; a file each, or a few.

Must not know: other kinds, files, roles.

`attention.py`, `linear_attention.py` (scanned by the kernel in `delta_kernel.py` where there is one), `mlp.py`, and of
mixtures `experts.py` (pass and router), `expert_parallel.py`, `load_balancing.py`, `router_replay.py`. Sizes are those
of `rallypoint.families.kinds`.
"""
