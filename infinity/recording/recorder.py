"""Recording of a construction on the `meta` device.

Two modes of torch: one sees every operation, the other the few functions that do their work, or nothing, before it
becomes operations: tensors made of Python's or NumPy's data, values handed to these, and initialisers of
`torch.nn.init` that return at once when there is no memory, because how many numbers they draw depends on the numbers.

[Note: meta tensors of the constructor's own]
What is made with `device="meta"`, as `torch.nn.utils.skip_init` does it, would have no memory without the recording
either; initialisers draw nothing for it. It is told by the name: the device of another tensor is passed as an object.

[Note: which device a library finds] Libraries ask on which device tensors are made, by making an empty one, and leave
their initialisation out where that is `meta`. It shall run and be recorded, so a tensor made of no data is a real one.

[Note: arguments of distributions] `torch.distributions` looks whether the arguments of a distribution are valid, until
something in the process is compiled: torch turns that off then. Here they count as valid from the start.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.errors import UnsupportedModelError
from infinity.recording.generators import Generators
from infinity.recording.lowering import changes_secretly, fill_of, fills, is_empty, new_results, overwrites
from infinity.recording.origins import is_recording, noting_versions, origin_of, recording_here, set_origin
from infinity.recording.tape import Block, Constant, Operation, Origin, Region, Tape, digest_of, region_of
from infinity.torch_compat import uncompiled

_META = torch.device("meta")
_CPU = torch.device("cpu")
_COPIED_NBYTES = 1 << 20  # larger constants are kept, with a digest, not copied
_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_READS_MEMORY = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__)
_DISTRIBUTIONS = "torch.distributions"
_CHECKS_OF_DISTRIBUTIONS = ((f"{_DISTRIBUTIONS}.distribution", "__init__"), (f"{_DISTRIBUTIONS}.constraints", "check"))
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_aten = torch.ops.aten
_READS_VALUES = (_aten._local_scalar_dense, _aten.is_nonzero, _aten.equal, _aten.nonzero, _aten.masked_select)


@contextmanager
def recording() -> Iterator[None]:
    """Make tensors on the `meta` device, and record how they get their values. What is nested goes into one record."""
    if is_recording():
        with _META:
            yield
        return
    tape = Tape()
    generators = Generators(tape)
    with ExitStack() as stack:
        stack.callback(generators.end)
        stack.enter_context(recording_here())
        stack.enter_context(noting_versions())
        stack.enter_context(_META)
        recorder = stack.enter_context(_Recorder(tape, generators))
        stack.enter_context(_LostFunctions(recorder))
        yield


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tape: Tape, generators: Generators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape
        self._generators = generators
        self._foreign: dict[int, tuple[torch.UntypedStorage, Block]] = {}
        self._is_noting = False  # what the recorder does itself is not recorded

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would load the compiler; `uncompiled` does not

    @uncompiled
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_noting or any(is_lazy(tensor) for tensor in _tensors(args)):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags and not _draws_elsewhere(args, kwargs)
        draws = draws and not (written and all(self.is_bare(tensor) for tensor in written))
        if not draws and not _concerns(args, kwargs):
            return func(*args, **kwargs)
        if func.overloadpacket in _READS_VALUES or _leaves_meta(func, args, kwargs):
            is_empty_one = any(tensor.is_meta for tensor in _tensors(args))
            raise _needs_values(func) if is_empty_one else _needs_order(func)
        if torch.Tag.inplace_view in func.tags:  # only the tensor changes, not the storage
            return func(*args, **kwargs)
        operation = self._operation(func, args, kwargs, written, draws=draws)
        if fills(func) and args[0].is_meta:  # nothing to do without memory, and torch takes long for it
            self._append(operation)
            return args[0]
        args, kwargs = _all_without_memory(args, kwargs)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            # Callers may take NotImplementedError as a reason to leave it out; others look at values inside.
            if isinstance(error, NotImplementedError) or "meta tensors" in str(error):
                raise _needs_values(func) from error
            raise
        if not written:
            made = self._made(result, operation.reads)
            if is_empty(func) or not (made or draws):  # of undefined values, or a view
                return result
            operation = self._making(func, operation, made)
        elif any(tuple(tensor.shape) != region.shape for region, tensor in zip(operation.writes, written, strict=True)):
            raise UnsupportedModelError(f"{func} resizes a tensor that has no memory yet, which cannot be repeated")
        else:
            made = tuple(self._region(tensor, is_made=True) for tensor in new_results(func, result))
            operation.made, operation.writes = made, (*operation.writes, *made)
        self._append(operation)
        return result

    def is_bare(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor would have no memory without the recording either, so that nothing is drawn in it."""
        origin = origin_of(tensor)
        return tensor.is_meta and (origin is None or (origin.tape is self._tape and origin.block.is_foreign))

    def unrecorded(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a call that is not the recording's."""
        before, self._is_noting = self._is_noting, True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_noting = before

    def record_call(self, function: Callable[..., Any], tensor: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """An initialiser, to be called with a tensor that it fills without reading it."""
        self._is_noting = True
        try:
            region = self._region(tensor, is_written=True)
            track = self._generators.before_drawing(kwargs.get("generator") or torch.default_generator)
            encoded = {name: region if value is tensor else value for name, value in kwargs.items()}
            self._append(Operation(function, (), encoded, (), (region,), overwrites=True, track=track))
        finally:
            self._is_noting = False

    def _append(self, operation: Operation) -> None:
        self._tape.entries.append(operation)
        self._generators.drawn(operation)

    def _operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor], *, draws: bool
    ) -> Operation:
        """The call as it is recorded; made before it runs, because it may change what are constants for it."""
        is_overwriting = overwrites(func)
        writes = tuple(self._region(t, is_written=True, starts_undefined=is_overwriting) for t in written)
        known = dict(zip((id(tensor) for tensor in written), writes, strict=True))
        reads: list[Region] = []
        as_results = set(known)

        def encode(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) in known:
                    if is_overwriting and id(value) not in as_results:  # given once more, as in mul(x, 2, out=x)
                        reads.append(known[id(value)])
                    as_results.discard(id(value))
                    return known[id(value)]
                if not value.is_meta and origin_of(value) is None:
                    return _constant(value)
                reads.append(self._region(value))
                return reads[-1]
            return _CPU if isinstance(value, torch.device) and value.type == "meta" else value

        encoded = _mapped(args, encode), _mapped(kwargs, encode)
        if not is_overwriting:
            reads += writes
        track = None
        if draws:
            track = self._generators.before_drawing(kwargs.get("generator") or torch.default_generator)
        return Operation(func, *encoded, tuple(reads), writes, overwrites=is_overwriting, track=track)

    def _made(self, result: Any, reads: Sequence[Region]) -> tuple[Region, ...]:
        """The tensors among the results that have new storages."""
        before = {id(region.block) for region in reads}
        regions = [self._region(t, is_made=True) for t in _tensors(result)]
        return tuple(regions) if any(id(region.block) not in before for region in regions) else ()

    def _making(self, func: Any, made: Operation, regions: tuple[Region, ...]) -> Operation:
        """An operation that makes tensors; where it only fills memory, as the one that does that in memory given."""
        fill = fill_of(func, made.args, made.kwargs) if len(regions) == 1 else None
        if fill is None:
            made.writes, made.made, made.overwrites = regions, regions, True
            return made
        reads = made.reads if fill.reads else ()
        filled = (regions[0], *fill.args)
        return Operation(fill.function, filled, fill.kwargs, reads, regions, overwrites=True, track=made.track)

    def _region(
        self,
        tensor: torch.Tensor,
        *,
        is_written: bool = False,
        is_made: bool = False,
        starts_undefined: bool = False,
    ) -> Region:
        block = self._block(tensor, is_made=is_made, is_written=is_written, starts_undefined=starts_undefined)
        block.nbytes = max(block.nbytes, tensor.untyped_storage().nbytes())
        return region_of(tensor, block)

    def _block(self, tensor: torch.Tensor, *, is_made: bool, is_written: bool, starts_undefined: bool) -> Block:
        storage = tensor.untyped_storage()
        origin = origin_of(tensor)
        if origin is not None and origin.tape is self._tape:
            return origin.block
        if origin is not None:
            origin.block.is_outdated |= is_written
            _, block = self._foreign.setdefault(id(storage), (storage, Block(storage.nbytes(), is_foreign=True)))
            return block
        block = Block(storage.nbytes(), is_foreign=tensor.is_meta and not is_made)
        set_origin(tensor, Origin(self._tape, block))
        if not tensor.is_meta:
            block.real = weakref.ref(storage)
            self._tape.real.append(block)
            if not is_made and not (starts_undefined and tensor.nbytes == storage.nbytes()):
                whole = tensor.new_empty(0).set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))
                region = Region(block, whole.dtype, tuple(whole.shape), (1,), 0)
                copied = (region, Constant(whole.clone()))
                self._append(Operation(_aten.copy_.default, copied, {}, (), (region,), overwrites=True))
        return block


