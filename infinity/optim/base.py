"""What the optimizers share: torch optimizers whose state lies in the tiers.

Their parameters are those of an offloaded model, whose engine updates them; or, given a `config`, any others, such as
the DTensors of `torch.distributed.fsdp.fully_shard`, whose values and gradients stay where they are (`StateTier`).
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch

from infinity.bridge.tier import StateTier
from infinity.checkpoint.moments import SlotState, SlotStates
from infinity.checkpoint.parts import plain_setting
from infinity.config import Config, OptimizerKind
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.groups import FlatGroup
from infinity.optim.hyper import Hyper
from infinity.optim.kernels import ALGORITHMS
from infinity.optim.torch_state import SlotOwner, states_of, torch_state
from infinity.released import ParameterRef, ref_of
from infinity.torch_compat import without_compiler
from storage.closing import Closing
from storage.forks import in_this_process

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class OffloadedOptimizer(torch.optim.Optimizer, Closing):
    """Base of the optimizers over the parameters of an offloaded model, or over others with their state in the tiers.

    Args:
        params: parameters of one offloaded model, or parameter groups of them; with `config`, of no offloaded model.
        defaults: settings of groups that do not give their own.
        max_grad_norm: clip the total gradient norm in every step, exactly as `torch.nn.utils.clip_grad_norm_`.
        config: budgets and swap directories for the state of parameters that are not offloaded.

    Raises:
        ConfigError: a value out of range, a parameter that is not offloaded, or a schedule that cannot clip.
    """

    def __init__(
        self, params: Params, defaults: dict[str, Any], max_grad_norm: float | None, config: Config | None = None
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm is {max_grad_norm}; it must be greater than 0, or None not to clip")
        self._max_grad_norm = max_grad_norm
        self._places: dict[tuple[int, int], dict[str, Any]] = {}
        self._engine: Engine | None = None
        self._tier: StateTier | None = None
        self._config = config
        super().__init__(params, defaults)
        if self._engine is not None:
            self._engine.attach_optimizer(self)
        elif config is not None:
            self._tier = StateTier(self.param_groups, self.kind, config)
            weakref.finalize(self, in_this_process(self._tier.close))

    @property
    @abstractmethod
    def kind(self) -> OptimizerKind:
        """Which state it needs."""

    @abstractmethod
    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings of a parameter group that are out of range. Raises ConfigError."""

    @abstractmethod
    def hyper_from(self, settings: Mapping[str, Any]) -> Hyper:
        """The hyperparameters in the settings of a parameter group."""

    @property
    def max_grad_norm(self) -> float | None:
        """The total norm that `step()` clips gradients to; None where it does not clip."""
        return self._max_grad_norm

    @property
    def last_grad_norm(self) -> torch.Tensor | None:
        """Total norm of the gradients, before clipping, as last computed; None when nothing asked for it."""
        holder = self._engine or self._tier
        return holder.last_grad_norm if holder is not None else None

    @property
    def engine(self) -> Engine | None:
        """Of the offloaded model whose parameters these are; None over parameters that are not offloaded."""
        return self._engine

    @property
    def state_tier(self) -> StateTier | None:
        """Where the state of parameters that are not offloaded lies; None over an offloaded model."""
        return self._tier

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Parameters that the model got after it was offloaded are adopted; see `Engine.adopt`."""
        without_compiler(super().add_param_group)(param_group)
        try:
            self._place(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def adopted(self) -> None:
        """The engine has adopted a changed model: slots are others, and parameters that are gone leave the groups."""
        self._places.clear()
        for settings in self.param_groups:
            kept = [p for p in settings["params"] if (ref := ref_of(p)) is None or ref.access is self._engine]
            settings["params"] = kept
            refs = [ref for p in kept if (ref := ref_of(p)) is not None]
            self._places.update({(ref.group.index, ref.slot): settings for ref in refs})

    def _place(self, added: dict[str, Any]) -> None:
        if added.get("amsgrad"):
            raise ConfigError(f"a parameter group has amsgrad=True, which infinity.{type(self).__name__} does not have")
        self.check_settings(added)
        parameters = added["params"]
        if self._config is not None:
            self._refuse_in_tier([ref_of(parameter) for parameter in parameters])
            return
        refs, slots = self._refs_of(parameters), slots_of(parameters)
        engine = self._engine
        for ref in refs:
            if ref is None or not isinstance(ref.access, Engine):
                raise ConfigError("the parameters belong to an engine that is closed")
            engine = engine or ref.access
            if ref.access is not engine:
                raise ConfigError(
                    f"parameter {ref.name!r} of shape {ref.group.layout.slots[ref.slot].shape} belongs to the engine "
                    "of another model, as those of a module inside a model may. Build one optimizer per engine, each "
                    "over engine.parameters()"
                )
        self._engine = engine
        self._places.update({(group.index, slot): added for group, slot in slots})

    def _refuse_in_tier(self, refs: Sequence[ParameterRef | None]) -> None:
        offloaded = next((ref.name for ref in refs if ref is not None), None)
        if offloaded is not None:
            raise ConfigError(
                f"parameter {offloaded!r} is offloaded, so its engine has a config already; build the optimizer of an "
                "offloaded model without config=, and another one for other parameters"
            )
        if self._tier is not None:
            raise ConfigError(
                "a parameter group was added after the room for the optimizer's state had been made; build the "
                "optimizer with all groups"
            )

    def _refs_of(self, parameters: Sequence[torch.Tensor]) -> list[ParameterRef | None]:
        """What the parameters stand for, after those that came late have been adopted."""
        refs = [ref_of(parameter) for parameter in parameters]
        late = [parameter for parameter, ref in zip(parameters, refs, strict=True) if ref is None]
        engine = self._engine or next((ref.access for ref in refs if ref is not None), None)
        if late and isinstance(engine, Engine) and not engine.is_closed and engine.has_module_parameter(late[0]):
            engine.adopt()
            return [ref_of(parameter) for parameter in parameters]
        return refs

    def state_dict(self) -> dict[str, Any]:
        """As that of torch's optimizer, which can load it: the state of every parameter by its index.

        Reads all moments into memory, 4 bytes each per parameter that trains. `engine.save()` streams them instead.
        The state of DTensors are DTensors, sharded alike.
        """
        holder = self._engine or self._tier
        return self._in_torchs_format(holder.read_optimizer_state() if holder is not None else {})

    def state_dict_of_first_rank(self) -> dict[str, Any]:
        """`state_dict()` on the first rank of the engine; the others, which call it too, get no state of parameters."""
        if self._engine is None:
            return self.state_dict()
        return self._in_torchs_format(self._engine.read_optimizer_state(first_only=True))

    def _in_torchs_format(self, states: SlotStates) -> dict[str, Any]:
        # torch makes indices of the parameters in `self.state`, without moments at other times: the tiers have them.
        try:
            for parameter, place in zip(self._parameters(), self._places_of_state(), strict=True):
                found = states.get(place)
                if found is not None:
                    self.state[parameter] = self._wrapped(parameter, torch_state(self.kind, found))
            return without_compiler(super().state_dict)()
        finally:
            self._show_steps()

    def _wrapped(self, parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._tier is None:
            return state
        wrap = next(p.wrap for p in self._tier.parameters if p.parameter is parameter)
        return {name: value if name == "step" else wrap(value) for name, value in state.items()}

    def _show_steps(self) -> None:
        """`self.state` as it is at most times: empty, or how often parameters that are not offloaded were updated.

        torch.distributed.checkpoint takes an optimizer without any state for one that has yet to make its first step.
        """
        self.state.clear()
        if self._tier is not None:
            counts = ALGORITHMS[self.kind].counts_steps
            for local, (section, slot) in zip(self._tier.parameters, self._tier.places, strict=True):
                step = self._tier.sections[section].steps[slot]
                if step:
                    self.state[local.parameter] = {"step": torch.tensor(float(step))} if counts else {}

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for param_group in self.param_groups for parameter in param_group["params"]]

    def _places_of_state(self) -> list[tuple[int, int]]:
        if self._tier is not None:
            return self._tier.places
        return [(group.index, slot) for group, slot in self.slots()]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` of this class or of its counterpart in torch gave; everything is checked first.

        Parameters that it has no state for start as new. Hooks for loading see the parameter groups only.

        Raises:
            ConfigError: it has other parameter groups, is of another optimizer, or of parameters of other shapes.
        """
        given = state_dict if self._tier is None else self._tier.localized(state_dict)
        states = states_of(given, self._slots_by_group(), self.kind)
        holder = self._engine or self._tier
        if holder is not None:
            holder.write_optimizer_state(states)
        self._load_settings(state_dict)

    def load_state_dict_of_first_rank(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict` of the first rank on all of them; what the others give is not looked at.

        Raises:
            ConfigError, CheckpointError: as `load_state_dict`, on the first rank and on the others.
        """
        engine = self._engine
        if engine is None:
            self.load_state_dict(state_dict)
            return
        states: SlotStates = {}

        def described() -> dict[str, Any]:
            states.update(states_of(state_dict, self._slots_by_group(), self.kind))
            groups = [
                {name: plain_setting(name, value) for name, value in group.items()}
                for group in state_dict["param_groups"]
            ]
            return {"param_groups": groups, "steps": [(*place, state.step) for place, state in states.items()]}

        told = engine.from_first_rank(described)
        known = {(group, slot): SlotState(step, {}) for group, slot, step in told["steps"]}
        engine.write_optimizer_state({**known, **states}, from_first=True)
        self._load_settings({"param_groups": told["param_groups"]})

    def _load_settings(self, state_dict: Mapping[str, Any]) -> None:
        """The settings of the parameter groups alone."""
        slots = self._slots_by_group()
        # torch would keep the moments in memory, converted to the dtype in which the parameters compute.
        without_compiler(super().load_state_dict)({**state_dict, "state": {}})
        for param_group, mine in zip(self.param_groups, slots, strict=True):
            for name, value in self.defaults.items():
                param_group.setdefault(name, value)
            if self._tier is None:
                self._places.update({(group.index, slot): param_group for group, slot in mine})
        self._show_steps()

    def _slots_by_group(self) -> list[list[tuple[SlotOwner, int]]]:
        tier = self._tier
        if tier is None:
            return [
                list[tuple[SlotOwner, int]](slots_of(params))
                for params in (param_group["params"] for param_group in self.param_groups)
            ]
        places = iter(tier.places)
        return [
            [(tier.sections[section], slot) for section, slot in (next(places) for _ in param_group["params"])]
            for param_group in self.param_groups
        ]

    def hyper_of(self, group: FlatGroup, slot: int) -> Hyper | None:
        """The hyperparameters of one slot as they are now."""
        settings = self._places.get((group.index, slot))
        return None if settings is None else self.hyper_from(settings)

    def unscale_gradients(self, inverse: float) -> bool:
        """Called by `infinity.GradScaler`: multiply all gradients by `inverse`, a power of two.

        Returns:
            Whether one of them is infinite or NaN.
        """
        holder = self._engine or self._tier
        return holder.unscale(inverse) if holder is not None else False

    def slots(self) -> Iterable[tuple[FlatGroup, int]]:
        """Every slot, in the order of the parameter groups."""
        for param_group in self.param_groups:
            parameters = param_group["params"]
            yield from slots_of(parameters)

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One optimizer step.

        Raises:
            IterationError: an earlier failure left parameters of two different steps.
            StorageError: a transfer failed or is stuck.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._engine is not None:
            self._engine.step(self)
        elif self._tier is not None:
            hypers = [self.hyper_from(settings) for settings in self.param_groups for _ in settings["params"]]
            self._tier.step(hypers, self._max_grad_norm)
            self._show_steps()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. Those of offloaded parameters are never kept as zeros, whatever `set_to_none` says."""
        if self._engine is not None:
            self._engine.discard_gradients()
        elif self._tier is not None:
            without_compiler(super().zero_grad)(set_to_none)
            self._tier.read_ahead()

    def close(self) -> None:
        """Give the state of parameters that are not offloaded back: swap files, memory, threads. Idempotent.

        An optimizer that is not closed does so when it is collected, or when the process exits. An engine has a
        `close()` of its own.
        """
        if self._tier is not None:
            self._tier.close()


def refuse_negative(settings: Mapping[str, Any], *names: str) -> None:
    """Raise ConfigError for the first of these settings that is less than 0, or no number."""
    for name in names:
        if not settings[name] >= 0:
            raise ConfigError(f"{name} is {settings[name]}; it must be at least 0")


def refuse_betas(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError unless both betas lie in [0, 1)."""
    for number, beta in enumerate(settings["betas"]):
        if not 0 <= beta < 1:
            raise ConfigError(f"betas[{number}] is {beta}; it must be at least 0 and less than 1")


def clip_grad_norm_(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip the total norm of the gradients of offloaded parameters; exact, applied by the next `step()`.

    Args:
        parameters: parameters of one offloaded model, in the order in which the norm is to be reduced.
        max_norm: the largest norm allowed.

    Returns:
        The total norm before clipping (0-dim fp32), as `torch.nn.utils.clip_grad_norm_` computes it.
    """
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    refs = [ref_of(parameter) for parameter in chosen]
    if chosen and not any(refs):
        return torch.nn.utils.clip_grad_norm_(chosen, max_norm)
    slots = slots_of(chosen)
    engine = next((ref.access for ref in refs if ref is not None), None)
    if not isinstance(engine, Engine):
        raise ConfigError("clip_grad_norm_ was given no parameter of an offloaded model")
    foreign = next((ref.name for ref in refs if ref is not None and ref.access is not engine), None)
    if foreign is not None:
        raise ConfigError(
            f"clip_grad_norm_ was given parameters of several engines, {foreign!r} among them, whose updates are made "
            "by their own optimizers; clip the parameters of each engine by themselves"
        )
    return engine.clip(slots, max_norm)


def slots_of(parameters: Iterable[torch.Tensor]) -> list[tuple[FlatGroup, int]]:
    """The slots behind parameters; a parameter that is not offloaded is refused."""
    found = []
    for parameter in parameters:
        ref = ref_of(parameter)
        if ref is None:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} is not offloaded; pass parameters of the offloaded "
                "model, or an infinity.Config as config= to keep only the optimizer's state in the tiers"
            )
        found.append((ref.group, ref.slot))
    return found
