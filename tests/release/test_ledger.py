"""The ledger of an audit that somebody cut, changed, exchanged or copied."""

import hashlib
import json
import re
import shutil

import pandas as pd
import pytest

from indpriv.cli import run
from indpriv.errors import InputError
from indpriv.release import Budget, Request, release

MEDIAN, UPPER = Request((0.5,), epsilon=0.1), Request((0.9,), epsilon=0.1)
LINES = 4  # open, budget, two releases


@pytest.fixture(scope="module")
def paid_for(pristine, tmp_path_factory):
    """An audit with two releases, of a budget of 0.25."""
    folder = shutil.copytree(pristine, tmp_path_factory.mktemp("ledger") / "audit")
    release(folder, MEDIAN, budget=Budget.of(0.25, 0.0))
    release(folder, UPPER)
    return folder


@pytest.fixture
def paid(paid_for, tmp_path):
    return shutil.copytree(paid_for, tmp_path / "paid")


def chained(entries):
    """Lines of a journal whose hashes are right, as anybody can make them."""
    lines, chain = [], "indpriv"
    for entry in entries:
        text = json.dumps(entry, sort_keys=True, separators=(",", ":"))
        chain = hashlib.sha256(f"{chain}\n{text}".encode()).hexdigest()
        lines.append(json.dumps({**entry, "chain": chain}, sort_keys=True, separators=(",", ":")))
    return "".join(f"{line}\n" for line in lines)


def edited(line, **values):
    """A change of the ledger: other values in one line, and all hashes made again."""

    def change(folder):
        path = folder / "ledger" / "journal.jsonl"
        entries = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        for entry in entries:
            del entry["chain"]
        assert chained(entries) == path.read_text(encoding="utf-8")
        entries[line] |= values
        path.write_text(chained(entries), encoding="utf-8")

    return change


def test_a_request_of_before_is_answered_from_the_ledger(pristine, tmp_path, monkeypatch):
    """It said "public_n": null of each, the number of people that could be declared public."""
    folder = shutil.copytree(pristine, tmp_path / "audit")
    with monkeypatch.context() as before:
        asked = {**MEDIAN.to_json(), "public_n": None}
        before.setattr(Request, "to_json", lambda _: asked)
        first = release(folder, MEDIAN)
    again = release(folder, MEDIAN)
    assert (first.fresh, again.fresh) == (True, False)
    assert again.content["quantiles"] == first.content["quantiles"]


def cut(n_bytes):
    """A change of the ledger: its end is lost; None: its last line."""

    def change(folder):
        path = folder / "ledger" / "journal.jsonl"
        content = path.read_bytes()
        path.write_bytes(content[: -(n_bytes or len(content.splitlines()[-1]) + 1)])

    return change


def removed(folder):
    shutil.rmtree(folder / "ledger")


def renewed(folder):
    """The ledger of the same audit before anything was released."""
    edited(0)(folder)
    path = folder / "ledger" / "journal.jsonl"
    path.write_text(path.read_text(encoding="utf-8").splitlines(keepends=True)[0], encoding="utf-8")


CHANGES = {
    "the last line": cut(None),
    "three bytes": cut(3),
    "one byte": cut(1),
    "the ledger": removed,
    "all that was spent": renewed,
    "a smaller cost": edited(2, epsilon=0.01),
    "a larger budget": edited(1, epsilon=5.0),
    "another answer": edited(3, time="2020-01-01T00:00:00+00:00"),
}
BROKEN = {
    "epsilon": (-100, 0, 0.0, 1e400, float("nan"), "0.1", True, None, [0.1]),
    "delta": (-1e-9, 1, 2.0, None, "0"),
    "kind": ("refund", None, ["release"]),
    "figures": ("all", {"": {"quantiles": {"0.5": "<b>"}}}),
    "request": (3,),
}


def lines(folder):
    path = folder / "ledger" / "journal.jsonl"
    return path.read_bytes().splitlines() if path.is_file() else []


@pytest.mark.parametrize("name", CHANGES)
def test_a_ledger_that_is_not_the_one_that_paid_is_refused(name, paid):
    CHANGES[name](paid)
    for spend in (False, True):
        with pytest.raises(InputError, match="cut, changed or exchanged") as error:
            release(paid, MEDIAN, spend=spend)
        assert str(paid / "ledger") in str(error.value)
        assert str(paid / "paid.json") in str(error.value)
    assert len(lines(paid)) <= LINES  # nothing was drawn


@pytest.mark.parametrize("change", [cut(None), cut(3), removed, edited(2, epsilon=0.01)])
def test_a_release_alone_contradicts_a_ledger_that_says_less(change, paid):
    (paid / "paid.json").unlink()
    change(paid)
    with pytest.raises(InputError, match=r"release\.json says .*'releases': 2, 'epsilon': 0\.2"):
        release(paid, MEDIAN)


