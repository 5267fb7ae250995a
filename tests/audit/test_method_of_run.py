from dataclasses import replace
from pathlib import Path

import pytest

from indpriv.analysis.declared import Declared
from indpriv.analysis.recorded_run import RecordedRun
from indpriv.audit.method_of_run import method_of_run
from indpriv.errors import InputError


def tolerance_of(artifacts, declared, **options):
    recorded = replace(
        RecordedRun(), declared=Declared.from_run_json({"config": {"audit": declared}})
    )
    method, words = method_of_run(
        artifacts[0], recorded, Path("run"), {"delta": 1e-5, "accountant": "pld", **options}
    )
    assert f"tolerance={method.tolerance}" in words
    return method.tolerance


def test_the_tolerance_is_the_callers_then_that_of_the_audit_file_then_the_default(artifacts):
    assert tolerance_of(artifacts, {"tolerance": 1e-3}, tolerance=1e-2) == 1e-2
    assert tolerance_of(artifacts, {"tolerance": 1e-3}, tolerance=None) == 1e-3
    assert tolerance_of(artifacts, {"tolerance": 1e-3}) == 1e-3
    assert tolerance_of(artifacts, {}) == 1e-4


ACCOUNT = {"accountant": "pld", "tolerance": 1e-3, "delta": 1e-6, "neighbouring": "zero_out"}


def method_by(artifacts, run_json, **options):
    recorded = replace(RecordedRun(), declared=Declared.from_run_json(run_json))
    return method_of_run(artifacts[0], recorded, Path("run"), options)


def test_the_account_of_run_json_is_followed_unless_something_else_is_typed(artifacts):
    run_json = {"account": ACCOUNT, "delta": 1e-5, "config": {"audit": {"tolerance": 1e-2}}}
    method, words = method_by(artifacts, run_json)
    assert {key: getattr(method, key) for key in ACCOUNT} == ACCOUNT
    assert {"accountant=pld", "tolerance=0.001", "neighbouring=zero_out"} <= {*words}
    method, words = method_by(artifacts, run_json, accountant="rdp", delta=1e-4, tolerance=None)
    assert (method.accountant, method.delta, method.tolerance) == ("rdp", 1e-4, 1e-3)
    assert "accountant=rdp" in words  # so that the stored command does not follow run.json


@pytest.mark.parametrize(
    ("account", "message"),
    [
        ({"acountant": "pld"}, "account has the key 'acountant', which is none of delta, "),
        ({"unreadable": "worst_case"}, "account has the key 'unreadable'"),
        ({"accountant": "magic"}, "accountant='magic'"),
        ({"tolerance": "wide"}, r"account\.tolerance='wide'"),
        ("pld", "account='pld'"),
    ],
)
def test_an_account_of_run_json_that_makes_no_sense_is_refused(artifacts, account, message):
    with pytest.raises(InputError, match=message):
        method_by(artifacts, {"account": account, "delta": 1e-5})


@pytest.mark.parametrize(
    ("tolerance", "message"),
    [
        (0, "tolerance must be above 0 and at most"),
        (0.2, "tolerance must be above 0 and at most"),
        ("wide", r"config\.audit\.tolerance='wide' .* a valid number"),
        (True, r"config\.audit\.tolerance=True .* a valid number"),
    ],
)
def test_a_tolerance_that_makes_no_sense_is_refused(artifacts, tolerance, message):
    with pytest.raises(InputError, match=message):
        tolerance_of(artifacts, {"tolerance": tolerance})
