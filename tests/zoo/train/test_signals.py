"""When signals take effect."""

import signal

import pytest

from zoo.train.signals import interrupt_deferred


def test_a_deferred_interrupt_is_delivered_at_the_end():
    done = []

    def record() -> None:
        with interrupt_deferred():
            signal.raise_signal(signal.SIGINT)
            done.append("recorded")
        done.append("after the block")

    with pytest.raises(KeyboardInterrupt):
        record()
    assert done == ["recorded"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
