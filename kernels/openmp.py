"""Let idle OpenMP threads sleep soon. Importing this module sets their waiting time, unless the environment does.

PyTorch's threads on a CPU wait for their next task in a busy loop. If other programs need the cores too, the loops
take most of the time: next to four busy programs on two cores, training ran at a fifth of the speed of its fair share.
A shorter wait costs nothing on an idle machine. OpenMP reads these variables when it is loaded, so they must be set
before torch is imported: if torch was imported first, nothing changes. Child processes inherit them.
"""

import os
from collections.abc import MutableMapping

SETTINGS = {
    "GOMP_SPINCOUNT": "2000",  # iterations; libgomp, in PyTorch's wheels for Linux, has 300,000 or endless ones
    "KMP_BLOCKTIME": "1",  # milliseconds; the OpenMP of LLVM and Intel, in other builds, has 200
}


def shorten_waiting(environment: MutableMapping[str, str]) -> None:
    """Set how long idle threads wait, unless the user has chosen it by any of OpenMP's variables."""
    if not {"OMP_WAIT_POLICY", *SETTINGS} & {*environment}:
        environment.update(SETTINGS)


shorten_waiting(os.environ)
