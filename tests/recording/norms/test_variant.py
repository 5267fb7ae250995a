import threading

import pytest
import torch

from indpriv.recording.norms.variant import side_by_side


@pytest.fixture(autouse=True)
def four_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(threads)


def test_each_task_has_a_thread_and_its_share_of_the_cores():
    meeting = threading.Barrier(2, timeout=30)  # neither ends before the other has begun

    def task():
        meeting.wait()
        return threading.get_ident(), torch.get_num_threads()

    (one, share), (other, same) = side_by_side([task, task])
    assert one != other
    assert threading.get_ident() not in (one, other)
    assert share == same == 2
    assert torch.get_num_threads() == 4


def test_results_are_in_order_and_one_task_stays_in_this_thread():
    assert side_by_side([lambda i=i: i**2 for i in range(6)]) == [0, 1, 4, 9, 16, 25]
    assert side_by_side([threading.get_ident]) == [threading.get_ident()]


def test_an_error_is_raised_once_all_have_ended():
    ended = []

    def fails():
        raise ValueError("no norm")

    with pytest.raises(ValueError, match="no norm"):
        side_by_side([fails, lambda: ended.append(1)])
    assert ended == [1]
    assert torch.get_num_threads() == 4