@pytest.mark.parametrize(("key", "value"), [(key, v) for key in BROKEN for v in BROKEN[key]])
def test_a_ledger_line_with_values_that_nobody_wrote_is_refused(key, value, paid):
    """Also where nothing else knows the ledger."""
    edited(3, **{key: value})(paid)
    (paid / "paid.json").unlink()
    shutil.rmtree(paid / "shareable")
    with pytest.raises(InputError, match=r"journal\.jsonl line 4"):
        release(paid, MEDIAN)


@pytest.mark.parametrize("text", ["[]", "{}", '{"lines": 1e99, "chain": null}', "{", '"\x1b[2J"'])
@pytest.mark.parametrize("name", ["paid.json", "shareable/release.json"])
def test_what_knows_the_ledger_and_is_broken_is_named(name, text, paid):
    (paid / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=name) as error:
        release(paid, MEDIAN)
    assert "\x1b" not in str(error.value)


def test_a_ledger_that_went_on_after_a_crash_is_continued(paid):
    """Killed between the line and what is kept beside it: the line counts."""
    for name in ("paid.json", "shareable/release.json"):
        (paid / name).unlink()
    assert not release(paid, UPPER).fresh
    with pytest.raises(InputError, match=r"\(epsilon 0\.20, delta 0\) is spent"):
        release(paid, MEDIAN, spend=True)


def test_copies_that_name_one_ledger_share_its_budget(pristine, tmp_path):
    one = shutil.copytree(pristine, tmp_path / "one")
    other, shared = shutil.copytree(one, tmp_path / "other"), tmp_path / "safe" / "ledger"
    release(one, MEDIAN, budget=Budget.of(0.2, 0.0), ledger_dir=shared)
    assert not release(other, MEDIAN, ledger_dir=str(shared)).fresh
    content = release(other, UPPER, ledger_dir=shared).content
    assert content["spent"]["epsilon"] == 0.2
    assert content["spent"]["budget"] == {"epsilon": 0.2, "delta": 0.0}
    for folder in (one, other):
        with pytest.raises(InputError, match="is spent, and this release"):
            release(folder, MEDIAN, spend=True, ledger_dir=shared)
        with pytest.raises(InputError, match="ledger="):  # the one that paid
            release(folder, MEDIAN)
        assert not lines(folder)


def test_the_ledger_of_another_audit_is_refused(paid, audit_dir, capsys):
    frame = pd.read_parquet(audit_dir / "epsilon.parquet")
    facts = frame.attrs  # which an old pandas forgets
    frame["epsilon"] *= 0.5
    frame.attrs = facts
    frame.to_parquet(audit_dir / "epsilon.parquet")
    command = [
        "publish",
        "quantiles",
        str(audit_dir),
        "--epsilon",
        "0.1",
        "--set",
        f"ledger={paid / 'ledger'}",
    ]
    assert run(command) == 2
    assert "counts releases of other values" in " ".join(capsys.readouterr().err.split())
    assert not (audit_dir / "shareable").exists()


def test_a_release_says_which_copies_are_not_noticed(paid_for):
    page = (paid_for / "shareable" / "release.html").read_text(encoding="utf-8")
    assert "A copy of the audit with a ledger of its own is not noticed" in page
    assert (paid_for / "paid.json").stat().st_mode & 0o777 == 0o600


METHODS = (
    {"method": "exponential"},
    {"method": "histogram"},
    {"method": "histogram", "mean": True},
    {"method": "descent", "delta": 1e-9},
)


@pytest.mark.parametrize("options", METHODS, ids=str)
@pytest.mark.parametrize("epsilon", [1e-320, 1e-30, 1e-12, 1e-9, 5e-8, 1.1e4, 1e300])
def test_an_epsilon_that_no_mechanism_can_hold_is_refused_before_the_draw(options, epsilon):
    with pytest.raises(InputError, match=rf"epsilon={re.escape(str(epsilon))} is not between"):
        Request(epsilon=epsilon, **options)


@pytest.mark.parametrize("options", METHODS, ids=str)
@pytest.mark.parametrize("extreme", ["least", "most"])
def test_the_extremes_that_are_allowed_are_answered(options, extreme, audit_dir):
    request = Request(epsilon=1e4, **options)
    if extreme == "least":
        request = Request(epsilon=1e-7 * len(request.shares), **options)
    values = release(audit_dir, request).content["quantiles"].values()
    assert all(0 <= value <= 2.0 for value in values)


def test_a_histogram_of_too_small_an_epsilon_prints_nothing_that_was_drawn(audit_dir, capsys):
    assert (
        run(
            [
                "publish",
                "quantiles",
                str(audit_dir),
                "--set",
                "method=histogram",
                "--epsilon",
                "1e-9",
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert "representable" not in error
    assert error.count("error:") == 1
    assert not (audit_dir / "ledger").exists()
    assert not (audit_dir / "shareable").exists()
