"""Every exception Chairlift raises on purpose.

::

    ChairliftError
    ├── ConfigError (ValueError)          a setting is unknown, out of range, or contradicts another
    ├── ModelLoadError (ValueError)       a model directory is missing, damaged, unsafe or of an unknown kind
    ├── RequestError (ValueError)         one request cannot be served as asked; nothing else is touched
    │   └── PromptTooLongError            the request needs more tokens than the model or the KV cache has
    ├── EngineDeadError (RuntimeError)    the engine cannot go on: interrupted inside a step, or its process died
    ├── OverloadedError (RuntimeError)    nothing is wrong with the request; there is no room for it now
    │   ├── WorkerLostError               the process that worked for it was ended from outside, twice
    │   ├── QueueFullError                too many requests, or prompt tokens, wait already, or for too long
    │   └── QueueTimeoutError             the request waited for as long as it may
    ├── DivergedError (RuntimeError)      training: the loss is no number any more
    ├── TemplateError (ValueError)        a chat template refused the messages, failed, or is not there
    │   └── TemplateFailedError           it has an error in itself
    └── InvariantError (AssertionError)   Chairlift itself is broken: a bug, never the caller's fault

Each message says what was given, what is allowed, and what to do.
"""

__all__ = [
    "ChairliftError",
    "ConfigError",
    "DivergedError",
    "EngineDeadError",
    "InvariantError",
    "ModelLoadError",
    "OverloadedError",
    "PromptTooLongError",
    "QueueFullError",
    "QueueTimeoutError",
    "RequestError",
    "TemplateError",
    "TemplateFailedError",
    "WorkerLostError",
]


class ChairliftError(Exception):
    """Base of every error Chairlift raises on purpose."""


class ConfigError(ChairliftError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class ModelLoadError(ChairliftError, ValueError):
    """A model directory is missing, damaged, unsafe (pickle weights) or of an unknown architecture."""


class RequestError(ChairliftError, ValueError):
    """One request cannot be served as asked. Other requests are not affected."""


class PromptTooLongError(RequestError):
    """The request needs more tokens than ``max_model_len`` or the whole KV cache can hold."""


class EngineDeadError(ChairliftError, RuntimeError):
    """The engine cannot go on: it was interrupted inside a step (Ctrl-C, out of memory), or its process died."""

    def __init__(self, message: str = "", *, taken: bool = False) -> None:
        super().__init__(message)
        self.taken = taken
        """Whether a request ends with it that had been taken on, and counts among those that have ended."""


class OverloadedError(ChairliftError, RuntimeError):
    """There is no room for the request now. ``retry_after`` says in how many seconds there should be."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WorkerLostError(OverloadedError):
    """The process that worked for the request was ended from outside, and so was the one that tried again."""


class QueueFullError(OverloadedError):
    """As many requests, or prompt tokens, wait as may (``kind`` is ``requests`` or ``tokens``), or the request would
    wait for longer than it may (``forecast``)."""

    def __init__(self, message: str, retry_after: float = 1.0, kind: str = "requests") -> None:
        super().__init__(message, retry_after)
        self.kind = kind


class QueueTimeoutError(OverloadedError):
    """The request was not started within its queue timeout."""


class DivergedError(ChairliftError, RuntimeError):
    """The loss or its gradient is no number any more. The weights are those from before the step."""


class TemplateError(ChairliftError, ValueError):
    """The chat template is missing, invalid, or raised an error while rendering."""


class TemplateFailedError(TemplateError):
    """The chat template has an error in itself: a name that is not defined, say. It did not refuse the messages."""


class InvariantError(ChairliftError, AssertionError):
    """An internal invariant does not hold. Raised by ``check_invariants()``; always a bug in Chairlift."""
