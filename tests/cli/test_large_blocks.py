"""From which size on blocks of memory are mapped by themselves, and what training leaves in the heap."""

import pytest

from infinity.cli.memory import large_nbytes
from infinity.cli.settings import Training
from infinity.models.gpt import GptShape


def training(*, batch: int, recompute: bool, hidden: int = 768) -> Training:
    shape = GptShape(layers=2, hidden=hidden, heads=hidden // 64, seq=128)
    return Training(
        shape=shape,
        batch=batch,
        accumulate=1,
        micro_batches=1,
        steps=1,
        seed=0,
        lr=1e-4,
        clip=None,
        recompute=recompute,
        data=(),
        device="cpu",
    )


@pytest.mark.parametrize(
    ("batch", "hidden", "nbytes"),
    [(1, 768, 128 * 768 * 2), (1, 64, 128 << 10), (4, 768, 4 * 128 * 768 * 2), (16, 768, 1 << 20)],
)
def test_with_recomputation_what_blocks_keep_is_mapped_by_itself(batch: int, hidden: int, nbytes: int) -> None:
    assert large_nbytes(training(batch=batch, recompute=True, hidden=hidden)) == nbytes


def test_without_it_blocks_below_a_mebibyte_come_from_the_heap() -> None:
    assert large_nbytes(training(batch=1, recompute=False)) == 1 << 20
