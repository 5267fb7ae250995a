"""The errors that users see: each names the argument, its value, the condition and the remedy."""

from importlib.util import find_spec
from sys import modules


class InputError(ValueError):
    """An argument, a file or a training set-up that cannot be accounted for soundly.

    On the command line it becomes one message and exit code 2, without a traceback.
    """


class MissingExtraError(InputError, ImportError):
    """A part of indpriv whose libraries are not installed; the message has the line to type."""


class EvidenceError(InputError):
    """What a run recorded is damaged, incomplete or contradicts itself."""


class ChainError(EvidenceError):
    """The lines of a journal are whole, but they are not those that were written."""


class PrivacyWarning(UserWarning):
    """A request that gives less privacy than it seems to, e.g. because delta is large."""


class EvidenceWarning(UserWarning):
    """Something seen while training that costs the run its guarantee, with what to do."""


def check_installed(part: str, extra: str, *libraries: str) -> None:
    """Raise MissingExtraError unless the libraries are there that an extra of indpriv installs.

    part: the part of indpriv that needs them, in the plural, as it starts a sentence.
    """
    if missing := [one for one in libraries if not (modules.get(one) or find_spec(one))]:
        raise MissingExtraError(
            f"{part} need {' and '.join(missing)}: pip install 'indpriv[{extra}]'"
        )
