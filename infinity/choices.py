"""What settings choose between; each is given by its text, such as `precision="bf16"`."""

from enum import StrEnum


class Precision(StrEnum):
    """How parameters are stored and updated."""

    FP32 = "fp32"  # fp32 parameters and moments: the parity mode
    BF16 = "bf16"  # bf16 parameters, fp32 master split in two 16-bit halves, fp32 moments
    FP16 = "fp16"  # fp16 parameters, fp32 master and moments; needs a loss scale


class OptimizerKind(StrEnum):
    """Which optimizer state is planned for."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"  # without momentum: no state beyond what completes the master
    SGD_MOMENTUM = "sgd_momentum"
    LION = "lion"


class StateFormat(StrEnum):
    """How the moments of AdamW are stored; anything but fp32 rounds them, at random and yet the same in every run."""

    FP32 = "fp32"
    BF16 = "bf16"  # 2 bytes each instead of 4
    INT8 = "int8"  # 8-bit codes with a scale per 64 elements, 1.06 bytes each


class Schedule(StrEnum):
    """When each unit is updated; every schedule gives the same bits."""

    AUTO = "auto"
    SYNCHRONOUS = "synchronous"  # all units in step()
    OVERLAPPED = "overlapped"  # as soon as the gradient is complete, while backward goes on
    DEFERRED = "deferred"  # during the next forward, just before the unit is used, and on any other access to it


class Durability(StrEnum):
    """What of a run survives the end of its process, a crash included."""

    NONE = "none"
    CHECKPOINT = "checkpoint"  # what `engine.save` has written
    STEP = "step"  # every finished step: the swap files are kept, and each step is committed in them


class ActivationPolicy(StrEnum):
    """What units save for their backward, and where."""

    NONE = "none"  # what they save by themselves, where it is
    RECOMPUTE = "recompute"  # their inputs, on the device; they run again when their backward begins
    HOST = "host"  # the same, with the inputs in host memory
    NVME = "nvme"  # the same, with the inputs in the swap files as far as they do not fit in host memory


class DeviceKind(StrEnum):
    """Where the model computes."""

    AUTO = "auto"  # CUDA where there is one, else the CPU
    CPU = "cpu"
    CUDA = "cuda"
    FAKE = "fake"  # device memory is a file; computes on the CPU


class IoEngine(StrEnum):
    """How swap files are read and written."""

    AUTO = "auto"  # direct where the directory can do it
    DIRECT = "direct"
    AIO = "aio"  # one thread and the kernel's asynchronous transfers: for many small shards
    BUFFERED = "buffered"
    GDS = "gds"  # tried, and refused with the reason


class IoChecksum(StrEnum):
    """What is noted of everything written to swap files, and verified when it is read."""

    XXH3 = "xxh3"
    NONE = "none"


class Calibrate(StrEnum):
    """Where block size and threads come from when they are not set."""

    CACHED = "cached"  # from `infinity bench calibrate`, if it was run on the drive
    MISSING = "missing"  # the same; a drive that was not measured yet is measured at the start, in a second or two
    OFF = "off"


class WearAction(StrEnum):
    """What happens when more has been written to a drive than its wear budget."""

    WARN = "warn"
    SLOW = "slow"  # pauses between steps keep to a budget per day
    STOP = "stop"  # the run ends after the step, and saves where it would have at its end
