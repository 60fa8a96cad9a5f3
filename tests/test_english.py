"""The habits of style that `dev/english.py` counts stay within their limits, and it notices each of them."""

from collections import Counter
from pathlib import Path

from dev.english import all_places, exceeded, places


def test_no_habit_exceeds_its_limit():
    counts = Counter((room, habit) for room, _, habit, _, _ in all_places())
    assert exceeded(counts) == {}


def test_each_habit_is_noticed(tmp_path: Path):
    file = tmp_path / "example.py"
    file.write_text(
        '''"""Where it is."""

def find(known):
    """Return what is found at once."""
    found = known
    return found
'''
    )
    assert Counter(places(file)) == Counter(
        [("openings", 1, "Where"), ("names", 3, "known"), ("names", 5, "found"), ("phrases", 4, "at once")]
    )
