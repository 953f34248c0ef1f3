"""Bounds and order of the embed loop's parts."""

import gc
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from phenoica.config import resolve
from phenoica.embed import batches, wells
from phenoica.embed.batches import choose_batch_tiles, one_ahead, tile_batches, tile_bytes
from phenoica.embed.run import decoding_pool, decoding_workers
from phenoica.embed.wells import PreparedWell, WellReader
from phenoica.errors import ConfigError, EmbeddingError
from phenoica.openphenom.encoder import OpenPhenom, OpenPhenomConfig
from phenoica.plates import shards as shard_module
from phenoica.plates.run import inputs, read_wells, run_plates


def prepared(counts, seed=0):
    """Wells with the given numbers of random tiles; None for a well that is quarantined."""
    rng = np.random.default_rng(seed)
    for number, n in enumerate(counts):
        tiles = None if n is None else rng.integers(0, 256, (n, 2, 4, 4)).astype(np.uint8)
        yield PreparedWell(number, tiles, {}, {}, [])


@pytest.mark.parametrize("size", [1, 3, 4, 7, 100])
def test_batches_hold_every_tile_once_in_order(size):
    counts = [4, 1, None, 9, 2, 4, 4]
    expected = list(prepared(counts))
    got = [(b.tiles.clone(), b.wells) for b in tile_batches(prepared(counts), size, pinned=False)]
    assert [len(t) for t, _ in got] == [len(w) for _, w in got]
    assert all(len(t) == size for t, _ in got[:-1]) and 1 <= len(got[-1][0]) <= size
    tiles, owners = torch.cat([t for t, _ in got]).numpy(), np.concatenate([w for _, w in got])
    np.testing.assert_array_equal(tiles, np.concatenate([w.tiles for w in expected if w.tiles is not None]))
    np.testing.assert_array_equal(owners, np.repeat([0, 1, 3, 4, 5, 6], [4, 1, 9, 2, 4, 4]))


def test_a_batch_stays_as_it_is_while_the_next_is_made():
    batches_ = tile_batches(prepared([4] * 8), 4, pinned=False)
    expected = list(prepared([4] * 8))
    last = next(batches_)
    for number in range(1, 8):
        current = next(batches_)
        np.testing.assert_array_equal(last.tiles, expected[number - 1].tiles)
        last = current


def test_no_tile_no_batch():
    assert list(tile_batches(prepared([None, None]), 4, pinned=False)) == []


def test_one_ahead_makes_one_item_ahead_and_no_more():
    made = []

    def items():
        for i in range(5):
            made.append(i)
            yield i

    got = []
    for item in one_ahead(items()):
        got.append(item)
        time.sleep(0.05)
        assert len(made) == min(item + 2, 5)
    assert got == [0, 1, 2, 3, 4]


def test_one_ahead_passes_errors_on_and_ends_with_its_caller():
    def items():
        yield 1
        raise ConfigError("broken")

    stream = one_ahead(items())
    assert next(stream) == 1
    with pytest.raises(ConfigError, match="broken"):
        next(stream)
    stream = one_ahead(iter(range(100)))
    next(stream)
    stream.close()
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("one_ahead")]


class CountingPool(ThreadPoolExecutor):
    """Count the tasks whose results nobody has asked for."""

    def __init__(self):
        super().__init__(2)
        self.on_the_way = self.most = 0

    def submit(self, *args):
        self.on_the_way += 1
        self.most = max(self.most, self.on_the_way)
        future = super().submit(*args)
        result = future.result

        def counted():
            self.on_the_way -= 1
            return result()

        future.result = counted
        return future


def reader(screen, pool, ahead, row_group_size=10):
    """The reader of the first unit of a tiny screen."""
    config = screen.write()
    shards, metadata = inputs(config)
    for shard in shards:
        pq.write_table(pq.read_table(shard), shard, row_group_size=row_group_size)
    out = screen.folder / "out"
    run_plates(shards, metadata, out, config)
    frame = read_wells(out / "wells.parquet")
    return WellReader(frame[frame["unit"] == 0].reset_index(drop=True), 0, shards, 32, config, pool, ahead)


@pytest.mark.parametrize("ahead", [1, 3])
def test_wells_on_their_way_and_bytes_read_are_bounded(tiny_screen, monkeypatch, ahead):
    read = []

    def counted(shard, group, rows):
        for cell in original(shard, group, rows):
            read.append(cell[0])
            yield cell

    original = wells.iter_images
    monkeypatch.setattr(wells, "iter_images", counted)
    with CountingPool() as pool:
        stream = reader(tiny_screen, pool, ahead)
        done = []
        for well in stream:
            done.append(well.well)
            assert len(read) <= 6 * (len(done) + ahead)
        assert sorted(done) == list(range(9))
        assert pool.most == ahead


