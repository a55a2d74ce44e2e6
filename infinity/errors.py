"""Errors of the engine.

InfinityError
├── ConfigError(ValueError)   field, value, what is allowed, nearest valid name
├── PlacementError            what does not fit; the arithmetic; the smallest budget that does
├── DeviceOutOfMemoryError    who holds what on the device, and how much was asked
├── UnsupportedModelError     which module, what, what to do instead
├── NotGatheredError          parameter name, operation, what to do
├── CheckpointError           what is damaged or does not match, and which checkpoint is still good
│   └── CheckpointNotFoundError(FileNotFoundError)   the path where nothing is
├── IterationError            the step is lost, the engine is reset; the first failure is the cause
└── RankError                 which other rank failed, left or disagrees, and with what

The errors of the storage layer (`storage.errors`) travel unchanged: they are raised where the user's thread waits.
"""


class InfinityError(Exception):
    """Base of every error the engine raises on purpose."""


class ConfigError(InfinityError, ValueError):
    """A setting is unknown, of the wrong kind, or contradicts another one."""


class PlacementError(InfinityError):
    """The budgets cannot hold what one step needs at the same time."""


class DeviceOutOfMemoryError(InfinityError):
    """A device allocation would exceed the device budget."""


class UnsupportedModelError(InfinityError):
    """The model does something the engine cannot offload correctly."""


class NotGatheredError(InfinityError, RuntimeError):
    """The data of a released parameter was touched outside a forward."""


class CheckpointError(InfinityError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Nothing is where a checkpoint, or weights, should be."""


class RankError(InfinityError):
    """Another rank failed, has left, or does something else than this one; the ranks cannot go on together."""


class IterationError(InfinityError):
    """The running step failed; what was computed for it is gone."""


def cause_for(error: BaseException, caught: BaseException) -> BaseException | None:
    """What an error is raised from that explains the one that was caught, or is it: none may be its own cause.

    Whoever follows causes would never end.
    """
    return caught.__cause__ if error is caught else caught
