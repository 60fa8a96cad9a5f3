"""lm-eval's tasks for models of the zoo, from local files.

Nothing here imports lm-eval, an optional package, before a task of it is used.
"""
