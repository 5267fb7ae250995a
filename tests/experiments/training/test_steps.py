import os
import signal
import threading

import pytest

from audits.training.steps import stop_requests
from indpriv.recording.process import deferred_interrupts

pytestmark = pytest.mark.usefixtures("hears_ctrl_c")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request(number):
    before = signal.getsignal(number)
    with stop_requests() as stop_asked:
        assert not stop_asked()
        os.kill(os.getpid(), number)
        assert stop_asked()
    assert signal.getsignal(number) is before


def test_the_second_ctrl_c_acts_at_once():
    with pytest.raises(KeyboardInterrupt), stop_requests() as stop_asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_asked()
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second Ctrl-C was swallowed")


def test_a_signal_that_is_ignored_stays_ignored():
    """As in the background job of a script, which Ctrl-C in the terminal is not meant for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stop_requests() as stop_asked, deferred_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        assert not stop_asked()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_another_thread_nothing_is_installed():
    seen = []

    def work():
        before = signal.getsignal(signal.SIGINT)
        with stop_requests() as stop_asked:
            seen.append((stop_asked(), signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
