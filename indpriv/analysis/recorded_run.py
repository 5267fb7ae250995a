"""A run as it was recorded, and with its account: what findings are made of. Sensitive."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype
from pydantic_core import core_schema
from scipy.special import expit

from indpriv import _columns
from indpriv._facts import Fact, refused, text
from indpriv._files import ROW_GROUP_SIZE, first_at
from indpriv._types import IntArray, NDArray, StageProgress, silent
from indpriv.accountant.method import Method
from indpriv.analysis import statistics
from indpriv.analysis.schedule import Curve
from indpriv.analysis.summary import KINDS, Audit, finding_of, keys
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import CONFIDENCE, AttackSignals, from_losses, is_signals, open_signals
from indpriv.attacks import Material
from indpriv.attacks.attributes import read_knowledge
from indpriv.attacks.released import released_of_run
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable, open_examples
from indpriv.norm_log import run_files
from indpriv.norm_log.norm_log import NormLog, OpenedRun
from indpriv.norm_log.run_files import ACCOUNT
from indpriv.norm_log.verify import verify

T = TypeVar("T")
MOST_ATTACKED = 1 << 19  # of each split, where not all are
_TOLERANCE = 0.01  # of a probability; losses were computed in the precision of training
# Other texts and lists of texts that run.json may have, and where else.
_SAID: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(("name", "released", "tuning", "trust_model", "code_commit"), ()),
    "groups": (("config", "audit", "groups"),),
    "class_names": (("data", "class_names"),),
    "preprocessing": (("data", "preprocessing"),),
    "data_fingerprint": (("data", "fingerprint"),),
}


@dataclass(frozen=True)
class Declared:
    """What run.json says that an audit understands, as attributes; all of it is optional.

    None, or () of several, where nothing is said: name; delta, participation and neighbouring of
    the account; groups, columns to compare, chosen beforehand; class_names, what the integer labels
    0, 1, ... mean; released, what is published of the run; preprocessing, where its constants come
    from; tuning, what was tried before this run; trust_model, who sees the data and adds the noise;
    code_commit of the training code; data_fingerprint. InputError where a value has the wrong kind.

    Attributes:
        content: all of run.json, except what the recorder wrote.
    """

    content: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        content = run_files.checked_run_json(self.content)
        content = {key: value for key, value in content.items() if key != "recorder"}
        object.__setattr__(self, "content", content)
        _ = self.account  # is read now, as it may be wrong

    @cached_property
    def account(self) -> Mapping[str, Any]:
        """All that is declared of the account, by the arguments of `indpriv.account`."""
        return run_files.declared_account(self.content)

    @property
    def on_trust(self) -> Mapping[str, str]:
        """Item -> a statement that no check verifies."""
        said = first_at(self.content, ("on_trust",)) or {}
        return {str(key): str(value) for key, value in said.items()}

    def __getattr__(self, key: str) -> Any:
        if key in ACCOUNT:
            return self.account.get(key)
        if key not in _SAID:
            raise AttributeError(f"run.json declares no {key!r}")
        said = first_at(self.content, (key,), *_SAID[key])
        if key in ("groups", "class_names"):
            return tuple(map(str, said or ()))
        return str(said) if said else None

    def as_json(self) -> Mapping[str, Any]:
        """See `indpriv._plain.to_json`."""
        return self.content

    @classmethod
    def __get_pydantic_core_schema__(cls, _kind: Any, handler: Any) -> Any:
        content = handler.generate_schema(Mapping[str, Any])
        return core_schema.no_info_after_validator_function(cls, content)

    @property
    def of_lines(self) -> dict[str, str | None]:
        """What is said of lines of evidence that nobody can see, by key."""
        trusted = {key: self.on_trust.get(key) for key in ("people", "duplicates", "weights")}
        return {**trusted, "preprocessing": self.preprocessing, "tuning": self.tuning}


KINDS["Declared"] = Declared


@dataclass(frozen=True)
class RecordedRun:
    """What is known about a run in addition to its log; None, or nothing, of what it lacks."""

    dp: Material = field(default_factory=Material)  # what attacks can use of its final model
    non_dp: Material = field(default_factory=Material)  # the same of the non-private baseline
    declared: Declared = field(default_factory=Declared)  # what run.json says; not verified
    # what the recorder read from the optimizer and the loader
    recorder: Mapping[str, Any] = field(default_factory=dict)
    checks: Sequence[Fact] = ()  # assumptions, compared with what the run recorded
    canaries: AttackScores | None = None  # scores of examples that fair coins included or left out
    gradient_canaries: AttackScores | None = None  # scores of the run's gradient canaries
    holdout: NormLog | None = None  # norms of the test examples on the same trajectory
    unchecked: Sequence[str] = ()  # what could not be checked about signals, in sentences
    # scores of reconstructions from gradients, one for each observation and attack
    leakage: tuple[AttackScores, ...] = ()
    reconstructed: tuple[Path, ...] = ()  # PNG files of pictures and their reconstructions
    curve: Curve | None = None  # test accuracy and epsilon at checkpoints

    @property
    def examples(self) -> ExampleTable | None:
        """Its examples with the losses of its final model."""
        return self.dp.losses

    @property
    def models(self) -> dict[str, Material]:
        """What attacks can use of the final model, and of the baseline."""
        return {"dp": self.dp, "non_dp": self.non_dp}

    @property
    def has_signals(self) -> bool:
        """Whether there are signals of reference models, or of kept ones."""
        return any(one.confidence or one.released for one in self.models.values())

    def for_attacks(self, seed: int) -> "RecordedRun":
        """The same with random members and non-members, where there are very many.

        A rate over 2^19 of them is known to 0.14 %. Signals of reference models are used whole, and
        so are units of several rows. `seed` is that of the analysis; the baseline and the hold-out
        have the same examples.
        """
        positions, others = self.attacked(seed)
        if self.examples is None or positions is None:
            return self
        examples = self.examples.at(positions, others)
        ids = examples.train["example_id"].to_numpy()
        test_ids = None if others is None else examples.test["example_id"].to_numpy()
        losses = self.non_dp.losses
        return replace(
            self,
            dp=replace(self.dp, losses=examples),
            non_dp=replace(self.non_dp, losses=losses and losses.with_ids(ids, test_ids)),
            holdout=self.holdout if test_ids is None else _of_examples(self.holdout, test_ids),
        )

    def attacked(self, seed: int) -> tuple[IntArray | None, IntArray | None]:
        """Increasing positions of the members and of the others of `for_attacks`; None if all."""
        examples = self.examples
        if examples is None or self.has_signals or examples.n_train <= statistics.MOST_EXACT:
            return None, None
        if not examples.has_unit_for_each_row:
            return None, None
        sizes = {"members": examples.n_train, "non-members": len(examples.rows("test"))}
        members, others = (
            statistics.sample(n, MOST_ATTACKED, statistics.generator_of(seed, whose))
            for whose, n in sizes.items()
        )
        return (None, None) if members is None else (members, others)


def _of_examples(holdout: NormLog | None, ids: NDArray[np.generic]) -> NormLog | None:
    """The hold-out of some test examples. One of the two may have its ids as texts."""
    if holdout is None:
        return None
    own, found = holdout.example_ids, []
    as_texts = own.dtype.kind not in "iu" or ids.dtype.kind not in "iu"
    wanted = ids.astype(str) if as_texts else ids
    for start in range(0, len(own), ROW_GROUP_SIZE):
        part = own[start : start + ROW_GROUP_SIZE]
        found.append(
            start + np.flatnonzero(np.isin(part.astype(str) if as_texts else part, wanted))
        )
    return holdout.take(np.concatenate(found))


_MODELS = {  # of a run directory: its tables of losses and of attributes, and its references
    "dp": (run_files.EXAMPLES, run_files.ATTRIBUTES, run_files.REFERENCES),
    "non_dp": (run_files.EXAMPLES_NON_DP, run_files.ATTRIBUTES_NON_DP, run_files.REFERENCES_NON_DP),
}


def _known(file: Path, read: Callable[[Path], T]) -> T | None:
    """What a file of a run holds, if there is one."""
    return read(file) if file.is_file() else None


def models_of(
    path: Path, read: Callable[[Path], ExampleTable], class_names: Sequence[str] = ()
) -> tuple[Material, Material]:
    """Losses and attributes of the final model of a run and of its baseline, of those it has."""

    def of(losses: str, attributes: str, _: str) -> Material:
        found, known = _known(path / losses, read), _known(path / attributes, read_knowledge)
        return Material(found and found.with_label_names(class_names), attributes=known)

    return of(*_MODELS["dp"]), of(*_MODELS["non_dp"])


def recorded_run(run: OpenedRun) -> RecordedRun:
    """What a run directory holds in addition to its log, and what its log proves."""
    path = run.run_dir
    declared = Declared(run_files.read_run_json(path))
    holdout, leakage = path / run_files.HOLDOUT, path / run_files.LEAKAGE
    held = run_files.holds_log(holdout)
    return RecordedRun(
        *models_of(path, open_examples, declared.class_names),
        canaries=_known(path / run_files.CANARIES, AttackScores.from_file),
        gradient_canaries=_known(path / run_files.GRADIENT_CANARIES, AttackScores.from_file),
        curve=_known(path / run_files.CURVE, Curve.read),
        holdout=NormLog.open(holdout, unreadable=run.unreadable) if held else None,
        declared=declared,
        checks=tuple(verify(run)),
        leakage=tuple(map(AttackScores.from_file, sorted(leakage.glob("*.parquet")))),
        reconstructed=tuple(sorted(leakage.glob("*.png"))),
        recorder={
            **run.header["run"],
            "seeded": run.seeded,
            "log_sha256": run.fingerprint,
            **{key: run.header["norm_pass"].get(key) for key in ("backend", "slack")},
            "policy": run.header["policy"] or None,
            "clip_excess": run.clip_excess,
            "pass_seconds": run.pass_seconds,
            "training_seconds": run.training_seconds,
        },
    )


def with_references(
    recorded: RecordedRun, path: Path, signals: Path | None, baseline_signals: Path | None
) -> RecordedRun:
    """What is known about the run, with signals of reference models where they are given."""
    released, unchecked, made = released_of_run(path), list[str](), list[Material]()
    for model, given in (("dp", signals), ("non_dp", baseline_signals)):
        kept, known = path / _MODELS[model][-1], recorded.models[model]
        folder = given or (kept if is_signals(kept) else None)
        found, more = read_references(folder, path, known.losses)
        fields: dict[str, Any] = {**found, "released": released.get(model)}
        made.append(replace(known, **fields))
        unchecked += more
    once = tuple(dict.fromkeys(unchecked))
    return replace(recorded, dp=made[0], non_dp=made[1], unchecked=once)


def with_units(
    log: NormLog, recorded: RecordedRun, unit_column: str
) -> tuple[NormLog, RecordedRun]:
    """The same, with the owner of each row from a metadata column."""
    if recorded.examples is None:
        said = {"unit_column": unit_column, "name": run_files.EXAMPLES}
        raise refused("refusal.run_json", "owners", **said)
    examples = recorded.examples.with_units(unit_column)
    units = examples.aligned(np.asarray(log.example_ids))["unit_id"].to_numpy()
    one = "client" if log.sampler == "by_client" else "user"
    unit = one if log.unit == "example" else log.unit
    recorded = replace(recorded, dp=replace(recorded.dp, losses=examples))
    return replace(log, unit=unit, unit_ids=units), recorded


def in_rows_of(epsilons: EpsilonTable, examples: ExampleTable) -> ExampleTable:
    """The example table with one training row for each row of epsilons, of units too."""
    return examples if epsilons.account.rows_per_unit is None else examples.by_unit()


def read_references(
    path: Path | None, run_dir: Path, examples: ExampleTable | None
) -> tuple[Mapping[str, AttackSignals], tuple[str, ...]]:
    """The signals in a folder, by name, and what could not be checked about them, in sentences.

    path: a folder of `train_references(..., audited=...)`; None for none. run_dir, examples: the
    run that is attacked. InputError for signals of other data or of another run.
    """
    if path is None:
        return {}, ()
    found = open_signals(path)
    if examples is None:
        raise InputError(f"{run_dir} has no losses of its examples, which attacks compare with")
    fingerprint = run_files.data_fingerprint(run_dir)
    for signals in found.values():
        if signals.audited is None:
            raise refused("refusal.signals", "study", path=path, run_dir=run_dir)
        said = "" if fingerprint.startswith("model ") else fingerprint
        if signals.fingerprint and said and signals.fingerprint != said:
            raise refused("refusal.signals", "another_data", path=path, run_dir=run_dir)
    first, unchecked = found[CONFIDENCE], []
    _check_is_of_run(first, examples, path, run_dir)
    if not fingerprint or first.fingerprint != fingerprint:
        where = f"run.json of {run_dir}" if first.fingerprint else "the file of the signals"
        unchecked.append(text("sentence.references", "data", where=where))
    if first.kind != CONFIDENCE:
        unchecked.append(text("sentence.references", "model"))
    return found, tuple(unchecked)


def _check_is_of_run(
    signals: AttackSignals, examples: ExampleTable, path: Path, run_dir: Path
) -> None:
    """Raise InputError unless ids, memberships and the audited row are those of the run."""
    row = signals.audited or 0
    member = np.array(signals.member[row])
    for split, inside in ((examples.train, member), (examples.test, ~member)):
        losses = split.set_index("example_id")["loss"]
        ids = signals.example_ids[inside]
        if not np.isin(ids, losses.index.to_numpy()).all():
            raise InputError(f"{path} holds examples that {run_dir} does not have")
        if signals.kind != "confidence":
            continue
        loss, signal = _columns.to_floats(losses.loc[ids]), np.float64(signals.signal[row][inside])
        if len(ids) and (np.isnan(loss) | np.isnan(signal)).all():
            raise refused("refusal.signals", "no_confidence", row=row, path=path, run_dir=run_dir)
        apart = np.abs(expit(from_losses(loss)) - expit(signal))
        if np.nanmax(apart, initial=0.0) > _TOLERANCE:
            said = {"row": row, "path": path, "run_dir": run_dir, "apart": np.nanmax(apart)}
            raise refused("refusal.signals", "not_the_model", **said)


ANALYSING = "analysing"


@dataclass(frozen=True)
class AuditedRun:
    """A recorded run, its account, and how it is to be analysed.

    Epsilons in memory are analysed at once. Epsilons in parts are read part by part, several times,
    each part with the rows of its examples, so that memory does not grow with their number.
    """

    log: NormLog  # what the epsilons were made of
    # of all its examples; in parts only if rows were accounted one by one, and the example table
    # has them in the log's order
    epsilons: EpsilonTable
    recorded: RecordedRun  # what else is known about the run
    name: str = ""  # of the run
    # columns to group by; default those in run.json, else label and all metadata
    by: Sequence[str] = ()
    # how the epsilons were computed; None for no other accounts beside them
    method: Method | None = None
    seed: int = 0  # of the random choices of attacks and group tables
    command: str = ""  # reproduces the audit
    tell: StageProgress = silent  # called as tell(stage, done, total)

    @cached_property
    def audit(self) -> Audit:
        """What is found about the run, each value when it is first asked for."""
        return _BeingMade(self)

    @cached_property
    def _computed(self) -> dict[Any, Any]:
        return {}

    def once(self, compute: "Callable[[AuditedRun], T]") -> T:
        """What a function of the run gives, which is called once."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        found: T = self._computed[compute]
        return found

    @cached_property
    def rows(self) -> _columns.Rows | None:
        """Of the training examples, in the order of the log; None without an example table."""
        examples = self.recorded.examples
        return None if examples is None else examples.train_rows(self.log.example_ids)

    @cached_property
    def train(self) -> _columns.Rows | None:
        """The same in the order of the epsilons: one row for each unit."""
        if self.recorded.examples is None or self.epsilons.account.rows_per_unit is None:
            return self.rows
        if not self.epsilons.in_memory:
            return self.rows
        units = in_rows_of(self.epsilons, self.recorded.examples)
        return units.train_rows(self.epsilons.example_ids)

    @cached_property
    def attacked(self) -> RecordedRun:
        """The same with those examples that are attacked: random ones where there are very many."""
        return self.recorded.for_attacks(self.seed)

    @cached_property
    def attacked_epsilons(self) -> EpsilonTable:
        """Those of the members that are attacked, in memory."""
        if self.epsilons.in_memory:
            return self.epsilons
        positions = self.recorded.attacked(self.seed)[0]
        return self.epsilons.take(slice(None) if positions is None else positions)

    @cached_property
    def grouping(self) -> tuple[list[str], list[str]]:
        """Columns to group by, and sentences on what was left out."""
        if self.rows is not None:
            return choose_groups(self.rows, self.by, self.recorded.declared.groups, self.train)
        if self.by:
            raise refused("refusal.run_json", "no_groups", by=self.by[0], name=run_files.EXAMPLES)
        return [], []


