"""Facts: each text that code asks for is in a TOML file and gets its values, and each one there is asked for."""

import ast
import re
import string
import typing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import indpriv
from indpriv import _facts
from indpriv._facts import Fact, fact, filled, templates, text
from indpriv.accountant import Tuning
from indpriv.analysis.disclosures import RunFacts
from indpriv.analysis.guarantee import Divisor, Guarantee
from indpriv.analysis.lint import TrainingFacts
from indpriv.analysis.recorded_run import Declared
from indpriv.attack_scores import AttackScores
from indpriv.epsilon_table import Account, EpsilonTable
from indpriv.norm_log.fields import RecordingPolicy
from indpriv.norm_log.journal_state import LogState
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.records import Levels
from indpriv.norm_log.session_counts import (
    DrawCounts,
    Found,
    NoiseCounts,
    SessionCounts,
    TrainingCounts,
)

PACKAGE = Path(indpriv.__file__).parent
RECORDING = PACKAGE / "recording"
FINDINGS = RECORDING / "compared" / "findings.py"
KINDS = ("check", "line", "disclosure", "hazard", "rule", "sentence", "refusal")
TEMPLATES = {f"{kind}.{key}": one for kind in KINDS for key, one in templates(kind).items()}
STATUSES = {
    name: value.replace(" ", "_")
    for name, value in vars(_facts).items()
    if name.isupper() and isinstance(value, str)
}


def texts_of(one):
    """The texts of a template by status or case; "" for all others."""
    return {**one.texts, **({} if one.text is None else {"": one.text})}


EVERY = {(name, case) for name, one in TEMPLATES.items() for case in texts_of(one)}


def fields_in(*texts):
    """What stands in braces: a name, or the attribute of one."""
    return {name for one in texts for _, name, _, _ in string.Formatter().parse(one) if name}


def names_in(*texts):
    return {re.split(r"[.\[]", field)[0] for field in fields_in(*texts)}


def needs(name, case, of="fact"):
    """The values that a fact, or its text alone, has to be given."""
    shown = TEMPLATES[name].shown if of == "fact" else ""
    return names_in(shown, texts_of(TEMPLATES[name])[case])


def words(node):
    """Every text constant in an expression or a function."""
    parts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return {value for value in parts if isinstance(value, str)}


def reachable(part, module):
    """A part of a module with the functions and values of this module that it names, and theirs."""
    named = {}
    for one in module.body:
        for target in getattr(one, "targets", [getattr(one, "target", one)]):
            named[getattr(target, "id", getattr(target, "name", None))] = one
    found, waiting = [], [part]
    while waiting:
        found.append(waiting.pop())
        used = {one.id for one in ast.walk(found[-1]) if isinstance(one, ast.Name)}
        waiting += [named[name] for name in used & named.keys() if named[name] not in found]
    return ast.Module(found, [])


def called(node):
    """The name of what is called: of a function, or of one of `_facts`; "" of anything else."""
    function = getattr(node, "func", None)
    of_facts = getattr(getattr(function, "value", None), "id", "") == "_facts"
    return getattr(function, "attr" if of_facts else "id", "")


