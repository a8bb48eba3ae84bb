"""The data order: every epoch complete, and a pure function of the position."""

from __future__ import annotations

from ds_zo.tasks import SeededOrder


def test_every_epoch_visits_everything_once_in_its_own_order() -> None:
    order = SeededOrder(10, seed=0)
    epochs = [order.batch(10 * epoch, 10) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_position_alone_decides() -> None:
    straight = SeededOrder(7, seed=5).batch(0, 40)
    resumed = SeededOrder(7, seed=5)
    assert [resumed[i] for i in reversed(range(40))] == straight[::-1]
    assert SeededOrder(7, seed=6).batch(0, 40) != straight