class _LostFunctions(TorchFunctionMode):
    """See the text above."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META:
            self._note_initialiser(args[0], sys._getframe(1))
        elif func == torch.Tensor.__bool__ and args[0].is_meta and _checks_arguments(sys._getframe(1)):
            return True
        elif func in _READS_MEMORY and origin_of(args[0]) is not None:
            raise _needs_values(func) if args[0].is_meta else _needs_order(func)
        elif func in _OF_DATA and _is_data(args, kwargs):
            requires_grad = kwargs.get("requires_grad", False)
            real = func(*args, **{**kwargs, "device": "cpu", **({"requires_grad": False} if requires_grad else {})})
            return real.to(_META).requires_grad_(requires_grad) if real.numel() else real
        elif kwargs.get("device") == "meta" and isinstance(kwargs["device"], str):
            return self._recorder.unrecorded(func, args, kwargs)
        elif kwargs.get("device") is None and isinstance(out := kwargs.get("out"), torch.Tensor) and not out.is_meta:
            kwargs = {**kwargs, "device": out.device}
        elif func is torch.normal and kwargs.get("device") is None and not _tensors(args, kwargs):
            kwargs = {**kwargs, "device": _META}
        return func(*args, **kwargs)

    def _note_initialiser(self, tensor: torch.Tensor, caller: FrameType) -> None:
        """An initialiser asks whether its tensor has memory, and will return at once.

        Which one it is stands in its frame alone: it is no function that a mode sees.

        Raises:
            UnsupportedModelError: it cannot be called once more with what it was given.
        """
        if caller.f_globals.get("__name__") != torch.nn.init.__name__ or is_lazy(tensor):
            return
        if tensor.device != _META or not tensor.numel() or self._recorder.is_bare(tensor):
            return
        code = caller.f_code
        function = caller.f_globals.get(code.co_name)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = {name: caller.f_locals[name] for name in names}
        if not callable(function) or not any(value is tensor for value in given.values()):
            raise UnsupportedModelError(
                f"{code.co_name} of torch.nn.init in PyTorch {torch.__version__} leaves out tensors without memory in "
                "a way that cannot be recorded, so that their first values would be lost. Build the model outside "
                "infinity.empty_init(), or pass infinity.offload(..., init_fn=function)"
            )
        self._recorder.record_call(function, tensor, given)


def _checks_arguments(caller: FrameType) -> bool:
    """See [Note: arguments of distributions]."""
    return (caller.f_globals.get("__name__"), caller.f_code.co_name) in _CHECKS_OF_DISTRIBUTIONS


def _is_data(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor is made of what is no tensor, on a device that is not chosen."""
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    chosen = kwargs.get("device") or (len(args) > 2 and args[2])
    return not chosen and not _tensors(data)


