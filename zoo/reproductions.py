"""`python -m zoo.reproductions` is now `python reproductions/page.py`."""

import sys

if __name__ == "__main__":
    sys.exit("zoo.reproductions has moved; run python reproductions/page.py in a checkout of the repository")
