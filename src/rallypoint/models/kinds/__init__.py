"""What one kind of layer does on packed rows: its pass, its cut over ranks, its states; a file each, or a few.

Must not know: other kinds, files, roles. Sizes are those of `rallypoint.families.kinds`.
"""