def _leaves(value: Any) -> Iterator[Any]:
    """What arguments or results consist of; they are lists, tuples and dictionaries of it at most."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same of other leaves."""
    if isinstance(value, list | tuple):
        return type(value)([_mapped(part, change) for part in value])
    if isinstance(value, dict):
        return {name: _mapped(part, change) for name, part in value.items()}
    return change(value)


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [value for value in _leaves(values) if isinstance(value, torch.Tensor)]


def _all_without_memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of which none but numbers has memory, where one has none: an operation wants them on one device."""
    if not any(tensor.is_meta for tensor in _tensors(args, kwargs)):
        return args, kwargs

    def on_meta(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and value.device == _CPU and value.dim() > 0
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META) if is_real else value

    return _mapped(args, on_meta), _mapped(kwargs, on_meta)


def _concerns(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has to do with tensors that have no memory, or whose values are drawn later."""
    if any(tensor.is_meta or origin_of(tensor) is not None for tensor in _tensors(args, kwargs)):
        return True
    return any(isinstance(value, torch.device) and value.type == "meta" for value in _leaves((args, kwargs)))


def _draws_elsewhere(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether random numbers are those of another device than the CPU."""
    devices = [tensor.device for tensor in _tensors(args, kwargs)]
    devices += [value for value in _leaves((args, kwargs)) if isinstance(value, torch.device)]
    return any(device.type not in ("cpu", "meta") for device in devices)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation changes."""
    if not func._schema.is_mutable:
        return changes_secretly(func, args)
    found: list[torch.Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors((args[number] if number < len(args) else kwargs.get(argument.name),))
    return found


def _leaves_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether values that are not there are asked for in memory."""
    if func.overloadpacket is _aten._to_copy:
        return bool(args[0].is_meta and kwargs.get("device", _META).type != "meta")
    return bool(func.overloadpacket is _aten.copy_ and args[1].is_meta and not args[0].is_meta)


def _needs_values(func: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{func} needs the values of a tensor that infinity.empty_init() has made without memory. Make that tensor "
        "with device='cpu', so that it has values at once, or build the model outside infinity.empty_init()"
    )


def _needs_order(func: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{func} asks for random numbers before those of the constructors that infinity.empty_init() has recorded are "
        "drawn, so that it would get others. Take numbers that decide something from Python's random module or from "
        "NumPy, or build the model outside infinity.empty_init()"
    )


def _constant(value: torch.Tensor) -> Constant:
    is_copied = value.nbytes <= _COPIED_NBYTES or value.layout is not torch.strided
    return Constant(value.detach().clone()) if is_copied else Constant(value, digest_of(value))
