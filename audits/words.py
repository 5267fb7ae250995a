"""Words that several experiments share."""

from collections.abc import Sequence


def attributed(texts: Sequence[tuple[str, str]]) -> str:
    """One text if all are alike; else each different one, with the names of what it is of.

    texts: pairs of a text and a name.

    >>> attributed([("delta 1e-5", "a"), ("delta 1e-5", "b")])
    'delta 1e-5'
    >>> attributed([("delta 1e-5", "a"), ("delta 1e-6", "b"), ("delta 1e-5", "c")])
    'delta 1e-5 (a; c), and delta 1e-6 (b)'
    """
    names: dict[str, list[str]] = {}
    for text, name in texts:
        names.setdefault(text, []).append(name)
    if len(names) == 1:
        return next(iter(names))
    return ", and ".join(f"{text} ({'; '.join(dict.fromkeys(own))})" for text, own in names.items())
