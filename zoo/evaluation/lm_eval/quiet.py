"""lm-eval without its progress output, since `evaluate` has a progress bar."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import datasets
import lm_eval.api.task


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the ``with`` block lm-eval logs errors only: it warns of every default that its tasks rely on."""
    log, bars = logging.getLogger("lm_eval"), not datasets.are_progress_bars_disabled()
    level = log.level
    log.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with mock.patch.object(lm_eval.api.task, "tqdm", _plain):
            yield
    finally:
        log.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


def _plain(items: Iterable[Any], **_: Any) -> Iterable[Any]:
    return items
