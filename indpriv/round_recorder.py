"""RoundRecorder: rounds of any federated trainer -> NormLog. Needs no torch; files are sensitive.

A client that takes part in a round sends one update. The server clips it at max_grad_norm, adds the
updates up and adds noise. This log holds who took part and the norm of each update before clipping,
which is all that an account with known participation needs.
"""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from indpriv import _checks, _facts, _files, _storage
from indpriv._types import ArrayLike, FloatArray, IntArray
from indpriv.attack_scores import CanaryEvidence
from indpriv.errors import InputError
from indpriv.norm_log import evidence, fields, journal_state, run_files, writer
from indpriv.norm_log.session_counts import DrawCounts, RoundCounts, SessionCounts

ROUNDING = 1e-3  # by which float32 may leave a clipped update longer than max_grad_norm


class CanaryClients:
    """Made-up clients that join a federated run to audit it in one run.

    After Andrew, Kairouz, Oh, Oprea, McMahan and Suriyakumar 2023 (arXiv:2302.03098). A canary
    sends the same update in every round that it joins: random signs on coordinates of its own, of
    norm max_grad_norm, so that canaries are orthogonal. A fair coin makes it a member, which the
    bounds from one run need, and members join a round by chance, at its sample_rate. The score is
    the log-likelihood ratio of what the released updates show along its direction. Canaries are no
    data: the noise on a direction is perturbed by at most max_grad_norm in a round.

    Args:
        count: number of canaries, at most size.
        size: number of values of an update.
        lengths: norms of their updates over max_grad_norm, in (0, 1], taken in turn. Canaries of
            full length test the worst case, shorter ones the epsilon of a client of that norm.
        seed: makes directions and coins reproducible: for tests. None draws them from the
            operating system.
    """

    def __init__(
        self, count: int, size: int, *, lengths: Sequence[float] = (1.0,), seed: int | None = None
    ) -> None:
        _checks.check_positive_int("count", count)
        _checks.check_positive_int("size", size)
        _checks.check_row("lengths", lengths, "(0, 1]")
        if count > size:
            raise _facts.refused("refusal.rounds", "canaries", count=count, size=size)
        self._rng, self.size = np.random.default_rng(seed), size
        self.evidence = CanaryEvidence(count, lengths, self._rng)
        self._places = self._rng.permutation(size)[: size // count * count].reshape(count, -1)
        signs = self._rng.choice([-1.0, 1.0], self._places.shape)
        self._directions = signs / np.sqrt(signs.shape[1])
        self._joined, self._knew_sums, self.n_rounds = (np.nan, np.nan), True, 0

    def join(self, *, sample_rate: float, max_grad_norm: float) -> FloatArray:
        """What the canaries that join this round add to the sum of clipped updates, (size,)."""
        member, lengths = self.evidence.member, self.evidence.lengths
        sent = member * lengths * max_grad_norm * (self._rng.random(len(member)) < sample_rate)
        found, self._joined = np.zeros(self.size), (sample_rate, max_grad_norm)
        found[self._places] = self._directions * sent[:, None]
        return found

    def checked(
        self, released: ArrayLike | None, clients_sum: ArrayLike | None, told: tuple[Any, float]
    ) -> FloatArray:
        """What a round shows along each direction; InputError unless they joined as it is told."""
        if self._joined != told:
            raise _facts.refused("refusal.rounds", "joined", joined=self._joined, told=told)
        seen = np.zeros(0) if released is None else np.asarray(released, dtype=np.float64)
        others = np.zeros(seen.shape) if clients_sum is None else np.asarray(clients_sum)
        for name, values in (("released", seen), ("clients_sum", others)):
            if values.shape != (self.size,) or not np.isfinite(values).all():
                raise _facts.refused("refusal.rounds", "released", name=name, size=self.size)
        return np.asarray(((seen - others)[self._places] * self._directions).sum(axis=1))

    def observe(self, seen: FloatArray, setting: Mapping[str, Any], *, knew_sums: bool) -> None:
        """Add what a round showed, now that it is in the log."""
        self.evidence.observe(seen, setting)
        self._joined, self.n_rounds = (np.nan, np.nan), self.n_rounds + 1
        self._knew_sums &= knew_sums

    def write(self, run_dir: Path, n_rounds: int) -> None:
        """Write the scores; InputError unless every round said what it released."""
        if self.n_rounds != n_rounds:
            raise _facts.refused("refusal.rounds", "unseen", n=n_rounds - self.n_rounds)
        name = run_files.GRADIENT_CANARIES if self._knew_sums else run_files.CANARIES
        self.evidence.scores("likelihood ratio of canary clients").to_parquet(run_dir / name)


class RoundRecorder:
    """Records the rounds of one federated run. Use it as a context manager.

    When `round` returns, the round is written and survives a crash. Call it before the new model
    leaves the server: a model that others saw without its round in the log is in no account.

    Args:
        run_dir: a new directory for the run (0700).
        client_ids: (n_clients,) unique ids of all clients that may ever take part.
        sampler: what chooses the participants of a round: "poisson" (independent coins),
            "fixed_size" (a random set of one size), "shuffled", "sequential", "by_client", or
            "other".
        rounding: of norms, upwards, as a fraction of max_grad_norm; 0 keeps float64.
        unit: what is protected: "client"; "example", whose ids are those of rows with clipped and
            noised gradients of their own, with the client of each as unit_ids; or "row" if some of
            these are copies, with the original row of each as unit_ids.
        unit_ids: (n,) of rows only.
        clipping: "flat", or "per_layer": norms are then of what clipping leaves.
        seeded: sampling or noise use a known seed: the run gives no privacy, and is labelled so.
        resume_at: continue the log in run_dir after this number of rounds; later ones become void.
        upload_to: address to which the run is sent when it is closed, e.g. s3://bucket/runs/phones.
        bucket_is_private: say that only those who may see norms can read that bucket.
        sign_with: path of an OpenSSH private key that signs the log, as for `Recorder`.
        run_info: what else to keep in run.json, e.g. {"delta": 1e-5}.
        canaries: made-up clients that audit the run; every round then says what it released. Their
            scores are in the run directory once it is closed, where `indpriv audit` judges them.

    Raises:
        InputError: empty or repeated ids, an unknown word, a run directory in use, or a bucket; or
            canaries on resuming, as their scores ended with the earlier process.
        EvidenceError: on resuming, the log is of other clients or settings.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with RoundRecorder(folder, ["a", "b", "c"], sampler="fixed_size") as recorder:
    ...         recorder.round(["c", "a"], [0.3, 1.7], noise_multiplier=1.0, max_grad_norm=0.5)
    ...         recorder.n_rounds
    1
    """

    def __init__(
        self,
        run_dir: str | Path,
        client_ids: ArrayLike,
        *,
        sampler: str,
        rounding: float = 0.01,
        unit: str = "client",
        unit_ids: ArrayLike | None = None,
        clipping: str = "flat",
        seeded: bool = False,
        resume_at: int | None = None,
        upload_to: str | Path | None = None,
        bucket_is_private: bool = False,
        sign_with: str | Path | None = None,
        run_info: Mapping[str, Any] | None = None,
        canaries: CanaryClients | None = None,
    ) -> None:
        if canaries is not None and resume_at is not None:
            raise _facts.refused("refusal.rounds", "canaries_resumed")
        if not isinstance(canaries, CanaryClients | None):
            raise InputError(f"canaries={canaries!r} is no indpriv.CanaryClients(count, size)")
        self._canaries, info = canaries, run_files.checked_run_info(run_info)
        self._key = run_files.signing_key(sign_with)
        self.run_dir = _storage.location_on_disk(run_dir, "a run is")
        self._upload_to = _storage.bucket_to_write(upload_to, bucket_is_private)
        ids = np.asarray(client_ids)
        fields.check_ids(ids, ids.size, "client_ids")
        fields.check_words(sampler, unit, "zero_out")
        own = unit_ids is None and unit != "example"
        owners, name = (ids, "client_ids") if own else (unit_ids, "unit_ids")
        units = fields.check_unit_ids(owners, len(ids), unit, name)
        header = writer.LogHeader(
            rounding=_checks.check_rounding(rounding),
            rounding_mode="up",
            unit=unit,
            neighbouring="zero_out",  # who may take part is public
            sampler=sampler,
            individually_clipped=False,
            norm_pass={"backend": "a federated trainer", "slack": 0.0, "caveats": []},
            run={
                "id": secrets.token_hex(8),
                "rounds": True,
                "clipping": _checks.check_choice("clipping", clipping, ("flat", "per_layer")),
                "seeded": seeded,
            },
        )
        if resume_at is not None:
            resume_at = _checks.check_positive_int("resume_at", resume_at, minimum=0)
        state = journal_state.state_to_resume(self.run_dir, resume_at)
        self._sampler, self._seeded, self._clipping = sampler, seeded, clipping
        self._of = "client" if unit == "client" else "example"
        self._caveats: dict[str, None] = {evidence.SEEDED: None} if seeded else {}
        self._ids = pd.Index(ids)
        self._from = self._next = resume_at or 0
        self._participations: IntArray = np.zeros(len(ids), np.int64)
        self._sizes = dict[str, int]()  # how many took part in a round: fewest, most
        drawn = [one.draws for one in state.sessions if one.draws] if state else []
        self._earlier = [n for one in drawn for n in (one.size_min, one.size_max) if n is not None]
        self._owners = pd.factorize(ids if units is None else units)[0]
        self._rows = np.bincount(self._owners)  # of each owner
        self._draws = {"expected": 0.0, "variance": 0.0, "together": 0.0, "together_expected": 0.0}
        self._writer = writer.NormLogWriter(self.run_dir, header, ids, units)
        with _files.on_failure(self.close):
            if state is not None:
                self._writer.truncate(self._from)
            if state is None or run_info is not None:
                about = {"name": self.run_dir.resolve().name, **info}
                _files.write_json(self.run_dir / run_files.RUN_JSON, about)
            if state is None:
                run_files.sign(self.run_dir, self._key)

    @property
    def n_rounds(self) -> int:
        """Number of rounds in the log."""
        return self._next

    def round(
        self,
        participants: ArrayLike,
        norms: ArrayLike,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        sample_rate: float | None = None,
        number: int | None = None,
        released: ArrayLike | None = None,
        clients_sum: ArrayLike | None = None,
    ) -> None:
        """Append one round, and wait until it is written.

        Args:
            participants: (m,) ids of the clients whose updates are in the sum, each once.
            norms: (m,) norms of their updates before clipping, in the order of participants; sum
                their squares in float64. Where clients count with different weights, the norm of
                each update times its weight over the largest one.
            noise_multiplier: standard deviation of the noise on the sum, over max_grad_norm.
            max_grad_norm: what each update was clipped at.
            sample_rate: chance of a client to be chosen, which "poisson" needs; default the largest
                share of the clients that took part. Fewer of "fixed_size" make an estimate.
            number: of the round, from 0; checked to be the next one.
            released: (size,) the noisy sum of all updates, with canaries, before it is averaged;
                needed where there are canaries.
            clients_sum: (size,) the same without noise and canaries, which is then subtracted, as
                the attacker of the analysis does. Scores then have a known distribution, with which
                they are compared. None: the attacker sees the released updates alone.

        Raises:
            InputError: unknown or repeated participants, norms that are NaN or negative or do not
                fit them, a round that is not the next one, a setting out of range or not a number,
                or a closed recorder: nothing is written. Or a bucket that cannot be written.
        """
        setting: dict[str, Any] = {"max_grad_norm": max_grad_norm, "sample_rate": sample_rate}
        setting["noise_multiplier"] = noise_multiplier
        if (canaries := self._canaries) is not None:
            seen = canaries.checked(released, clients_sum, (sample_rate, max_grad_norm))
        self.steps([participants], [norms], number=number, **setting)
        if canaries is not None:
            canaries.observe(seen, setting, knew_sums=clients_sum is not None)

    def steps(
        self,
        participants: Sequence[ArrayLike],
        norms: Sequence[ArrayLike],
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        sample_rate: float | None = None,
        number: int | None = None,
    ) -> None:
        """Append several steps of equal settings together, as the local steps of one round.

        Participants and norms are a sequence, one of each step; `number` is that of the first.
        """
        if number is not None and number != self._next:
            raise _facts.refused("refusal.rounds", "number", number=number, following=self._next)
        if _checks.check_clipping_norm_epsilon(0.0, max_grad_norm):
            raise _facts.refused("refusal.rounds", "private", norm=max_grad_norm)
        if sample_rate is None and self._sampler == "poisson":
            raise _facts.refused("refusal.rounds", "rate")
        before = () if sample_rate is not None else (*self._earlier, *self._sizes.values())
        if sample_rate is None:
            most = max((1, *before, *(np.size(who) for who in participants)))
            sample_rate = min(1.0, most / len(self._ids))
        values, shared = (noise_multiplier, max_grad_norm, sample_rate), dict[str, float]()
        for name, value in zip(fields.SETTING_NAMES, values, strict=True):
            if (setting := _checks.check_setting(name, value)).ndim:
                raise _facts.refused("refusal.rounds", "setting", name=name, n=setting.size)
            shared[name] = float(setting)
        clip, rate = shared["max_grad_norm"], shared["sample_rate"]
        found = [self._checked(*step) for step in zip(participants, norms, strict=True)]
        if not found:
            return
        batches = [(positions, lengths) for positions, lengths, _ in found]
        longest = max(lengths.max(initial=0.0) for _, lengths in batches)
        if self._clipping == "per_layer" and longest > clip * (1 + ROUNDING):
            raise _facts.refused("refusal.rounds", "longer", longest=longest, clip=clip)
        came, planned = [len(who) for who, _ in batches], round(rate * len(self._ids))
        if self._sampler == "fixed_size":
            if (most := max(came)) > planned:
                raise _facts.refused("refusal.rounds", "more", n=most, planned=planned, rate=rate)
            if min((*before, *came)) < planned:
                self._caveats[_facts.text("sentence.claim", "fewer")] = None
        self._caveats |= {caveat: None for *_, caveat in found if caveat}
        several = self._rows > 1
        with _files.on_failure(self.close):  # half a round may be on disk: nothing may follow it
            came += self._sizes.values()
            self._sizes = {"size_min": min(came), "size_max": max(came)}
            for positions, _ in batches:
                self._participations[positions] += 1
                here = np.bincount(self._owners[positions], minlength=len(several))
                self._draws["together"] += float((here == self._rows)[several].sum())
                self._draws["together_expected"] += float((rate ** self._rows[several]).sum())
                self._draws["expected"] += rate
                self._draws["variance"] += rate * (1 - rate)
            first, self._next = self._next, self._next + len(batches)
            self._writer.free(first, batches, np.full(len(batches), clip))
            self._writer.steps(first, len(batches), **shared, counts=self._counts())

    def close(self) -> None:
        """Release the directory. The log then says that the run did not end as intended."""
        self._writer.close()

    def __enter__(self) -> "RoundRecorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with _storage.uploaded(self.run_dir, self._upload_to, or_warn=True):
            try:
                if kind is None and self._canaries is not None:
                    self._canaries.write(self.run_dir, self._next)
                if kind is None:
                    self._writer.finish(self._counts())
            finally:
                self.close()
            if kind is None:
                run_files.seal(self.run_dir, self._key)

    def _counts(self) -> SessionCounts:
        steps, taken = self._next - self._from, self._participations
        return SessionCounts(
            from_step=self._from,
            seeded=self._seeded,
            caveats=tuple(self._caveats),
            sampler=self._sampler,
            rounds=RoundCounts(of=self._of, steps=steps, took_part=writer.fingerprint(taken)),
            draws=DrawCounts.of(taken, draws=steps, **self._draws, **self._sizes),
        )

    def _checked(self, who: ArrayLike, lengths: ArrayLike) -> tuple[IntArray, FloatArray, str]:
        """Positions and norms of the participants of one step, and the caveat of these norms."""
        names, norms = np.asarray(who), np.asarray(lengths)
        if names.ndim != 1 or norms.shape != names.shape:
            raise _facts.refused("refusal.rounds", "shapes", ids=names, norms=norms)
        if not len(names):
            return np.zeros(0, np.int64), np.zeros(0), ""
        wanted = pd.Index(names)
        positions: IntArray = self._ids.get_indexer(wanted).astype(np.int64)
        # pandas finds 2**53 + 1 for 2.0**53.
        same = self._ids[positions].astype(object) == wanted.astype(object)
        if unknown := names[(positions < 0) | ~same].tolist():
            n, known = len(unknown), self._ids
            values = {"of": len(names), "clients": len(known), "ids": names, "known": known}
            raise _facts.refused("refusal.rounds", "unknown", n=n, example=unknown[0], **values)
        if twice := [*dict.fromkeys(names[wanted.duplicated()].tolist())]:
            raise _facts.refused("refusal.rounds", "twice", n=len(twice), example=twice[0])
        fields.check_norms(norms, names)
        return positions, *fields.widened(norms)
