"""The audit directory: what later commands read.

It holds individual epsilons: sensitive, files are 0600.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv import _checks, _files, _folders, _plain, _storage, epsilon_table, example_table
from indpriv._facts import refused, text
from indpriv._reading import Text, check, named, table
from indpriv.analysis import recorded_run, schedule
from indpriv.analysis.attacks import membership
from indpriv.analysis.comparison import compare_tables, stability_of
from indpriv.analysis.groups import MIN_GROUP, GroupTable, group_tables
from indpriv.analysis.summary import Audit
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.run_files import EXAMPLES, EXAMPLES_NON_DP, holds_log
from indpriv.report.figures import data_uri, pictures_of
from indpriv.report.formats import MOST_EXAMPLES
from indpriv.report.report import audit_page, search_data

_SUMMARY = table({Text: "sensitive disclaimer meaning claim", dict[str, Any]: "guarantee"})
ATTACK_TABLE = "attacks.parquet"
_IN_PROGRESS = ".in-progress"
_HERE, _MADE = ".here", ".here.json"  # an empty file, and when and where the system made it
EPSILON, SUMMARY, REPORT, MARKDOWN = "epsilon.parquet", "audit.json", "report.html", "audit.md"
_SETTINGS = (  # of a run, that can change epsilons
    *("noise_multiplier", "max_grad_norm", "sample_rate", "total_steps", "n_records"),
    *("rounding", "rounding_mode"),
)


@contextmanager
def in_progress(output_dir: Path) -> Iterator[Path]:
    """A folder in an audit directory for the parts of an account, as long as the audit lasts.

    They stay where the audit is stopped, so that it goes on with them when it is made again here;
    parts that came with a directory are not used. InputError if another process writes there.
    """
    made = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
    folder = _folders.make_folder(_folders.make_folder(output_dir), _IN_PROGRESS)
    writer = _files.OneWriter(folder, output_dir)
    kept = False
    try:
        for place in (folder, output_dir):
            if not made_here(place):
                _folders.remove_file(place / epsilon_table.MARKER)  # so that no parts belong to it
                _files.write_atomically(place / _HERE, b"")
                _files.write_json(place / _MADE, _made(place))
        yield folder
    except BaseException:
        kept = any(folder.glob("part-*"))
        raise
    finally:
        writer.close()
        if not kept:
            rmtree(folder, ignore_errors=True)
            if output_dir in made and {p.name for p in output_dir.iterdir()} <= {_HERE, _MADE}:
                for name in (_HERE, _MADE):
                    _folders.remove_file(output_dir / name)
            for path in made:  # unless something else was written there
                with suppress(OSError):
                    path.rmdir()


def made_here(folder: Path) -> bool:
    """Whether an audit began a directory on this system, and it was neither unpacked nor copied.

    No archive brings a file's number and time of change; new modes or owners change that time too.
    """
    with suppress(EvidenceError):  # a damaged mark is none
        here = _made(folder)
        return (folder / _MADE).is_file() and _files.read_json(folder / _MADE) == here != []
    return False


def default_output(path: Path) -> tuple[Path, str]:
    """Where the audit of a run is written unless told otherwise, and what to say of it.

    RUN/audit; in the working folder, if that or RUN is somebody else's, in object storage, or
    cannot be written.
    """
    inside, outside = path / "audit", Path(f"{path.resolve().name}-audit")
    said = f"the audit of {path} is written to {outside}"
    if not _folders.is_remote(path):
        if not path.exists():
            return inside, ""
        _folders.named_by_person(path)
        is_own = not hasattr(os, "geteuid") or path.stat().st_uid == os.geteuid()
        is_own &= not inside.exists() or made_here(inside)
        if is_own and os.access(inside if inside.is_dir() else path, os.W_OK):
            return inside, ""
        said = text("sentence.warnings", "outside", path=path, outside=outside, inside=inside)
    audited, found = ("run", "recorder", "log_sha256"), ""
    if outside.is_symlink() or (outside.exists() and not made_here(outside)):
        found = "is a link, or is not known to be an audit of yours"
    elif (outside / SUMMARY).is_file() and (
        _files.first_at(read_summary(outside), audited) != read_state(path).fingerprint
    ):
        found = "holds the audit of another run"
    if found:
        raise refused("refusal.audits", "output", outside=outside, path=path, found=found)
    return outside, said


def _made(folder: Path) -> list[int]:
    with suppress(OSError):
        found = (folder / _HERE).lstat()
        return [found.st_ino, found.st_ctime_ns]
    return []  # there is none


def write_audit(
    output_dir: Path,
    run: recorded_run.AuditedRun,
    summary: Audit,
    images: NDArray[np.float32] | None = None,
    since: Audit | None = None,
) -> None:
    """Write an audit directory; audit.json last, so that a directory with one is whole.

    The directory is new, or that of an earlier audit. The report shows those of the images
    (n_examples, channels, height, width) at both ends, and pictures of reconstructions; it compares
    the audit with an earlier one, `since`. Only of epsilons in memory it can be searched for single
    examples, and has a table of their attacks.
    """
    epsilons, recorded, examples = run.epsilons, run.recorded, run.recorded.examples
    pictures = reconstructed = search = attacks = None
    ids = run.log.example_ids
    if epsilons.in_memory:
        ids, train = epsilons.example_ids, None
        if examples is not None and len(epsilons) <= MOST_EXAMPLES:
            train = recorded_run.in_rows_of(epsilons, examples).aligned(ids)
        search = search_data(summary, run.log, epsilons, train)
        attacks = membership.attack_table(run)
    if images is not None:
        pictures = pictures_of(summary.drivers, images)
        for path in recorded.reconstructed:
            _folders.refuse_links(path)  # they become part of a page
        reconstructed = {path.stem: data_uri(path.read_bytes()) for path in recorded.reconstructed}
    _folders.make_folder(output_dir)
    if _files.others_can_read(output_dir):
        _checks.warn_caller(text("sentence.warnings", "entered", folder=output_dir))
    copies = {EXAMPLES: examples, EXAMPLES_NON_DP: recorded.non_dp.losses}
    for file in (SUMMARY, REPORT, MARKDOWN, ATTACK_TABLE, *copies):  # of an earlier audit
        _folders.remove_file(output_dir / file)
    if examples is None:
        epsilon_table.write_epsilons(epsilons, output_dir / EPSILON)
    else:  # beside loss, correct, label and metadata
        names = {name: name for name in ("loss", "correct", "label", *examples.metadata_columns)}
        names |= {name: f"{name} (metadata)" for name in names if name in epsilons.details}
        rows = recorded_run.in_rows_of(epsilons, examples).train_rows(ids)
        epsilon_table.write_epsilons(epsilons, output_dir / EPSILON, rows, names)
    for file, copied in copies.items():
        if copied is not None:
            copied.to_parquet(output_dir / file)
    if attacks is not None:
        _files.write_private_parquet(attacks, output_dir / ATTACK_TABLE)
    page = audit_page(summary, since)
    html = page.html(pictures, reconstructed, search)
    for file, content in {REPORT: html, MARKDOWN: page.markdown()}.items():
        _files.write_atomically(output_dir / file, content.encode("utf-8", "replace"))
    _files.write_json(output_dir / SUMMARY, summary.to_json())


def read_audit(audit_dir: Path) -> tuple[epsilon_table.EpsilonTable, example_table.ExampleTable]:
    """The tables of an audit; InputError for no audit, or one of a run without an example table."""
    audit_dir = _storage.location(audit_dir)
    _check_is_audit(audit_dir)
    if not (audit_dir / EXAMPLES).is_file():
        raise refused("refusal.audits", "no_examples", folder=audit_dir, name=EXAMPLES)
    table = epsilon_table.EpsilonTable.open(audit_dir / EPSILON).table()
    return table, recorded_run.in_rows_of(
        table, example_table.ExampleTable.from_parquet(audit_dir / EXAMPLES)
    )


def _check_is_audit(audit_dir: Path) -> None:
    _folders.named_by_person(audit_dir)
    if (audit_dir / SUMMARY).is_file():
        return
    if not audit_dir.exists():
        raise refused("refusal.audits", "absent", audit_dir=audit_dir)
    inside = audit_dir / "audit"  # where `indpriv audit` writes unless told otherwise
    if (inside / SUMMARY).is_file():
        remedy = f"its audit is in {inside}: pass that directory"
    elif holds_log(audit_dir):
        remedy = f"it is a run: type indpriv audit {audit_dir}, and then pass {inside}"
    else:
        remedy = f"make an audit first: indpriv audit RUN --output-dir {audit_dir}"
    raise InputError(f"{audit_dir} holds no {SUMMARY}; {remedy}")


def audit_in(folder: Path) -> Path:
    """The folder, or, for a run, the audit that `indpriv audit` wrote in it; InputError if none."""
    folder = _storage.location(folder)
    inside = folder / "audit"
    if not (inside / SUMMARY).is_file() or not holds_log(folder):
        return folder
    if not made_here(inside):
        raise refused("refusal.audits", "of_a_stranger", inside=inside, folder=folder)
    return inside


def read_summary(audit_dir: Path) -> dict[str, Any]:
    """The content of audit.json; InputError where it lacks what the epsilons mean."""
    audit_dir = _storage.location(audit_dir)
    path = audit_dir / SUMMARY
    _check_is_audit(audit_dir)
    summary: dict[str, Any] = _files.read_json(path)
    check(_SUMMARY, summary, str(path))
    with named(path, "make the audit again"):
        Audit.from_json(summary)
    return summary


def groups_of(
    audit_dir: Path, by: Sequence[str], *, within: str | None = None, min_size: int = MIN_GROUP
) -> tuple[GroupTable, ...]:
    """Group tables of an audit directory; default by the label and every metadata column.

    `by` is as of `indpriv.analysis.groups.group_table`. within="label": only tables within label
    are wanted, and a column without them is refused. A group with fewer training examples than
    min_size is too small to read.
    """
    table, examples = read_audit(audit_dir)
    train = examples.aligned(table.example_ids)
    columns, _ = recorded_run.choose_groups(train, by, ())
    if within is not None:
        _checks.check_choice("within", within, ("label",))
        columns = columns if by else [column for column in columns if column != "label"]
        if not columns:
            raise refused("refusal.audits", "only_label")
    tables = group_tables(table, train, examples.test, columns, min_size=min_size)
    for found in tables if within is not None else ():
        if not found.within_label:
            because = f": {found.notes[0]}" if found.notes else ""
            if "label" in found.columns:
                because = ": it groups by the label itself"
            raise refused("refusal.audits", "within", by=found.by, because=because)
    return tables


def groups_json(tables: Sequence[GroupTable], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Group tables as JSON values, each with the meaning of its epsilons from audit.json."""
    meaning = {name: summary[name] for name in ("sensitive", "disclaimer", "meaning", "claim")}
    meaning["worst_case_epsilon"] = summary["guarantee"]["worst_case_epsilon"]
    return [{**meaning, **_plain.to_json(table)} for table in tables]


