"""NormLog: what a run did to each example's gradient, and all that accounting needs. Sensitive.

Records are read in blocks of examples, so that a log may be larger than memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from indpriv import _checks, _facts, _files, _folders, _storage
from indpriv._columns import Ids
from indpriv._types import ArrayLike, FloatArray, IntArray, NDArray
from indpriv.norm_log import evidence, fields, journal_state
from indpriv.norm_log import records as stored
from indpriv.norm_log.fields import StepSettings, Truncation
from indpriv.norm_log.journal_state import LogState
from indpriv.norm_log.records import BatchNormEntries, BatchNorms, Levels, Records


@dataclass(frozen=True)
class Filtered:
    """What a privacy filter did in a run; see `indpriv.PrivacyFilter`."""

    order: float  # of the filter, as the next
    rdp_cap: float
    # (n_examples,) the step from which an example's clip threshold was 0; else total_steps.
    left_out_at: IntArray


@dataclass(frozen=True)
class NormLog:
    """Realised step settings and rounded per-example gradient norms of one training run.

    Make one with `from_arrays` or `open`. Steps are 0-based; a record at step t holds norms at the
    parameters that step t starts from. Steps before the first record count at max_grad_norm.

    >>> log = NormLog.from_arrays([[0.2, 3.0]], [0], total_steps=10, noise_multiplier=1.0,
    ...                           max_grad_norm=1.0, sample_rate=0.1)
    >>> log.n_examples, log.total_steps, log.coverage
    (2, 10, 0.1)

    Attributes:
        example_ids: (n_examples,) unique ids; many are read as they are asked for.
        recorded_steps: (n_records,) strictly increasing, each below total_steps.
        settings: realised settings of all steps; less noise where clipped gradients stay longer
            than max_grad_norm by a measured share.
        levels: the rounding; 0 keeps norms in full.
        sampler: what drew the batches: "poisson", as accounts with secret participation assume,
            "truncated_poisson", "shuffled", "sequential", "fixed_size", "with_replacement" or
            "other".
        truncation: the cap on batches, of sampler "truncated_poisson"; else None.
        unit: what one person contributes.
        neighbouring: the neighbouring relation: "add_remove", "zero_out" or "replace_one".
        records: the full records.
        unit_ids: (n_examples,) the unit of each row, or None.
        individually_clipped: training clipped each example at its last record, which holds that
            level.
        caveats: reasons, found while recording, why an account of this log is an estimate.
        unreadable_steps: recorded steps whose record is damaged or missing and counts at
            max_grad_norm.
        reference_positions: positions of the examples that were recorded at every step, or None.
        reference_records: their rows, (total_steps, n_reference).
        batch_norms: norms of sampled examples, which cost no pass of their own, or None. They
            sharpen estimates, never claims.
        most_participations: largest number of times that one example was drawn; None if it was not
            counted.
        known_caveats: reasons why an account with known participation is an estimate.
        filtered: which examples a privacy filter left out; None without a filter, or if a check
            fails on which its guarantee rests.
        clipping_norm_epsilon: cost, for one row, of the private release of the data that
            max_grad_norm was set to; 0 if it was set without the data. Every epsilon includes it.
    """

    example_ids: Ids
    recorded_steps: IntArray
    settings: StepSettings
    levels: Levels
    sampler: str
    unit: str
    neighbouring: str
    records: Records
    unit_ids: NDArray[np.generic] | None = None
    individually_clipped: bool = False
    caveats: tuple[str, ...] = ()
    unreadable_steps: tuple[int, ...] = ()
    reference_positions: IntArray | None = None
    reference_records: Records | None = None
    batch_norms: BatchNorms | None = None
    filtered: Filtered | None = None
    most_participations: int | None = None
    known_caveats: tuple[str, ...] = ()
    truncation: Truncation | None = None
    clipping_norm_epsilon: float = 0.0

    @classmethod
    def from_arrays(
        cls,
        norms: ArrayLike,
        recorded_steps: ArrayLike,
        *,
        total_steps: int,
        noise_multiplier: ArrayLike,
        max_grad_norm: ArrayLike,
        sample_rate: ArrayLike,
        example_ids: ArrayLike | None = None,
        rounding: float = 0.01,
        rounding_mode: str = "up",
        individually_clipped: bool = False,
        sampler: str = "poisson",
        unit: str = "example",
        unit_ids: ArrayLike | None = None,
        neighbouring: str = "add_remove",
        caveats: Sequence[str] = (),
        batch_norms: Sequence[ArrayLike] | None = None,
        most_participations: int | None = None,
        max_batch_size: int | None = None,
        clipping_norm_epsilon: float = 0.0,
    ) -> "NormLog":
        """Make a log of norms in memory; InputError for NaN, wrong shapes and ranges, repeated ids.

        norms are (n_records, n_examples) before clipping; infinity counts as clipped. The realised
        noise_multiplier, clipping norm max_grad_norm, and Poisson sample_rate in (0, 1] have one
        value, or one for each of total_steps. rounding is a fraction of max_grad_norm, 0 for full
        precision; rounding_mode "up" never under-reports, "nearest" is the paper's. unit is
        "example", or "user", "client" or "row" (with copies), which need unit_ids. batch_norms are
        (steps, positions, norms), each (n_entries,), of all sampled examples; max_batch_size is the
        largest batch that sampler "truncated_poisson" lets through. All else is as the attributes;
        example_ids are 0..n-1 by default.
        """
        given = StepSettings.from_values(total_steps, noise_multiplier, max_grad_norm, sample_rate)
        _checks.check_flags(individually_clipped=individually_clipped)
        levels = Levels(rounding, rounding_mode)
        rows, steps = np.asarray(norms), np.asarray(recorded_steps)
        if rows.ndim != 2 or rows.dtype.kind not in "fiu":
            raise _facts.refused("refusal.norm_values", "shape", rows=rows)
        fields.check_recorded_steps(steps, len(rows), len(given))
        n = rows.shape[1]
        ids = np.arange(n) if example_ids is None else np.asarray(example_ids)
        fields.check_ids(ids, n)
        fields.check_norms(rows, ids)
        steps = steps.astype(np.int64)
        exact, narrow = fields.widened(rows)
        # One record at a time, for memory.
        coded = map(levels.encode, exact, given.max_grad_norm[steps].tolist())
        batches, narrow_batches = None, ""
        if batch_norms is not None:
            batches, narrow_batches = stored.in_memory(batch_norms, ids, given, levels)
        cost = _checks.check_clipping_norm_epsilon(clipping_norm_epsilon, max_grad_norm)
        if most_participations is not None:
            _checks.check_positive_int("most_participations", most_participations, minimum=0)
        words: dict[str, Any] = {"sampler": sampler, "unit": unit, "neighbouring": neighbouring}
        cap = fields.check_words(**words, max_batch_size=max_batch_size, n_examples=n)
        return cls(
            example_ids=ids,
            recorded_steps=steps,
            settings=given,
            levels=levels,
            **words,
            records=Records.of(np.array([*coded], levels.dtype).reshape(rows.shape)),
            truncation=cap,
            unit_ids=fields.check_unit_ids(unit_ids, n, unit),
            individually_clipped=bool(individually_clipped),
            caveats=(*caveats, *filter(None, [narrow])),
            known_caveats=(*caveats, *filter(None, [narrow_batches])),
            most_participations=most_participations,
            batch_norms=batches,
            clipping_norm_epsilon=cost,
        )

    @classmethod
    def open(cls, path: str | Path, *, unreadable: str = "refuse") -> "NormLog":
        """Open the log that a Recorder wrote in a run directory, checking every hash.

        Files in object storage, and parts of long records, are hashed when they are read.

        Args:
            path: the run directory, or its address, e.g. s3://bucket/runs/adult.
            unreadable: "refuse" a log with damaged or missing records, or count those at
                "worst_case" (max_grad_norm).

        Raises:
            EvidenceError: there is no log, a record is damaged or missing, the schema is newer, or
                the log contradicts itself.
        """
        return open_run(path, unreadable=unreadable).log

    @property
    def n_examples(self) -> int:
        """Number of examples."""
        return len(self.example_ids)

    @property
    def n_records(self) -> int:
        """Number of full records."""
        return len(self.recorded_steps)

    @property
    def total_steps(self) -> int:
        """Number of steps of the run."""
        return len(self.settings)

    @property
    def coverage(self) -> float:
        """Share of steps that have a record of every example that could be read."""
        return (self.n_records - self.n_unreadable) / self.total_steps

    @property
    def n_unreadable(self) -> int:
        """Number of records that could not be read and count at max_grad_norm."""
        return int(np.isin(self.recorded_steps, self.unreadable_steps).sum())

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[np.generic]:
        """(n_records, stop - start) codes of a block of examples; norms without rounding."""
        return self.records.read(start, self.n_examples if stop is None else stop)

    # --- other logs that the same run could have left; for more see `coarser` and so on below

    def only(self, index: Any) -> "NormLog":
        """The log with some of its records, by mask, indices or slice."""
        return replace(self, recorded_steps=self.recorded_steps[index], records=self.records[index])

    def thin(self, every: int) -> "NormLog":
        """The log that recording only at steps 0, every, 2 * every, ... would have left.

        Steps without a record of their own are skipped, never replaced by a neighbour. If a record
        is dropped, examples were clipped at levels that the thinner log does not hold, so it is not
        individually_clipped. Batch norms stay: they do not depend on when full records are made.

        Raises:
            InputError: no record is left.
        """
        _checks.check_positive_int("every", every)
        keep = self.recorded_steps % every == 0
        if not keep.any():
            few = self.recorded_steps[:5].tolist()
            raise _facts.refused("refusal.steps", "every", every=every, few=few)
        same = bool(keep.all())
        return replace(
            self.only(keep),
            individually_clipped=self.individually_clipped and same,
            filtered=None if self.individually_clipped and not same else self.filtered,
        )

    def part(self, start: int, stop: int) -> "NormLog":
        """The log of the examples at positions start to stop, in memory."""
        norms = self.batch_norms
        entries = None if norms is None else norms.read(start, stop)
        return self._of_some(slice(start, stop), self.read(start, stop), entries)

    def take(self, positions: ArrayLike) -> "NormLog":
        """The log of the examples at these positions only, in memory."""
        index = np.asarray(positions, dtype=np.int64)
        rows: NDArray[Any] = np.empty((self.n_records, len(index)), self.levels.dtype)
        norms, group = self.batch_norms, index // _files.ROW_GROUP_SIZE
        entries = [] if norms is None else [norms.read(0, 0)]
        for number in np.unique(group).tolist():  # of a row group all is read
            start = number * _files.ROW_GROUP_SIZE
            stop = min(start + _files.ROW_GROUP_SIZE, self.n_examples)
            here = np.flatnonzero(group == number)
            rows[:, here] = self.read(start, stop)[:, index[here] - start]
            if norms is not None:
                some = norms.read(start, stop).take(index[here] - start, stop - start)
                entries.append(replace(some, position=here[some.position].astype(np.int32)))
        return self._of_some(index, rows, BatchNormEntries.joined(entries) if entries else None)

    def reference_examples(self) -> "NormLog | None":
        """The log of the reference examples, with a record at every step; None without any."""
        if self.reference_positions is None or self.reference_records is None:
            return None
        return replace(
            self.only(slice(0)).take(self.reference_positions),
            recorded_steps=np.arange(self.total_steps),
            unreadable_steps=(),
            records=self.reference_records,
            filtered=None,  # levels of every step are not those that the filter charged
        )

    def _of_some(
        self, chosen: IntArray | slice, rows: NDArray[np.generic], entries: BatchNormEntries | None
    ) -> "NormLog":
        """The log of some examples, with their records and batch norms."""
        norms, filtered = self.batch_norms, self.filtered
        if norms is not None and entries is not None:
            norms = BatchNorms(norms.steps, [entries.block])
        return replace(
            self,
            example_ids=self.example_ids[chosen],
            unit_ids=None if self.unit_ids is None else self.unit_ids[chosen],
            records=Records.of(rows),
            reference_positions=None,
            reference_records=None,
            batch_norms=norms,
            filtered=filtered and replace(filtered, left_out_at=filtered.left_out_at[chosen]),
        )


def coarser(log: NormLog, rounding: float) -> NormLog:
    """The log that a coarser rounding, as a fraction of max_grad_norm, would have left."""
    if not (finer := log.levels).rounding:
        return recoded(log, Levels(rounding, "up"))
    levels = Levels(rounding, finer.rounding_mode)
    return recoded(log, levels, levels.encode(finer.norms(_every_code(finer), 1.0), 1.0))


def noisier(log: NormLog, factor: float | FloatArray) -> NormLog:
    """The log of the same norms, had the noise been larger by a factor, one or of each step."""
    noise = log.settings.noise_multiplier * factor
    return replace(log, settings=replace(log.settings, noise_multiplier=noise))


def clipped_lower(log: NormLog, share: float) -> NormLog:
    """The log of the same norms, had each max_grad_norm been smaller and the noise the same.

    So noise_multiplier rises as max_grad_norm falls. share: of max_grad_norm, in (0, 1]; one of
    `log.levels.fractions` where norms are rounded.
    """
    given, finer = log.settings, log.levels
    settings = replace(
        given,
        max_grad_norm=given.max_grad_norm * share,
        noise_multiplier=given.noise_multiplier / share,
    )
    if not finer.rounding:
        return replace(log, settings=settings, reference_positions=None, reference_records=None)
    top = int(np.searchsorted(finer.fractions, share))
    every = _every_code(finer)
    levels = Levels(1 / top, finer.rounding_mode)  # the same levels, of which those above are cut
    above = levels.encode(finer.norms(every, 1.0), share)
    codes: stored.Codes = np.where(every <= top, every, above).astype(levels.dtype)
    return replace(recoded(log, levels, codes), settings=settings)


def _every_code(levels: Levels) -> stored.Codes:
    return np.arange(levels.max_code + 1, dtype=np.uint16)


def recoded(log: NormLog, levels: Levels, codes: stored.Codes | None = None) -> NormLog:
    """The log in other levels; codes: what each becomes, None if norms are kept in full."""
    clip, norms = log.settings.max_grad_norm, log.batch_norms
    if norms is not None:
        entries = norms.read(0, log.n_examples)
        values: NDArray[Any] = entries.norm
        kept = levels.encode(values, clip[entries.step]) if codes is None else codes[values]
        norms = BatchNorms(norms.steps, [replace(entries, norm=kept).block])
    read = partial(_recoded, log.records, clip[log.recorded_steps], levels, codes)
    return replace(
        log,
        levels=levels,
        records=Records(np.arange(log.n_records), read),
        reference_positions=None,
        reference_records=None,
        batch_norms=norms,
    )


def _recoded(
    records: Records,
    max_grad_norms: FloatArray,
    levels: Levels,
    codes: stored.Codes | None,
    rows: IntArray,
    start: int,
    stop: int,
) -> NDArray[np.generic]:
    """Some rows of records as codes of other levels; see `recoded`."""
    found: NDArray[Any] = records[rows].read(start, stop)
    return levels.encode(found, max_grad_norms[rows, None]) if codes is None else codes[found]


class OpenedRun(LogState):
    """A run directory whose journal was replayed and whose files were hashed, once."""

    @cached_property
    def log(self) -> NormLog:
        """Its norms and settings; raises what `NormLog.open` raises."""
        header, lines, steps = self.header, self.lines, self.total_steps
        journal_state.check_readable(self)
        ids, units, reference = journal_state.read_ids(self)
        words = {"sampler": self.sampler, **{of: header[of] for of in ("unit", "neighbouring")}}
        cap, n = (header["run"].get(name) for name in ("max_batch_size", "n_drawn_from"))
        # A crash can leave a record whose step was not logged.
        used = {one["step"]: one for one in lines["record"] if one["step"] < steps}
        rows = [journal_state.record_of(self, line) for line in used.values()]
        reference_rows = [
            (journal_state.record_of(self, line), str(step))
            for line in lines["exact"]
            if line["file"] not in self.faults
            for step in range(line["first"], min(line["first"] + line["count"], steps))
        ]
        whole = header["n_exact"] > 0 and len(reference_rows) == steps
        recorded = np.array([*used], dtype=np.int64)
        settings = self.accounted_settings()
        if header["run"].get("clipping") in fields.CONTRIBUTIONS:
            settings = settings.steady_between(recorded)
        checks = evidence.session_checks(self)
        return NormLog(
            example_ids=ids,
            recorded_steps=recorded,
            settings=settings,
            levels=self.levels,
            **words,
            records=Records.stored([(files, "norm") for files in rows], self.levels),
            unit_ids=fields.check_unit_ids(units, len(ids), header["unit"]),
            individually_clipped=header["individually_clipped"],
            caveats=evidence.caveats_of(self, checks),
            unreadable_steps=tuple(
                step for step, files in zip(used, rows, strict=True) if None in files
            ),
            reference_positions=reference if whole else None,
            reference_records=Records.stored(reference_rows, self.levels) if whole else None,
            batch_norms=journal_state.batch_norms_of(self),
            filtered=_filtered(self, checks),
            most_participations=self.most_participations,
            known_caveats=evidence.caveats_of(self, checks, participation_known=True),
            truncation=fields.check_words(**words, max_batch_size=cap, n_examples=n or len(ids)),
            clipping_norm_epsilon=self.clipping_norm_epsilon,
        )


def _filtered(state: LogState, checks: list[_facts.Fact]) -> Filtered | None:
    """What a privacy filter did, if one watched and nothing on which its guarantee rests failed."""
    # That is all but the norms: an example was charged for its clip level, whatever its norm; and
    # for the noise as it was, too little where clipped gradients stay longer than their level.
    failed = {check.key for check in checks if check.status == _facts.FAILED}
    unread = any(line["file"] in state.faults for line in state.lines["filter"])
    if not (settings := state.header["privacy_filter"]) or state.clip_excess or unread:
        return None
    if failed - {"norms_in_training", "norm_precision"}:
        return None
    return Filtered(**settings, left_out_at=journal_state.read_left_out(state))


def open_run(path: str | Path, *, unreadable: str = "refuse", hash_all: bool = False) -> OpenedRun:
    """Replay a journal and hash its records, see `open`; with hash_all or worst_case all."""
    _folders.named_by_person(run_dir := _storage.location(path))
    run = OpenedRun(**vars(journal_state.read_state(run_dir)))
    run.unreadable, run.hashed_all = unreadable, hash_all or unreadable == "worst_case"
    run.faults = journal_state.record_faults(run)
    return run
