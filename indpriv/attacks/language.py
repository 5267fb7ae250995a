"""Membership and extraction of texts by the logits of one's own language model. Sensitive.

The model is any module that takes `input_ids` (batch, length) and returns an object with `logits`
(batch, length, vocabulary), as those of Hugging Face do; transformers is not imported.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from indpriv._checks import check_number, check_positive_int
from indpriv._facts import refused
from indpriv._types import ArrayLike, BoolArray, FloatArray, IntArray
from indpriv.attack_scores import AttackScores

_TOKENS = 1 << 12  # in a call of the model
_AT_ONCE = 128  # tokens whose logits are in double precision together
_SAME = 1e-3  # of logits that should be equal, but are computed in half precision


@dataclass(frozen=True)
class KnownTexts:
    """What a language model says of n texts; see `known_texts`.

    Attributes:
        member: (n,) bool, whether the model was trained on each.
        mean: (n,) mean log-probability, in nats, of all tokens of a text but the first.
        least: (n,) the same of its least likely tokens.
        standardised: (n,) the same, with log-probabilities less their mean over the vocabulary, by
            the model, over their standard deviation there.
        compressed: (n,) bytes that zlib leaves of the text.
        reference: (n,) mean log-probability by a reference model.
        after: (n,) mean log-probability after a prefix.
        about: further fields of `AttackScores`.
    """

    member: BoolArray
    mean: FloatArray
    least: FloatArray
    standardised: FloatArray
    compressed: FloatArray | None
    reference: FloatArray | None
    after: FloatArray | None
    about: Mapping[str, Any]

    def scores(self, rule: Callable[[Any], FloatArray], otherwise: float = 0.0) -> AttackScores:
        """Scores by a rule; otherwise: what they are where both parts are infinite, or both 0."""
        with np.errstate(invalid="ignore", divide="ignore"):
            found = rule(self)
        found = np.where(np.isnan(found), otherwise, found)
        return AttackScores(found, self.member, "", **self.about)


def known_texts(
    model: Any,
    ids: Sequence[ArrayLike],
    member: ArrayLike,
    *,
    texts: Sequence[str] | None = None,
    reference: Any = None,
    prefix: ArrayLike | None = None,
    share: float = 0.2,
    **about: Any,
) -> KnownTexts:
    """What a language model says of texts, for the attacks of the registry that need texts.

    Args:
        model: a causal model; it is called in eval mode, without gradients.
        ids: n texts, each a row of at least 2 token ids, without padding.
        member: (n,) bool, whether each was trained on, e.g. the coins of `InsertedCanaries`.
        texts: the same as strings, for zlib, e.g. tokenizer.batch_decode(ids).
        reference: a model of the same tokens that was trained on none of the texts.
        prefix: token ids of texts that were not trained on, one after another, for recall.
        share: of tokens that are the least likely ones, in (0, 1].
        about: further fields of `AttackScores`: groups, example_ids; fair_coins=True if an
            independent fair coin decided on each text.
    """
    rows = _rows(ids)
    check_number("share", share, "(0, 1]")
    kept = np.asarray(member)
    if kept.dtype != np.bool_:
        raise refused("refusal.language", "coins", found=kept.dtype)
    _check_lengths(len(rows), member=kept, texts=texts)
    tokens = list(_tokens(model, rows))
    least = (np.sort(one[:, :2], axis=0)[: max(1, int(share * len(one)))] for one in tokens)
    both = np.array([of.mean(axis=0) for of in least])
    after = None
    if prefix is not None:
        before = np.asarray(prefix).reshape(-1)
        longer = _tokens(model, _rows([np.concatenate([before, row]) for row in rows]))
        after = _means(each[1 - len(row) :] for each, row in zip(longer, rows, strict=True))
    sizes = [len(zlib.compress(text.encode())) for text in texts or ()]
    return KnownTexts(
        member=kept,
        mean=_means(tokens),
        least=both[:, 0],
        standardised=both[:, 1],
        compressed=None if texts is None else np.array(sizes, np.float64),
        reference=None if reference is None else _means(_tokens(reference, rows)),
        after=after,
        about=about,
    )


def _means(tokens: Iterable[FloatArray]) -> FloatArray:
    """(n,) mean log-probability of the tokens of each text."""
    return np.array([each[:, 0].mean() for each in tokens])


def extraction(
    model: Any,
    ids: Sequence[ArrayLike],
    start: ArrayLike,
    *,
    samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> pd.DataFrame:
    """The chance that the model emits the end of each text, asked with its beginning. Exact.

    Nothing is sampled: the probability of an end is the product over its tokens. What others write
    too comes out of a model that never saw the text: compare with texts that were not trained on.
    Epsilon bounds the chance of a random secret by
    `indpriv.analysis.guarantee.true_positive_bound` at the rate samples / candidates.

    One row for each text, with the columns
    log_probability: of emitting the end in one sample, in nats.
    chance: of emitting it in one of n samples at least; where it is p or more, the text is
        (n, p)-discoverable (Hayes et al. 2025, arXiv:2410.19482).
    greedy: whether every token of the end is the most likely one.
    bits: sum of log2 of the tokens' ranks, 0 where greedy. A sampler that never prefers a less
        likely token gives rank r at most 1/r, so that none emits the end with more than 2^-bits:
        the rank bound of (l, b)-inextractability (Liu, Evans and Xiong 2026, arXiv:2604.18697),
        with every rank counted and for this beginning.

    Args:
        model: as of `known_texts`.
        ids: as of `known_texts`.
        start: number of tokens of the beginning, at least 1; one for all, or (n,).
        samples: number of independent samples, n.
        temperature: logits are divided by it; above 0.
        top_k: only the top_k most likely tokens, and those that tie with the last, are sampled.
    """
    rows = _rows(ids)
    _check_lengths(len(rows), start=None if np.ndim(start) == 0 else start)
    starts = np.broadcast_to(np.asarray(start), (len(rows),))
    for k, (row, first) in enumerate(zip(rows, starts, strict=True)):
        if not 1 <= first < len(row) or first != int(first):
            raise refused("refusal.language", "start", k=k, start=first, n=len(row))
    check_positive_int("samples", samples)
    check_number("temperature", temperature, "(0, inf)")
    check_positive_int("top_k", 1 if top_k is None else top_k)
    read = _tokens(model, rows, temperature, top_k)
    ends = [each[int(first) - 1 :] for each, first in zip(read, starts, strict=True)]
    log_p = np.minimum([end[:, 0].sum() for end in ends], 0.0)
    bits = np.array([end[:, 2].sum() for end in ends])
    with np.errstate(divide="ignore"):  # no chance to miss
        chance = -np.expm1(samples * np.log1p(-np.exp(log_p)))
    found = {"log_probability": log_p, "chance": chance, "greedy": bits == 0, "bits": bits}
    return pd.DataFrame(found)


def _rows(ids: Sequence[ArrayLike]) -> list[IntArray]:
    """Each text as a row of token ids."""
    rows = [np.asarray(row) for row in ids]
    if not rows:
        raise refused("refusal.language", "none")
    for k, row in enumerate(rows):
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise refused("refusal.language", "ids", k=k, kind=row.dtype, shape=row.shape)
        if len(row) < 2:
            raise refused("refusal.language", "short", k=k, n=len(row))
    return [row.astype(np.int64) for row in rows]


def _check_lengths(n: int, **columns: Any) -> None:
    for name, given in columns.items():
        if given is not None and len(given) != n:
            raise refused("refusal.language", "lengths", name=name, found=len(given), n=n)


def _tokens(
    model: Any, rows: Sequence[IntArray], temperature: float = 1.0, top_k: int | None = None
) -> Iterator[FloatArray]:
    """(length - 1, 3) of each text, in order: what the model says of each token but the first.

    Its log-probability when sampled, in nats; its log-probability by the model, standardised over
    the vocabulary; log2 of its rank, 0 of the most likely one.
    """
    import torch  # here, since the audit side works without it

    if not isinstance(model, torch.nn.Module):
        raise refused("refusal.language", "model", kind=type(model).__name__)
    modes = {module: module.training for module in model.modules()}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    longest = max(map(len, rows))
    # Padding stands at the end, where a causal model does not see it.
    ids: Any = torch.zeros((len(rows), longest), dtype=torch.long)
    for row, places in zip(rows, ids, strict=True):
        places[: len(row)] = torch.as_tensor(row)
    size = max(1, _TOKENS // longest)
    model.eval()
    try:
        with torch.no_grad():
            both = ids[:1, : len(rows[0])].repeat(2, 1)  # what comes last must not change the rest
            both[1, -1] = next(token for token in (both[0, 0], 0, 1) if token != both[0, -1])
            one, two = _logits(model, both.to(device))[:, :-1].cpu().double().numpy()
            if not np.allclose(one, two, rtol=_SAME, atol=_SAME, equal_nan=True):
                raise refused("refusal.language", "causal")
            for first in range(0, len(rows), size):
                widest = max(map(len, rows[first : first + size]))
                batch = ids[first : first + size, :widest].to(device)
                for k, logits in enumerate(_logits(model, batch), first):
                    targets = batch[k - first, 1 : len(rows[k])]
                    parts = zip(
                        logits[: len(targets)].split(_AT_ONCE), targets.split(_AT_ONCE), strict=True
                    )
                    each = [torch.cat(_statistics(*one, temperature, top_k), 1) for one in parts]
                    found: FloatArray = torch.cat(each).cpu().numpy()
                    if np.isnan(found).any():
                        raise refused("refusal.language", "nan", k=k)
                    yield found
    finally:
        for module, mode in modes.items():
            module.training = mode


def _logits(model: Any, ids: Any) -> Any:
    """Logits (batch, length, vocabulary) of ids (batch, length)."""
    try:
        outputs = model(input_ids=ids)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise refused("refusal.language", "call", length=ids.shape[1], error=error) from error
    if (logits := getattr(outputs, "logits", None)) is None:
        raise refused("refusal.language", "logits", kind=type(outputs).__name__)
    shape, most = tuple(logits.shape), int(ids.max())
    if len(shape) != 3 or shape[:2] != ids.shape or shape[2] <= most:
        raise refused("refusal.language", "shape", shape=shape, ids=tuple(ids.shape), most=most)
    return logits


def _statistics(logits: Any, target: Any, temperature: float, top_k: int | None) -> Any:
    """As of `_tokens`, of logits (n, vocabulary) and the tokens (n,)."""
    logits, target = logits.double(), target[:, None]
    log_p = logits.log_softmax(1)
    p, finite = log_p.exp(), log_p.nan_to_num(neginf=0.0)  # 0 log 0 = 0
    mean = (p * finite).sum(1, keepdim=True)
    spread = (p * (finite - mean) ** 2).sum(1, keepdim=True).sqrt()
    standardised = (log_p.gather(1, target) - mean) / spread.clamp(min=1e-9)
    rank = 1 + (logits > logits.gather(1, target)).sum(1, keepdim=True)
    sampled = logits / temperature
    if top_k is not None and top_k < logits.shape[1]:
        least = sampled.topk(top_k, dim=1).values[:, -1:]
        sampled = sampled.masked_fill(sampled < least, -math.inf)
    chosen = sampled.log_softmax(1).gather(1, target)
    return chosen, standardised, rank.double().log2()
