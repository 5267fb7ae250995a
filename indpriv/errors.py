"""The errors that users see: each names the argument, its value, the condition and the remedy."""


class InputError(ValueError):
    """An argument, a file or a training set-up that cannot be accounted for soundly.

    On the command line it becomes one message and exit code 2, without a traceback.
    """


class EvidenceError(InputError):
    """What a run recorded is damaged, incomplete or contradicts itself."""


class ChainError(EvidenceError):
    """The lines of a journal are whole, but they are not those that were written."""


class PrivacyWarning(UserWarning):
    """A request that gives less privacy than it seems to, e.g. because delta is large."""


class EvidenceWarning(UserWarning):
    """Something seen while training that costs the run its guarantee, with what to do."""