def test_a_shard_of_one_row_group_is_read_in_steps(tiny_screen, monkeypatch):
    monkeypatch.setattr(shard_module, "ROWS_AT_A_TIME", 7)
    with ThreadPoolExecutor(1) as pool:
        stream = reader(tiny_screen, pool, 2, row_group_size=1000)
        assert len({(r.shard, r.row_group) for r in stream.reads}) == 2
        for well in stream:
            raw = tiny_screen.raw[stream.wells["well_id"][well.well]]
            np.testing.assert_array_equal(well.tiles[0], raw[:, :32, :32])
            np.testing.assert_array_equal(well.tiles[3], raw[:, 32:, 32:])


def test_processes_prepare_wells_as_threads_do(tiny_screen):
    """A GPU's job decodes in processes: same wells, tiles, measures and quarantine."""
    keys = list(tiny_screen.images)
    tiny_screen.images[keys[0]] = tiny_screen.images[keys[0]][:50]
    found = {}
    for on_gpu in (False, True):
        with decoding_pool(2, on_gpu) as pool:
            stream = reader(tiny_screen, pool, 3)
            found[on_gpu] = {w.well: w for w in stream}, stream.quarantine
    (threads, noted), (processes, noted_too) = found[False], found[True]
    assert isinstance(pool, ProcessPoolExecutor)
    assert noted == noted_too and noted[0]["key"] == keys[0]
    assert threads.keys() == processes.keys() and sum(w.tiles is None for w in threads.values()) == 1
    for well, prepared in threads.items():
        np.testing.assert_array_equal(prepared.tiles, processes[well].tiles)
        assert (prepared.measures, prepared.size) == (processes[well].measures, processes[well].size)


@pytest.mark.parametrize(
    ("problem", "raised", "words"),
    [
        (MemoryError("no room"), MemoryError, "no room"),
        (BrokenProcessPool("terminated abruptly"), EmbeddingError, "killed, most often for lack of memory"),
    ],
)
def test_a_well_that_fails_by_accident_stops_the_loop(problem, raised, words):
    class Broken(ThreadPoolExecutor):
        def submit(self, *_):
            future = Future()
            future.set_exception(problem)
            return future

    def whole(self):
        yield 0, []

    stream = WellReader.__new__(WellReader)
    stream.pool, stream.ahead, stream._options, stream._channels = Broken(1), 1, (), {0: []}
    stream._whole_wells = lambda: whole(stream)
    with pytest.raises(raised, match=words):
        list(stream)


SMALL = OpenPhenomConfig(image_size=32, patch_size=16, dim=24, depth=1, heads=2)


def test_batch_size_from_memory(monkeypatch):
    model = OpenPhenom.random(SMALL, seed=0)
    one = tile_bytes(model, 6)
    assert one == 4 * (1 + 6 * 4) * 24 * 20 + 9 * 6 * 32 * 32
    assert choose_batch_tiles(5, model, 6) == 5
    for free, expected in ((2 * one * 10 + 1, 10), (2 * one - 1, 1), (10, 1), (10**12, batches.MOST_TILES_CPU)):
        monkeypatch.setattr(batches, "free_memory", lambda device, free=free: free)
        assert choose_batch_tiles("auto", model, 6) == expected


def test_batch_size_of_the_published_model_stays_within_its_bytes(monkeypatch):
    monkeypatch.setattr(batches, "free_memory", lambda device: 10**12)

    class Model:
        config, device = OpenPhenomConfig(), torch.device("cpu")

    assert choose_batch_tiles("auto", Model, 6) == batches.MOST_BYTES_CPU // tile_bytes(Model, 6)
    Model.device = torch.device("cuda")
    assert choose_batch_tiles("auto", Model, 6) == batches.MOST_TILES_GPU
    monkeypatch.setattr(batches, "free_memory", lambda device: 8 << 30)
    assert choose_batch_tiles("auto", Model, 6) == (4 << 30) // tile_bytes(Model, 6)


def test_free_memory_of_this_machine():
    assert 10**6 < batches.free_memory(torch.device("cpu")) < 10**15


def test_batch_size_in_the_configuration():
    base = {"run": "x", "source": "demo"}
    assert resolve(base)["embed"]["batch_tiles"] == "auto"
    assert resolve({**base, "embed": {"batch_tiles": 3}})["embed"]["batch_tiles"] == 3
    for wrong in (0, "many", 2.5):
        with pytest.raises(ConfigError, match=r"embed.batch_tiles"):
            resolve({**base, "embed": {"batch_tiles": wrong}})


def test_threads_of_decoding():
    assert [decoding_workers(n, on_gpu=True) for n in (1, 2, 16)] == [1, 1, 15]
    assert [decoding_workers(n, on_gpu=False) for n in (1, 2)] == [1, 2]