def calls():
    """Each call of `fact`, `text` and `refused` that names a fact, with what its function can reach."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == FINDINGS:  # see `comparisons`
            continue
        module = ast.parse(path.read_text(encoding="utf-8"))
        for part in module.body:
            for node in ast.walk(part):
                if called(node) in ("fact", "text", "refused", "damaged") and any(
                    word.startswith(tuple(f"{kind}." for kind in KINDS))
                    for word in words(node.args[0])
                ):
                    reach = reachable(part, module)
                    yield pytest.param(node, reach, id=f"{path.stem}:{node.lineno}")


def values(node):
    """The texts that an expression can be; None stands for one that a variable holds."""
    if isinstance(node, ast.IfExp):
        return values(node.body) | values(node.orelse)
    return {node.value if isinstance(node, ast.Constant) else None}


def cases(node, module):
    """The cases that a call can name; where a variable holds them, all texts in reach of its function."""
    at = 2 if called(node) == "fact" else 1
    found = values(node.args[at]) if len(node.args) > at else {""}
    return words(module) | {""} if None in found else found


def reached(node, module):
    """(name, case) of the texts that a call may ask for."""
    any_key = isinstance(node.args[0], ast.JoinedStr)
    start = node.args[0].values[0].value if any_key else None
    names = {name for name in TEMPLATES if (any_key and name.startswith(start))}
    names |= words(node.args[0]) & set(TEMPLATES)
    status = node.args[1:2] if called(node) == "fact" else []
    asked = {one.id for part in status for one in ast.walk(part) if isinstance(one, ast.Name)}
    statuses = {STATUSES[name] for name in asked & set(STATUSES)} or set(STATUSES.values())
    found = set()
    for name in names:
        there = texts_of(TEMPLATES[name])
        for case in cases(node, module):
            if case:
                found |= {(name, case)} & EVERY
            elif called(node) == "fact":
                found |= {(name, status if status in there else "") for status in statuses} & EVERY
    given = {one.arg for one in node.keywords}
    if None in given:  # **values: see below
        return found
    if any_key:  # those of this kind that it can fill
        return {one for one in found if needs(*one, called(node)) <= given}
    for name, case in found:
        assert needs(name, case, called(node)) <= given, (name, case)
    unused = given - set().union(*(needs(*one) for one in found))
    assert not unused
    return found


CALLS = list(calls())


def comparisons():
    """Each call of `Findings.add` and `Findings.compare`: check, cases that it can name, and what it gives."""
    paths = (RECORDING / "watch.py", *sorted((RECORDING / "compared").glob("*.py")))
    modules = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    said = set().union(*map(words, modules.values()))
    for path, module in modules.items():
        for node in ast.walk(module):
            method = getattr(node, "func", None)
            owner = getattr(method, "value", None)
            named = getattr(owner, "attr", getattr(owner, "id", ""))
            if named.removeprefix("_") != "findings" or method.attr not in ("add", "compare"):
                continue
            at = {"add": 1, "compare": 2}[method.attr]
            found = values(node.args[at]) if len(node.args) > at else {""}
            name = f"check.{node.args[0].value}"
            asked = said & texts_of(TEMPLATES[name]).keys() if None in found else found
            given = {one.arg for one in node.keywords}
            yield pytest.param(name, asked, given, None in found, id=f"{path.stem}:{node.lineno}")


COMPARISONS = list(comparisons())


@pytest.mark.parametrize(("name", "asked", "given", "held"), COMPARISONS)
def test_a_finding_gets_the_values_of_its_text(name, asked, given, held):
    """What is not given would end the comparison, and a refuted one would be open. held: by a variable."""
    for case in asked - {""}:
        assert (name, case) in EVERY
        assert held or None in given or needs(name, case, "text") <= given


@pytest.mark.parametrize(("node", "module"), CALLS)
def test_what_code_asks_for_is_there_and_gets_its_values(node, module):
    assert reached(node, module)


def test_every_text_is_asked_for():
    found = set().union(*(reached(*one.values) for one in CALLS))
    found |= {
        (name, case) for one in COMPARISONS for name in one.values[:1] for case in one.values[1]
    }
    lines = {(f"line.{key}", "on_trust") for key in templates("line")}  # evidence.py reads them
    silent = {(name, "") for name, one in TEMPLATES.items() if one.text == ""}
    assert EVERY - found <= lines | silent


class Anything(float):
    """A number that has every attribute and item; whether there are such is another test."""

    def __getattr__(self, name):
        return self

    def __getitem__(self, name):
        return self


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_is_whole(name):
    """Names in braces are names, formats are formats, and nothing is filled in where nothing is given."""
    one = TEMPLATES[name]
    for case in texts_of(one):
        shown = filled(texts_of(one)[case], dict.fromkeys(needs(name, case), Anything(1)))
        assert shown.strip() == shown
        if names_in(texts_of(one)[case]):
            with pytest.raises(KeyError):
                filled(texts_of(one)[case], {})
    for said in (one.title, one.about, one.advice, one.source):
        assert said.strip() == said


ARRAYS = ("column", "ids", "known", "norms", "out", "positions", "rows", "steps", "units", "values")
OBJECTS = {
    **dict.fromkeys(ARRAYS, np.ndarray),
    "account": Account,
    "counts": DrawCounts,
    "divisor": Divisor,
    "facts": TrainingFacts,
    "found": Found,
    "guarantee": Guarantee,
    "levels": Levels,
    "log": NormLog,
    "page": Path,
    "policy": RecordingPolicy,
    "session": SessionCounts,
    "state": LogState,
    "noise": NoiseCounts,
    "records": RunFacts,
    "run": RunFacts,
    "scores": AttackScores,
    "table": EpsilonTable,
    "training": TrainingCounts,
    "tuning": Tuning,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_attribute_that_a_text_names_exists(name):
    for field in fields_in(TEMPLATES[name].shown, *texts_of(TEMPLATES[name]).values()):
        root, *attributes = field.partition("[")[0].split(".")
        kind = OBJECTS.get(root)
        assert not attributes or kind is not None, field
        for attribute in attributes:
            kinds = [one for one in (kind, *typing.get_args(kind)) if hasattr(one, "__mro__")]
            found = [typing.get_type_hints(one).get(attribute) for one in kinds]
            there = [Declared() if one is Declared else one for one in kinds]
            assert any(found) or any(hasattr(one, attribute) for one in there), field
            kind = next(filter(None, found), None)


def test_an_unknown_key_or_text_is_an_error():
    for name, case in (("check.nothing", ""), ("check.closed", "nothing"), ("hazard.norms", "x")):
        with pytest.raises(KeyError):
            text(name, case)
        with pytest.raises(KeyError):
            fact(name, "passed", case or "nothing")
    with pytest.raises(KeyError):
        fact("check.closed", "not checked")
    with pytest.raises(KeyError):
        fact("check.no_voided_steps", "failed")  # without its number


def test_only_the_texts_say_what_is_private():
    """Facts that code makes itself, of what users say or of another machine, are listed here."""
    made = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Fact":
                made.append(path.relative_to(PACKAGE).as_posix())
    assert made == [
        "_facts/__init__.py",
        "analysis/disclosures.py",
        "recording/checkpoints/replay.py",
    ]
    assert all(one.private for one in (*templates("check").values(), *templates("line").values()))
    assert not any(one.private and one.publishable for one in TEMPLATES.values())
    capped = {"account": SimpleNamespace(unit="user", rows_per_unit=3), "cap": 3}
    assert not fact("disclosure.rows_per_unit", "verified", "capped", **capped).private
    assert fact("disclosure.rows_per_unit", "verified", "uncapped", **capped).private


def test_advice_is_given_where_something_is_to_be_done():
    assert fact("check.closed", "passed").advice == ""
    assert fact("check.closed", "failed").advice.startswith("Resume it with")
    assert "](" not in fact("check.closed", "failed").advice
    line = templates("line")["batch"]
    assert line.fact("verified", "x").found == "x"
    assert line.fact("declared", "x").found == f"x; to verify it, {line.advice}"
    assert Fact("some_key", "check", "title", "passed", "x").short == "some key"


@pytest.mark.parametrize(("steps", "shown"), [(6, "27"), (20, "1.2"), (30, "0.13"), (1, "80")])
def test_the_chance_of_missing_a_fault_is_never_shown_smaller_than_it_is(steps, shown):
    values = {"steps": 3000, "compared": steps, "missed": 100 * 0.8**steps, "note": ""}
    assert f" {shown} % of runs" in text("check.fed", "drawn", **values)
    said = text("sentence.challenge", "missed", compared="", missed=100 * 0.8**steps)
    assert f" {shown} % of challenges" in said
