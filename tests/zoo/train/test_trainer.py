"""The first of several signals ends a run, with its exit code."""

import os
import signal
from types import SimpleNamespace

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from zoo.train.trainer import Signals


@pytest.fixture
def signals() -> Signals:
    """Handlers of a run that stops between two steps."""
    found = Signals(SimpleNamespace())
    found.noted = True
    return found


@pytest.mark.parametrize(
    ("received", "code"),
    [
        ((signal.SIGTERM,), 143),
        ((signal.SIGTERM, signal.SIGHUP), 143),
        ((signal.SIGHUP, signal.SIGTERM, signal.SIGTERM), 129),
    ],
)
def test_the_first_signal_decides(received: tuple[signal.Signals, ...], code: int, signals: Signals, capfd):
    for number in received:
        signals._note(number, None)
    assert signals.wish == received[0]
    error = signals.end(signals.wish)
    assert isinstance(error, SIGTERMException)
    assert error.code == code
    assert signals.received_sigterm
    assert capfd.readouterr().err == "\nStopping when this step is done and saved.\n"  # once


def test_a_second_ctrl_c_stops_immediately(signals: Signals, capfd):
    signals._note(signal.SIGINT, None)
    assert isinstance(signals.end(signals.wish), KeyboardInterrupt)
    assert not signals.received_sigterm
    assert "Ctrl-C again stops immediately" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        signals._note(signal.SIGINT, None)
    signals._note(signal.SIGTERM, None)
    assert signals.wish == signal.SIGINT


def test_between_runs_signals_raise(signals: Signals):
    signals.noted = False
    with pytest.raises(KeyboardInterrupt):
        signals._note(signal.SIGINT, None)
    with pytest.raises(SIGTERMException) as caught:
        signals._note(signal.SIGHUP, None)
    assert caught.value.code == 129


def test_a_data_worker_leaves_the_decision_to_its_parent(signals: Signals):
    signals._process = os.getpid() + 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signals._note(number, None)
    assert signals.wish is None
