"""Positions of a session in pages of any order, and the move that keeps accepted nodes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.engine.cache import PagedCache


def new_cache(num_pages: int, page_size: int) -> PagedCache:
    return PagedCache(
        layers=2,
        kv_heads=2,
        head_dim=3,
        feature_size=5,
        num_pages=num_pages,
        page_size=page_size,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )


def filled(cache: PagedCache, slots: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Random contents of every slot of both layers and of the feature plane."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    kv = [(random(slots, 2, 3), random(slots, 2, 3)) for _ in range(2)]
    features = random(slots, 5)
    for layer, (keys, values) in enumerate(kv):
        cache.write(layer, torch.arange(slots), keys, values)
    cache.write_features(torch.arange(slots), features)
    return kv, features


@given(st.permutations(range(6)), st.integers(1, 5), st.data())
def test_slots_follow_the_page_table_in_order_of_position(
    table: list[int], page_size: int, data: st.DataObject
) -> None:
    everything = [page * page_size + offset for page in table for offset in range(page_size)]
    start = data.draw(st.integers(0, len(everything)))
    end = data.draw(st.integers(start, len(everything)))
    slots = new_cache(6, page_size).slots(table, start, end)
    assert slots.dtype == torch.int64
    assert slots.tolist() == everything[start:end]


@given(st.permutations(range(12)), st.lists(st.integers(0, 11), max_size=12))
def test_a_move_reads_all_sources_before_it_writes(destinations: list[int], read: list[int]) -> None:
    cache = new_cache(3, 4)
    kv, features = filled(cache, 12)
    sources = torch.tensor(read, dtype=torch.long)
    target = torch.tensor(destinations[: len(read)], dtype=torch.long)
    cache.move(sources, target)
    for layer, (keys, values) in enumerate(kv):
        keys[target], values[target] = keys[sources].clone(), values[sources].clone()
        assert torch.equal(cache.read(layer, slice(0, 12))[0], keys)
        assert torch.equal(cache.read(layer, slice(0, 12))[1], values)
    features[target] = features[sources].clone()
    assert torch.equal(cache.features(torch.arange(12)), features)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_slice_and_the_indices_of_the_same_slots_read_the_same(layer: int) -> None:
    cache = new_cache(3, 4)
    filled(cache, 12)
    for by_slice, by_index in zip(
        cache.read(layer, slice(3, 9)), cache.read(layer, torch.arange(3, 9)), strict=True
    ):
        assert torch.equal(by_slice, by_index)


def test_features_that_were_read_do_not_change_with_the_cache() -> None:
    cache = new_cache(1, 4)
    filled(cache, 4)
    before = cache.features(torch.tensor([2, 0]))
    kept = before.clone()
    cache.write_features(torch.tensor([0, 2]), torch.zeros(2, 5, dtype=torch.float64))
    assert torch.equal(before, kept)
