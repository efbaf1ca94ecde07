"""The errors Ratchet raises. One root, one class for each boundary an error can cross.

Every message is one readable line: the object, what was expected, what was found, what to do.
"""


class RatchetError(Exception):
    """Root of every error that is meant for the user; the command line prints it without a traceback."""


class ConfigError(RatchetError, ValueError):
    """A setting, an override or the graph is wrong. Raised before anything starts."""


class DataError(RatchetError, ValueError):
    """A dataset, manifest or row breaks its contract."""


class Conflict(RatchetError):
    """Something immutable exists already with other content."""


class EngineError(RatchetError):
    """An inference engine answered wrongly, late or not at all."""


class TrainerError(RatchetError):
    """The trainer's process group refused a command or died."""


class HandoverError(RatchetError):
    """A co-located pool was asked for what its state does not allow, or could not change it."""


class CheckpointError(TrainerError):
    """A training checkpoint is incomplete or damaged: an older one may still do."""


class PublishError(RatchetError):
    """A weight version could not be proven on every engine; `step` is P0..P5 or Q0..Q11 (see docs/publish.md)."""

    def __init__(self, step: str, message: str) -> None:
        super().__init__(f"publish step {step}: {message}")
        self.step = step
        self.message = message


class StageError(RatchetError):
    """A stage cannot produce a correct output, for example because too many rewards failed."""


class RunError(RatchetError):
    """The run as a whole cannot start or continue: locked, changed settings, a service gone."""