def compare_audits(
    audit_dirs: Sequence[Path],
    by: Sequence[str] = (),
    *,
    at_epsilon: float | None = None,
    at_accuracy: float | None = None,
) -> dict[str, Any]:
    """Compare two or more audits of the same data, each once; a run stands for the audit in it.

    Groups are by the label and every metadata column by default. Test accuracies at the worst case
    at_epsilon, and worst cases at the accuracy at_accuracy, are read off the curves of the runs.
    The result is what `show --json` prints, with data frames; comparisons[i] compares audits[0]
    with audits[i + 1], and readings are of each audit, None for a run without a curve. InputError
    for fewer than two directories, one of them twice, and audits that cannot be compared.
    """
    if at_epsilon is not None:
        _checks.check_number("at_epsilon", at_epsilon, "(0, inf)")
    if at_accuracy is not None:
        _checks.check_number("at_accuracy", at_accuracy, "[0, 1]", "0.95 means 95 %")
    folders = [audit_in(Path(folder).resolve()) for folder in audit_dirs]
    if len(folders) < 2 or len(set(folders)) < len(folders):
        raise refused("refusal.audits", "too_few", n=len(set(folders)))
    summaries = [read_summary(folder) for folder in folders]
    audits = [read_audit(folder) for folder in folders]
    table, examples = audits[0]
    train = examples.aligned(table.example_ids)
    columns, _ = recorded_run.choose_groups(train, by, ())
    settings = [
        [one.get("account", {}).get("between_records"), *map(one.get("run", {}).get, _SETTINGS)]
        for one in summaries
    ]
    same = all(found == settings[0] for found in settings)
    asked = at_epsilon is not None or at_accuracy is not None
    curves = map(Audit.from_json, summaries if asked else ())
    of_each = ("claim", "claim_reason", "name", "guarantee")
    return {
        **{name: summaries[0][name] for name in ("sensitive", "disclaimer", "meaning")},
        "audits": [{name: one.get(name) for name in of_each} for one in summaries],
        "comparisons": [compare_tables(audits[0], other, columns) for other in audits[1:]],
        "stability": stability_of(
            [found for found, _ in audits], train, columns, same_settings=same
        ),
        "at_epsilon": at_epsilon,
        "at_accuracy": at_accuracy,
        "readings": [schedule.read_curve(one, at_epsilon, at_accuracy) for one in curves],
    }
