"""What `import rallypoint` offers: training from Python, and the runs that it leaves; and every start of a run.

Must not know: the command line. `rallypoint/__init__.py` imports a module of it when one of its names is first used.
"""
