"""Tables of rows that are made when they are first needed, here and in other processes."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from indpriv._row_tables import RowTables


def sent(tables):
    """A copy in another process, whose arrays cannot be written, as in Ray's object store."""
    buffers = []
    content = pickle.dumps(tables, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(content, buffers=[bytes(buffer.raw()) for buffer in buffers])


class Squares:
    """Makes squares of rows, and notes of which."""

    def __init__(self):
        self.made = []

    def __call__(self, rows):
        self.made += rows.tolist()
        return (np.square(rows, dtype=float),)


def needed(*rows):
    return np.isin(np.arange(4), rows)


def test_tables_that_were_sent_are_filled_further_without_the_first_ones():
    here, there, tables = Squares(), Squares(), RowTables(4)
    tables.rows("square", needed(1, 3), here)
    copy = sent(tables)
    (before,) = copy.rows("square", needed(3), there)
    assert there.made == []
    assert before.tolist() == [0, 1, 0, 9]
    assert copy.rows("square", needed(2, 3), there)[0].tolist() == [0, 1, 4, 9]
    assert there.made == [2]
    assert before.tolist() == [0, 1, 0, 9]  # whoever reads it still may
    assert tables.rows("square", needed(2), here)[0].tolist() == [0, 1, 4, 9]
    assert here.made == [1, 3, 2]


def test_a_table_that_is_being_filled_is_sent_when_it_is_full():
    tables, there = RowTables(4), Squares()
    tables.rows("square", needed(1), Squares())
    with ThreadPoolExecutor() as pool:
        copies = []

        def make(rows):
            copies.append(pool.submit(sent, tables))
            with pytest.raises(TimeoutError):
                copies[0].result(0.05)
            return Squares()(rows)

        tables.rows("square", needed(2), make)
        copies[0].result().rows("square", needed(1, 2, 3), there)
    assert there.made == [3]


def test_tables_are_added_where_there_are_none():
    tables, others, own = RowTables(4), RowTables(4), Squares()
    tables.rows("here", needed(0, 1), own)
    others.rows("here", needed(3), Squares())
    others.rows("there", needed(3), Squares())
    tables.add(sent(others))
    assert tables.rows("there", needed(3), own)[0].tolist() == [0, 0, 0, 9]
    assert tables.rows("here", needed(0, 1), own)[0].tolist() == [0, 1, 0, 0]
    assert own.made == [0, 1]
