"""Which training rows [data] leaves: nested shares, and who is left out."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from audits.training.config import AuditConfig, DataConfig
from audits.training.datasets.base import Dataset, Split
from audits.training.datasets.rows import chosen_ids, chosen_rows
from indpriv.errors import InputError

N = 200


@pytest.fixture
def dataset():
    rng = np.random.default_rng(0)
    people = pd.DataFrame(
        {
            "race": rng.choice(["Black", "White", None], N),
            "sex": rng.choice(["f", "m"], N),
            "age_band": np.repeat(np.arange(N // 4), 4),  # four rows of each
        }
    )
    inputs = rng.normal(size=(N, 3)).astype(np.float32)
    train = Split(inputs, rng.integers(0, 2, N), people)
    test = Split(inputs[:5], np.array([0, 1, 0, 1, 0]), people.iloc[:5])
    return Dataset("adult", train, test, ("no", "yes"), "none", "made up")


def data(**keys):
    return DataConfig("adult", **keys)


def test_a_smaller_share_lies_in_a_larger_one(dataset):
    for seed in (None, 1, 7):
        shares = [
            set(chosen_ids(dataset, data(share=share, share_seed=seed)).tolist())
            for share in (0.1, 0.25, 0.5, 1.0)
        ]
        assert [len(one) for one in shares] == [20, 50, 100, 200]
        for small, large in pairwise(shares):
            assert small < large
    first, second = (chosen_ids(dataset, data(share=0.5, share_seed=seed)) for seed in (1, 2))
    assert not np.array_equal(first, second)


def test_a_share_is_of_people_where_people_have_rows(dataset):
    keys = {"share": 0.5, "unit_column": "age_band"}
    kept = chosen_rows(dataset, data(**keys)).train
    assert set(kept.metadata.groupby("age_band").size()) == {4}
    assert len(kept) == N // 2
    capped = chosen_rows(dataset, data(**keys, max_rows_per_unit=1)).train
    assert set(capped.metadata["age_band"]) == set(kept.metadata["age_band"])
    assert len(capped) == N // 8


def test_who_is_left_out(dataset):
    race, targets = dataset.train.metadata["race"], dataset.train.targets
    kept = chosen_ids(dataset, data(without=("race=Black", "label=yes"), without_ids=(0, 3)))
    wanted = (race != "Black").to_numpy() & (targets == 0)
    wanted[[0, 3]] = False
    assert np.array_equal(kept, np.flatnonzero(wanted))
    rows = chosen_rows(dataset, data(without=("race=(missing)",)))
    assert rows.train.metadata["race"].notna().all()
    assert rows.train.metadata.index.equals(pd.RangeIndex(len(rows.train)))
    assert rows.test is dataset.test
    assert chosen_rows(dataset, data()) is dataset


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"without": ("race=Green",)}, r"'race=Green': no training row .* Black, White"),
        ({"without_ids": (N,)}, f"has {N}, and the ids of adult are 0 to {N - 1}"),
        ({"without": ("sex=f", "sex=m")}, "leaves no training row"),
    ],
)
def test_what_is_refused(dataset, keys, message):
    with pytest.raises(InputError, match=message):
        chosen_ids(dataset, data(**keys))


def test_audit_files_that_choose_no_rows_are_as_before():
    tables = {
        "name": "small",
        "data": {"dataset": "adult"},
        "model": {"architecture": "mlp"},
        "training": {"epochs": 1, "batch_size": 128, "learning_rate": 0.5, "max_grad_norm": 1.0},
        "recording": {"every": 1},
        "checkpoints": {"every": "epoch"},
    }
    tables["training"] |= {"delta": 1e-5, "noise_multiplier": 3.0}
    config = AuditConfig.from_dict(tables)
    assert config.to_dict()["data"] == {"dataset": "adult"}  # old runs can go on
    for bad in (
        {"share": 0.0},
        {"share": 1.5},
        {"share_seed": 1},
        {"without": ["race"]},
        {"without": ["eyes=blue"]},
        {"without_ids": [-1]},
    ):
        with pytest.raises(InputError, match=next(iter(bad))):
            AuditConfig.from_dict({**tables, "data": {"dataset": "adult", **bad}})
    assert replace(config.data, share=0.5).chooses
