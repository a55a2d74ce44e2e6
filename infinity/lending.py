"""Parameters that a forward hands out, as they are or as views: their memory goes when nobody is known to need it.

What a module inside the model returns is used by the rest of the forward, so it stays until that is over, and comes
back for the backward. What the model itself returns would be read outside, where no parameter is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from infinity.errors import UnsupportedModelError
from infinity.groups import FlatGroup
from infinity.hooks import tensors_in
from infinity.released import OffloadedParameter, StandIn
from infinity.torch_compat import storage_id


class Lending:
    """Tells which groups lie behind the tensors of an output.

    Args:
        groups: those whose memory goes and comes.
    """

    def __init__(self, groups: Iterable[FlatGroup]) -> None:
        self._groups = {group.flat.untyped_storage()._cdata: group for group in groups}

    def groups_in(self, output: Any) -> list[FlatGroup]:
        """Groups in whose memory a tensor of the output lies."""
        found = (self._group_of(tensor) for tensor in tensors_in(output))
        return list({group.index: group for group in found if group is not None}.values())

    def take_back(self, output: Any) -> Any:
        """The output of the model with stand-ins in the place of parameters.

        Raises:
            UnsupportedModelError: it holds a view of a parameter, or a parameter where it cannot be replaced.
        """
        if not self.groups_in(output):
            return output
        replaced = tree_map(self._stand_in, output)
        if remaining := self.groups_in(replaced):
            raise UnsupportedModelError(
                f"the model returns a view of a parameter of {remaining[0].key}, whose memory goes when the forward is "
                "over. Return a clone, or the parameter itself"
            )
        return replaced

    def _stand_in(self, leaf: Any) -> Any:
        is_lent = isinstance(leaf, OffloadedParameter) and self._group_of(leaf) is not None
        return leaf.ref.group.stand_ins[leaf.ref.slot] if is_lent else leaf

    def _group_of(self, tensor: torch.Tensor) -> FlatGroup | None:
        storage = None if isinstance(tensor, StandIn) else storage_id(tensor)
        return None if storage is None else self._groups.get(storage)
