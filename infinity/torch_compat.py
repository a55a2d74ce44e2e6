"""The one place that touches torch interfaces without a stability promise, for torch >= 2.6."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache, partial, update_wrapper
from inspect import signature
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.utils import checkpoint

_P = ParamSpec("_P")
_T = TypeVar("_T")
_TRIAL_TIMEOUT_S = 30.0
_COMPILER = "torch._dynamo"  # 70 MB, and a second to load: only who compiles needs it


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The same function, which torch.compile calls instead of tracing it.

    As `torch.compiler.disable`, but it does not load the compiler, which has to be there before it can trace anything.
    """

    @torch._disable_dynamo  # type: ignore[attr-defined]  # loads the compiler when it is called
    def disabled(*args: _P.args, **kwargs: _P.kwargs) -> _T:  # a method could not hold what torch notes in it
        return function(*args, **kwargs)

    def around(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling() or _COMPILER in sys.modules:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    _never_compile(around.__code__)
    return update_wrapper(around, function)


def _never_compile(code: CodeType) -> None:
    """Where code calls this one it is run, and not taken for the beginning of something to compile."""
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):  # of older versions
        frames.skip_code(code)
    else:
        action = frames._FrameAction
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))


def without_compiler(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A bound method of torch that may load the compiler, only to keep it out, as one that does not.

    Where the compiler is loaded already it is the method itself.
    """
    plain = getattr(method, "__wrapped__", None)
    return method if plain is None or _COMPILER in sys.modules else partial(plain, method.__self__)  # type: ignore[attr-defined]


def fused_adamw_(*operands: Sequence[Tensor], maximize: bool, **settings: float) -> None:
    """AdamW without amsgrad, in place, as `torch.optim.AdamW(fused=True)` calls it.

    Args:
        operands: parameters, gradients, first and second moments, and the numbers of the update, 0-dim fp32 from 1.
        settings: lr, beta1, beta2, eps, weight_decay.
    """
    _fused(torch._fused_adamw_, operands, {"maximize": maximize, **settings})


def fused_adam_(*operands: Sequence[Tensor], maximize: bool, **settings: float) -> None:
    """Adam without amsgrad, in place, as `torch.optim.Adam(fused=True)` calls it; arguments as of `fused_adamw_`."""
    _fused(torch._fused_adam_, operands, {"maximize": maximize, **settings})


def _fused(kernel: Callable[..., None], operands: Sequence[Sequence[Tensor]], settings: Mapping[str, float]) -> None:
    *tensors, steps = map(list, operands)
    kernel(*tensors, [], steps, amsgrad=False, grad_scale=None, found_inf=None, **settings)


@contextmanager
def preserve_version_counter(*tensors: Tensor) -> Iterator[None]:
    """Writes to `tensors` inside the block do not count as modifications for autograd."""
    with ExitStack() as stack:
        for tensor in tensors:  # one by one: not every version takes several
            stack.enter_context(torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor))
        yield


def next_sequence_nr() -> int:
    """The number that autograd will give the next node of this thread; those made before have smaller ones."""
    return int(torch._C._autograd._get_sequence_nr())


def transforms() -> list[str]:
    """The transforms of torch.func around the running code, outermost first: "Vmap", "Grad", "Jvp"."""
    return [layer.key().name for layer in torch._C._functorch.get_interpreter_stack() or ()]


def unbatched(tensor: Tensor) -> Tensor:
    """The tensor behind one that a function under `torch.vmap` sees, which is part of the graph; any other itself."""
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def generator_id(generator: torch.Generator) -> int:
    """What tells random number generators apart: an operation may get another Python object of the same generator."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def node_sequence_nr(node: Node) -> int:
    """The number that autograd has given a node."""
    return int(node._sequence_nr())


def increment_version(tensor: Tensor) -> None:
    """Count a change of `tensor` that autograd did not see: graphs that saved it are refused from now on."""
    with torch.inference_mode(False):
        torch.autograd.graph.increment_version(tensor)


def job_store(prefix: str) -> Store:
    """A part of the key-value store through which the ranks of the default process group found each other."""
    return PrefixStore(prefix, distributed_c10d._get_default_store())


class Channel:
    """A process group of our own, which torch's registry does not know.

    `dist.new_group` would need every rank of the job to call it, or name groups in a way that two groups of the same
    ranks, or ranks that have made different groups before, cannot rely on.

    Args:
        name: the same on all ranks, and new.
        rank, size: this rank's place among those of the channel.
        device: "cpu" for gloo, "cuda" for NCCL.
    """

    def __init__(self, name: str, rank: int, size: int, device: str, timeout: timedelta) -> None:
        store = job_store(f"{name}/{device}/")
        self._size = size
        self._group: Any
        if device == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = distributed_c10d.ProcessGroupGloo(store, rank, size, timeout)

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        """Start to send a contiguous tensor."""
        return self._group.send([tensor], peer, 0)  # type: ignore[no-any-return]

    def receive(self, tensor: Tensor, peer: int) -> dist.Work:
        """Start to receive into a contiguous tensor."""
        return self._group.recv([tensor], peer, 0)  # type: ignore[no-any-return]

    def all_gather(self, output: Tensor, mine: Tensor) -> dist.Work:
        """Start to gather equal 1-D tensors of all ranks into `output`, one after another."""
        return self._group.allgather([list(output.view(self._size, -1).unbind())], [mine])  # type: ignore[no-any-return]

    def all_gather_in_place(self, output: Tensor, mine: Tensor) -> dist.Work:
        """The same on CUDA, where `mine` is this rank's part of `output` already."""
        return self._group._allgather_base(output, mine)  # type: ignore[no-any-return]

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> dist.Work:
        """Start to sum equal 1-D tensors of all ranks on CUDA; each gets its part of the sum."""
        return self._group._reduce_scatter_base(output, whole)  # type: ignore[no-any-return]

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """Start to sum equal tensors of all ranks in place."""
        return self._group.allreduce([tensor])  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let the group go. Nothing may be under way. Idempotent."""
        if hasattr(self._group, "abort") and self._group.name() == "nccl":
            self._group.abort()
        self._group = None


class CheckpointRun:
    """One forward that saves nothing for its backward, and is run again there.

    It is `torch.utils.checkpoint` with `use_reentrant=False`, begun and ended by hooks of a module instead of around
    its call. Random numbers are drawn again as they were.

    Args:
        forward: called in backward; ends with an exception when it has saved all that the first one would have saved.
        devices: whose random numbers are drawn.
    """

    def __init__(self, forward: Callable[[], None], devices: Iterable[torch.device]) -> None:
        make: Callable[..., Generator[None, None, None]] = checkpoint._checkpoint_without_reentrant_generator
        stops_early = [True] if "early_stop" in signature(make).parameters else []
        markers = [torch.empty(0, device=device) for device in devices]  # torch looks at the arguments for devices
        self._steps = make(
            lambda *_: forward(), True, checkpoint.noop_context_fn, "default", False, *stops_early, *markers
        )

    def begin(self) -> None:
        """The forward begins: from now on it saves nothing."""
        next(self._steps)

    def end(self) -> None:
        """The forward is complete."""
        next(self._steps, None)

    def abandon(self) -> None:
        """The forward has failed. Runs are abandoned in the reverse order of their beginning. Idempotent."""
        self._steps.close()


def graph_task() -> int | None:
    """What tells the backwards under way in this thread apart; None outside of any."""
    task = int(torch._C._current_graph_task_id())
    return None if task == -1 else task


def in_backward() -> bool:
    """Whether the calling thread is inside a backward."""
    return graph_task() is not None


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor is of a kind that has memory of its own, which may be freed."""
    return bool(torch._C._has_storage(tensor))


def storage_id(tensor: Tensor) -> int | None:
    """What tensors over the same memory have in common; None for one without memory of its own."""
    return tensor.untyped_storage()._cdata if has_storage(tensor) else None


def can_swap_memory() -> bool:
    """Whether two storages can exchange their memory, so that all tensors over one show that of the other."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Two storages of the same size, or one of them empty, exchange their memory, sizes, and whether they resize."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


def forbid_memory(tensor: Tensor) -> None:
    """Let what asks, past its class, for the memory of a tensor that has none raise RuntimeError, not read it."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


def asked_conversion(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """The device and dtype that the arguments of `Tensor.to` ask for."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors and storage objects share this memory; the argument counts too."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def tensor_use_counts(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """How often each tensor is used: by its object, by views of it, by graphs. Nothing where torch does not say."""
    return tuple(tensor._use_count() for tensor in tensors) if hasattr(Tensor, "_use_count") else ()  # type: ignore[attr-defined]


def is_held_by_code(tensor: Tensor) -> bool:
    """Whether Python code holds a tensor beside the one variable that holds it here; a graph that saved it does not.

    With hooks for saved tensors a graph counts as code. Where this version of torch, or of Python, does not tell these
    apart, a tensor in a variable of running code does not count.
    """
    return _is_held(tensor) if holders_are_told_apart() else are_referred_to([tensor])


def _is_held(tensor: Tensor) -> bool:
    holders = sys.getrefcount(tensor) - 4  # two callers' variables, ours, and the argument of the call
    # A graph that has saved the tensor holds its Python object too.
    return bool(holders > (tensor._use_count() > 1))  # type: ignore[attr-defined]


def are_referred_to(tensors: list[Tensor | None]) -> bool:
    """Whether attributes, containers or the frames of an exception hold one of these tensors, besides this list.

    What `torch.utils.checkpoint` keeps for the backward, having run a forward again, does not count.
    """
    referrers = gc.get_referrers(*(tensor for tensor in tensors if tensor is not None))
    return any(referrer is not tensors and not _is_of_checkpoint(referrer) for referrer in referrers)


def _is_of_checkpoint(holder: object) -> bool:
    """Whether it is the dictionary of recomputed tensors, whose keys are weak references to handles of checkpoints."""
    key = next(iter(holder), None) if type(holder) is dict else None
    return isinstance(key, weakref.ref) and isinstance(key(), checkpoint._Handle)


@cache
def holders_are_told_apart() -> bool:
    """Whether it is known which holder of a tensor is code and which a graph.

    Tried on a thread of its own: here hooks for saved tensors, such as those of a checkpoint, may see what a graph
    saves, and hold it. Without an answer in time it is not known.
    """
    if not hasattr(Tensor, "_use_count"):
        return False
    found: list[bool] = []
    trial = threading.Thread(target=lambda: found.append(_can_tell_holders()), name="infinity-trial", daemon=True)
    trial.start()
    trial.join(_TRIAL_TIMEOUT_S)
    return found == [True]


def _can_tell_holders() -> bool:
    """Tried on a tensor that code holds, one that code and a graph hold, and one that only a graph holds."""

    def is_held(reference: weakref.ref[Tensor]) -> bool:
        found = reference()
        return found is not None and ask(found)

    def ask(tensor: Tensor) -> bool:
        return _is_held(tensor)

    weight = torch.ones(1, device="cpu")
    reference = weakref.ref(weight)
    by_code = is_held(reference)
    graph = torch.ones(1, device="cpu", requires_grad=True) * weight
    by_both = is_held(reference)
    del weight
    by_graph = is_held(reference)
    del graph
    return by_code and by_both and not by_graph
