from fractions import Fraction

import pytest

from indpriv.errors import InputError
from indpriv.release import Budget, Request, parse_budget, parse_quantiles
from indpriv.release.ledger import DEFAULT_QUANTILES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"quantiles": (), "epsilon": 1}, "nothing to release"),
        ({"quantiles": (0.5, 1.0), "epsilon": 1}, r"quantile 1\.0 is not in \(0, 1\)"),
        ({"quantiles": (float("nan"),), "epsilon": 1}, "quantile nan"),
        ({"quantiles": (0.12345,), "epsilon": 1}, "more than 4 decimals"),
        ({"quantiles": (0.5, 0.5), "epsilon": 1}, "listed twice"),
        ({"epsilon": 0}, "epsilon=0 is not"),
        ({"epsilon": float("inf")}, "epsilon=inf is not"),
        ({"epsilon": float("nan")}, "epsilon=nan is not"),
        ({"epsilon": 1, "method": "magic"}, "'exponential', 'histogram', 'descent'"),
        ({"epsilon": 1, "method": "descent"}, "needs a delta"),
        ({"epsilon": 1, "delta": 1e-6}, "spends no delta"),
        ({"epsilon": 1, "delta": 1.0}, r"delta=1\.0 is not in"),
        ({"epsilon": 1, "by": "sex"}, "The list must be public"),
        ({"epsilon": 1, "groups": ("Male",)}, "name a column"),
        ({"epsilon": 1, "by": "correct", "groups": ("True",)}, "move others between groups"),
        ({"epsilon": 1, "by": "sex, loss", "groups": ("a",)}, "loss is of the final model"),
        ({"epsilon": 1, "by": "age:bins=10", "groups": ("<20",)}, "edges are private"),
        ({"epsilon": 1, "by": "sex", "groups": ("Male", "Male")}, "listed twice in"),
    ],
)
def test_what_cannot_be_released_is_refused_before_any_work(arguments, words):
    with pytest.raises(InputError, match=words):
        Request(**arguments)


def test_the_budget_is_shared_equally_by_statistics():
    assert len(Request(epsilon=1).shares) == len(DEFAULT_QUANTILES)
    assert Request((0.9, 0.1), mean=True, epsilon=1).shares == (
        "quantile 0.1",
        "quantile 0.9",
        "mean and count",
    )
    assert Request((0.1, 0.5), mean=True, epsilon=1, method="histogram").shares == (
        "distribution",
        "mean and count",
    )
    assert Request((0.5,), epsilon=1, by="sex", groups=("Male",)).shares == (
        "quantile 0.5",
        "count",
    )
    assert Request((0.5,), epsilon=1, delta=1e-6, method="descent").shares == (
        "quantile 0.5",
        "count",
    )
    assert Request((), mean=True, epsilon=1, method="histogram").shares == ("mean and count",)


def test_costs_add_up_as_the_decimals_they_were_given_in():
    tenth = Budget.of(0.1, 1e-7)
    assert (tenth + tenth + tenth).epsilon == Fraction(3, 10)
    assert Budget.of(0.3, 3e-7).covers(tenth + tenth + tenth)
    assert not Budget.of(0.3, 0.0).covers(tenth)


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-1", "inf", "nan", "1,1", "1,-1e-6", "1,2,3", "1,"]
)
def test_a_budget_that_is_none(text):
    with pytest.raises(InputError, match="--budget"):
        parse_budget(text)


def test_quantiles_from_text():
    assert parse_quantiles("") == ()
    with pytest.raises(InputError, match=r"--quantiles '0\.1;0\.2'"):
        parse_quantiles("0.1;0.2")
