"""The data order: every epoch complete, and a pure function of the position."""

from __future__ import annotations

from ds_zo.tasks import GroupedOrder, SeededOrder


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


def test_grouped_batches_hold_like_lengths_and_every_epoch_other_leftovers() -> None:
    lengths = [(i * 37) % 101 + 1 for i in range(101)]
    order = GroupedOrder(lengths, batch_size=4, seed=3)
    assert order.num_examples == 100
    epochs = [[order.batch(100 * epoch + 4 * i, 4) for i in range(25)] for epoch in range(3)]
    left_out = [set(range(101)) - {index for batch in epoch for index in batch} for epoch in epochs]
    assert all(len(found) == 1 for found in left_out) and len(set.union(*left_out)) > 1
    longest = [max(lengths[i] for i in batch) for batch in epochs[0]]
    plain = SeededOrder(101, seed=3)
    assert sum(longest) < 0.75 * sum(max(lengths[i] for i in plain.batch(4 * k, 4)) for k in range(25))
    assert longest != sorted(longest), "the order of batches says nothing of their lengths"
    again = GroupedOrder(lengths, batch_size=4, seed=3)
    assert [again.batch(100 + 4 * i, 4) for i in range(25)] == epochs[1], "the position alone decides"
