"""All exceptions that Chairlift raises on purpose.

::

    ChairliftError
    ├── ConfigError (ValueError)          a setting is unknown, out of range, or contradicts another
    ├── ModelLoadError (ValueError)       a model directory is missing, damaged, unsafe or of an unknown kind
    ├── RequestError (ValueError)         one request cannot be served as asked; others are not affected
    │   └── PromptTooLongError            the request needs more tokens than the model or the KV cache has
    ├── EngineDeadError (RuntimeError)    the engine cannot go on: interrupted inside a step, or its process died
    │   └── ReplicaStartError             a replica cannot start again; the others serve on
    ├── OverloadedError (RuntimeError)    the request is valid, but there is no room for it now
    │   ├── WorkerLostError               its worker process was killed from outside, twice
    │   ├── QueueFullError                the queue is full, or the wait would be too long
    │   ├── QueueTimeoutError             the request has waited as long as it may
    │   └── DeadlineError                 the request could not be answered by its deadline
    ├── StorageError (RuntimeError)       files that the server keeps cannot be written or read now
    ├── DivergedError (RuntimeError)      training: the loss is not a finite number
    ├── TemplateError (ValueError)        the chat template is missing, failed, or refused the messages
    │   └── TemplateFailedError           the template itself has an error
    └── InvariantError (AssertionError)   a bug in Chairlift, never the caller's fault

Each message says what was given, what is allowed, and what to do.
"""

__all__ = [
    "ChairliftError",
    "ConfigError",
    "DeadlineError",
    "DivergedError",
    "EngineDeadError",
    "InvariantError",
    "ModelLoadError",
    "OverloadedError",
    "PromptTooLongError",
    "QueueFullError",
    "QueueTimeoutError",
    "ReplicaStartError",
    "RequestError",
    "StorageError",
    "TemplateError",
    "TemplateFailedError",
    "WorkerLostError",
]


class ChairliftError(Exception):
    """Base class of every error that Chairlift raises on purpose."""


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
        """Whether the engine had accepted the request. The engine's metrics then count it as an ended request."""


class ReplicaStartError(EngineDeadError):
    """A replica that was stopped for a rolling restart cannot start again. The other replicas serve on."""


class OverloadedError(ChairliftError, RuntimeError):
    """There is no room for the request now. ``retry_after`` is the number of seconds after which to try again."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WorkerLostError(OverloadedError):
    """The worker process of the request was killed from outside twice: in the first try and in the second."""


class QueueFullError(OverloadedError):
    """The queue is full. ``kind`` is the limit that was reached: ``requests``, ``tokens``, or ``forecast`` (the request
    would wait longer than it may)."""

    def __init__(self, message: str, retry_after: float = 1.0, kind: str = "requests") -> None:
        super().__init__(message, retry_after)
        self.kind = kind


class QueueTimeoutError(OverloadedError):
    """The request did not start within its queue timeout."""


class DeadlineError(OverloadedError):
    """The request could not be answered by its deadline, and was ended (``late_requests="drop"``)."""


class StorageError(ChairliftError, RuntimeError):
    """Files that the server keeps cannot be written or read now."""

    def __init__(self, message: str, *, is_full: bool = False, is_quota: bool = False) -> None:
        super().__init__(message)
        self.is_full = is_full or is_quota
        """Whether there is no room. If false, the disk fails or may only be read."""
        self.is_quota = is_quota
        """Whether the server's own limit was reached, and not the end of the disk."""


class DivergedError(ChairliftError, RuntimeError):
    """The loss or its gradient is not a finite number. The weights are unchanged since before the step."""


class TemplateError(ChairliftError, ValueError):
    """The chat template is missing, invalid, or raised an error while rendering."""


class TemplateFailedError(TemplateError):
    """The chat template itself has an error, such as an undefined name. It did not refuse the messages."""


class InvariantError(ChairliftError, AssertionError):
    """An internal invariant does not hold: always a bug in Chairlift. Raised by ``check_invariants()``."""
