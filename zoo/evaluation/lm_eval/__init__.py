"""lm-eval's tasks for models of the zoo, from local files; and models of the zoo for lm-eval.

Nothing here imports lm-eval, an optional package, before a task of it is used.
"""
