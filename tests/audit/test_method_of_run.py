from dataclasses import replace
from pathlib import Path

import pytest

from indpriv.analysis.recorded_run import Declared, RecordedRun
from indpriv.audit.pipeline import method_of_run
from indpriv.errors import InputError

ACCOUNT = {"accountant": "pld", "delta": 1e-6, "neighbouring": "zero_out"}


def method_by(artifacts, run_json, **options):
    recorded = replace(RecordedRun(), declared=Declared(run_json))
    return method_of_run(artifacts[0], recorded, Path("run"), options)


def test_the_account_of_run_json_is_followed_unless_something_else_is_typed(artifacts):
    before = {**ACCOUNT, "tolerance": 1e-3}  # which earlier versions took
    run_json = {"account": before, "delta": 1e-5, "config": {"audit": {"tolerance": 1e-2}}}
    method, words = method_by(artifacts, run_json)
    assert {key: getattr(method, key) for key in ACCOUNT} == ACCOUNT
    assert {"accountant=pld", "neighbouring=zero_out"} <= {*words}
    method, words = method_by(artifacts, run_json, accountant="rdp", delta=1e-4)
    assert (method.accountant, method.delta) == ("rdp", 1e-4)
    assert "accountant=rdp" in words  # so that the stored command does not follow run.json


@pytest.mark.parametrize(
    ("account", "message"),
    [
        ({"acountant": "pld"}, "account has the key 'acountant', which is none of delta, "),
        ({"unreadable": "worst_case"}, "^run.json: account has the key 'unreadable'"),
        ({"accountant": "magic"}, "accountant='magic'"),
        ("pld", "account='pld'"),
    ],
)
def test_an_account_of_run_json_that_makes_no_sense_is_refused(artifacts, account, message):
    with pytest.raises(InputError, match=message):
        method_by(artifacts, {"account": account, "delta": 1e-5})