class _BeingMade(Audit):
    """The audit of a run, whose values are found when they are asked for."""

    def __init__(self, run: AuditedRun) -> None:
        super().__init__()
        self._run = run

    def _value(self, key: str) -> Any:
        if key not in self._values:
            finding = finding_of(key)
            found = dict(finding.find(self._run))
            self._values = {**dict.fromkeys(finding.keys), **found, **self._values}
        return super()._value(key)


def find_all(run: AuditedRun) -> Audit:
    """All that can be found; InputError for columns that do not exist, or no example table."""
    for key in ("fidelity", "sensitivity"):  # other accounts, which tell how far they are
        getattr(run.audit, key)
    run.tell(ANALYSING, 0, 1)
    for key in keys():
        getattr(run.audit, key)
    run.tell(ANALYSING, 1, 1)
    return run.audit.replace()


def choose_groups(
    train: pd.DataFrame | _columns.Rows,
    by: Sequence[str],
    declared: Sequence[str],
    units: _columns.Rows | None = None,
) -> tuple[list[str], list[str]]:
    """Columns to group by, and sentences on what was left out.

    The columns asked for, else those declared before training, else the label and every metadata
    column that can be read as groups: numeric columns with many values in ten bins; other columns
    with many values are left out.
    """
    if by:
        return list(dict.fromkeys([by] if isinstance(by, str) else by)), []
    if declared:
        return list(declared), []
    chosen, left_out, rows = [], [], _columns.as_rows(train)
    for column in _columns.groupable_columns(rows):
        distinct, numeric = _distinct(rows, column)
        differs = units is not None and units is not train and not _distinct(units, column)[0]
        if differs or not distinct:  # the rows of each unit differ in it
            continue
        if distinct <= _columns.MAX_NUMERIC_VALUES:
            chosen.append(column)
        elif numeric:
            chosen.append(f"{column}:bins=10")
        else:
            more = distinct > _columns.MOST_GROUPS and len(rows.ranges()) > 1
            said = {"column": column, "least": "at least " * more, "n": distinct}
            left_out.append(text("sentence.missing", "group", **said))
    return chosen, left_out


def _distinct(rows: _columns.Rows, column: str) -> tuple[int, bool]:
    """Number of distinct values, and whether they are numbers; counting ends at MOST_GROUPS."""
    values, numeric = set[object](), True
    for frame in _columns.frames_of(rows, [column]):
        known = frame[column].dropna()
        numeric = numeric and (is_numeric_dtype(known) or known.empty)
        values.update(known.unique().tolist())
        if len(values) > _columns.MOST_GROUPS:
            break
    return len(values), numeric
