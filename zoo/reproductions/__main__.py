"""`python -m zoo.reproductions` writes docs/reproductions.md."""

from zoo.reproductions.page import PAGE, page
from zoo.reproductions.read import read_papers

PAGE.write_text(page(read_papers()), encoding="utf-8")
