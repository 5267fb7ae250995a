from pydoc_data.topics import topics

import numpy as np

from audits.training.datasets.topics import CONTEXT, load


def test_rows_are_pieces_of_their_topic_and_continue_with_the_target():
    dataset = load()
    assert dataset.train.inputs.shape == (4000, CONTEXT)
    assert dataset.test.inputs.shape == (1000, CONTEXT)
    characters = [" " if name == "space" else name for name in dataset.class_names]
    for split in (dataset.train, dataset.test):
        for row in (0, 17, len(split) - 1):
            symbols = [*split.inputs[row].astype(int), split.targets[row]]
            piece = "".join(characters[symbol] for symbol in symbols)
            topic, kind = split.metadata.loc[row, ["topic", "next"]]
            text = "".join(c if c in characters else " " for c in topics[topic].lower())
            assert piece in " ".join(text.split())
            assert kind == {True: "letter", False: kind}[piece[-1].isalpha()]
    assert set(dataset.train.metadata["next"]) == {"letter", "space", "digit", "punctuation"}


def test_no_row_is_in_both_splits():
    dataset = load()
    rows = np.concatenate([dataset.train.inputs, dataset.test.inputs])
    assert len(np.unique(rows, axis=0)) > 0.97 * len(rows)  # some sentences are in several topics
