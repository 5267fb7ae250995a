import numpy as np
import pandas as pd
import pytest

from indpriv import ExampleTable, InputError
from indpriv.analysis.comparison import compare_tables
from synthetic import epsilon_table, rows

SEX = ["m"] * 12 + ["f"] * 8
FIRST = np.linspace(0.1, 2.0, 20)


def examples(**changes):
    train = rows("train", [0, 1] * 10, sex=SEX)
    test = rows("test", [0, 1] * 4, sex=["m"] * 4 + ["f"] * 4, correct=[True] * 6 + [False] * 2)
    return ExampleTable(pd.concat([train.assign(**changes), test], ignore_index=True))


def test_who_is_better_off():
    second = FIRST.copy()
    second[:12] *= 0.5
    second[19] += 0.3
    found = compare_tables(
        (epsilon_table(FIRST), examples()),
        (epsilon_table(second, worst_case=3.0), examples()),
        ["sex"],
    )
    assert (found["overall"].n, found["overall"].share_better, found["overall"].share_worse) == (
        20,
        0.6,
        0.05,
    )
    assert found["largest_increase"] == pytest.approx(0.3)
    assert found["largest_decrease"] == pytest.approx(FIRST[11] / 2)
    women, men = found["groups"][0]["rows"].itertuples()  # most worsened first
    assert (women.name, men.name) == ("f", "m")
    assert women.mean_second - women.mean_first == pytest.approx(0.3 / 8)
    assert men.mean_second == pytest.approx(FIRST[:12].mean() / 2)
    assert (women.too_small, men.too_small) == (True, False)
    assert (women.accuracy_first, men.accuracy_first) == (0.5, 1.0)
    assert found["spearman"] == pytest.approx(
        pd.Series(FIRST).corr(pd.Series(second), method="spearman")
    )


def test_the_same_audit_twice():
    found = compare_tables(
        (epsilon_table(FIRST), examples()), (epsilon_table(FIRST), examples()), ["label", "sex"]
    )
    assert found["spearman"] == pytest.approx(1.0)
    assert (found["largest_increase"], found["largest_decrease"]) == (0.0, 0.0)
    assert all(
        row.share_better == row.share_worse == 0
        for group in found["groups"]
        for row in group["rows"].itertuples()
    )


def test_examples_are_matched_by_id():
    shuffled = np.random.default_rng(0).permutation(20)
    other = epsilon_table(FIRST[shuffled], ids=shuffled)
    found = compare_tables((epsilon_table(FIRST), examples()), (other, examples()), [])
    assert found["largest_increase"] == 0
    assert found["pearson"] == pytest.approx(1.0)


def test_labels_may_have_names_in_one_audit_only():
    named = ExampleTable(
        examples().frame.assign(label=lambda frame: frame["label"].map({0: "poor", 1: "rich"}))
    )
    found = compare_tables(
        (epsilon_table(FIRST), named), (epsilon_table(FIRST), examples()), ["label"]
    )
    assert set(found["groups"][0]["rows"]["name"]) == {"poor", "rich"}
    accuracies = found["groups"][0]["rows"][["accuracy_first", "accuracy_second"]]
    assert (accuracies == 0.75).all(axis=None)


@pytest.mark.parametrize(
    ("table", "other", "words"),
    [
        (
            epsilon_table(FIRST, delta=1e-6),
            examples(),
            "delta is 1e-05 in the first audit and 1e-06",
        ),
        (
            epsilon_table(FIRST, accountant="pld"),
            examples(),
            "accountant is 'rdp' in the first audit and 'pld'",
        ),
        (epsilon_table(FIRST, ids=np.arange(1, 21)), examples(), "id 0 is in the first only"),
        (epsilon_table(FIRST[:19]), examples(), "20 in the first and 19 in the second"),
        (
            epsilon_table(FIRST),
            examples(label=[1, 1, 0, 0] * 5),
            "label differs between the audits for",
        ),
        (
            epsilon_table(FIRST),
            examples(sex=["m"] * 11 + ["f"] * 9),
            "sex differs between the audits for 1 examples",
        ),
    ],
)
def test_audits_that_cannot_be_compared(table, other, words):
    with pytest.raises(InputError) as error:
        compare_tables((epsilon_table(FIRST), examples()), (table, other), [])
    assert words in str(error.value)
