"""The tests. OpenBLAS reads this when NumPy is imported: its threads would wait for cores that other workers hold."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
