"""Decoded images are kept in a file: the same pixels, read once, whatever happens to the file."""

import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from infssm.data import FileImages, ImageLoader, TaskStream, files, load_dataset, loader, make_recipe, make_split
from infssm.data.files import DecodedStore, open_store
from infssm.data.images import to_raw
from tests.compare import identical


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INFSSM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decoded"


def make_folder(root, *, per_class=6, size=(40, 30), suffix="png"):
    rng = np.random.default_rng(0)
    for name in "ab":
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
            coarse.resize(size, Image.Resampling.BICUBIC).save(root / name / f"{number}.{suffix}")
    return root


def count_reads(monkeypatch):
    reads = []
    original = FileImages.pil
    monkeypatch.setattr(FileImages, "pil", lambda self, index, size: reads.append(index) or original(self, index, size))
    return reads


def test_an_image_is_decoded_once_for_all_epochs_and_runs(tmp_path, cache, monkeypatch):
    folder = make_folder(tmp_path / "mine")
    plain = [to_raw(load_dataset(str(folder)).images.pil(n), 8) for n in range(12)]
    reads = count_reads(monkeypatch)
    for _ in range(2):  # two runs, each with images of its own
        images = load_dataset(str(folder)).images
        for _ in range(2):
            assert identical(images.raw(range(12), 8), torch.stack(plain))
    assert sorted(reads) == list(range(12))
    assert len(list(cache.iterdir())) == 1
    assert identical(images.raw([3], 6)[0], to_raw(Image.open(folder / images.paths[3]).convert("RGB"), 6))
    assert len(list(cache.iterdir())) == 2, "another size is another store"


def test_worker_processes_fill_one_store(tmp_path, cache, monkeypatch):
    dataset = load_dataset(str(make_folder(tmp_path / "mine")))
    stream = TaskStream(dataset, make_split(dataset), 1)
    recipe = make_recipe("light", dataset, size=8)
    batches = [list(ImageLoader(stream[0], recipe=recipe, batch_size=3, num_workers=w)) for w in (2, 0)]
    reads = count_reads(monkeypatch)
    batches.append(list(ImageLoader(stream[0], recipe=recipe, batch_size=3)))
    assert reads == []
    for other in batches[1:]:
        assert all(identical(a.x, b.x) for a, b in zip(batches[0], other, strict=True))


def test_processes_start_where_they_pay(tmp_path, cache, monkeypatch):
    dataset = load_dataset(str(make_folder(tmp_path / "mine")))
    stream = TaskStream(dataset, make_split(dataset), 1)
    recipe = make_recipe("light", dataset, size=8)
    started = []

    class Counting(loader.DataLoader):
        def __init__(self, *arguments, num_workers, **options):
            started.append(num_workers)
            super().__init__(*arguments, num_workers=num_workers, **options)

    monkeypatch.setattr(loader, "DataLoader", Counting)
    monkeypatch.setattr(loader.sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)

    def epoch(workers=None):
        return list(ImageLoader(stream[0], recipe=recipe, batch_size=3, num_workers=workers))

    few = epoch()
    for file in cache.iterdir():
        file.unlink()
    dataset.images._stores.clear()
    monkeypatch.setattr(loader, "_MIN_FOR_WORKERS", 4)
    many, decoded_ones = epoch(), epoch()
    assert started == [0, 2, 0], "none for few images, then two, then none because all are decoded"
    for other in (many, decoded_ones):
        assert all(identical(a.x, b.x) for a, b in zip(few, other, strict=True))


def test_changed_files_and_damaged_stores_are_decoded_again(tmp_path, cache):
    folder = make_folder(tmp_path / "mine")
    first = load_dataset(str(folder)).images.raw(range(12), 8)
    [store] = cache.iterdir()
    content = bytearray(store.read_bytes())
    entry = 4 + 3 * 8 * 8
    content[2 * entry + 50] ^= 1
    content[5 * entry : 6 * entry] = bytes(entry)
    store.write_bytes(content[: 9 * entry + 7])
    assert identical(load_dataset(str(folder)).images.raw(range(12), 8), first)
    assert len(store.read_bytes()) == 12 * entry
    Image.new("RGB", (9, 9), (1, 2, 3)).save(folder / "a" / "0.png")
    os.utime(folder / "a" / "0.png", ns=(1, 1))
    changed = load_dataset(str(folder)).images.raw(range(12), 8)
    assert changed[0, :, 0, 0].tolist() == [1, 2, 3]
    assert identical(changed[1:], first[1:])


def test_where_nothing_can_be_kept_images_are_decoded_each_time(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "mine")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INFSSM_CACHE", str(tmp_path / "file" / "below"))
    images = load_dataset(str(folder)).images
    assert images.store(8) is None
    assert images.raw([0], 8).shape == (1, 3, 8, 8)
    absent = DecodedStore(tmp_path / "no" / "where", 8)
    absent.put(0, torch.zeros(3, 8, 8, dtype=torch.uint8))
    assert absent.get(0) is None


def test_a_full_disk_keeps_nothing_and_says_nothing(tmp_path, cache, monkeypatch):
    images = load_dataset(str(make_folder(tmp_path / "mine"))).images

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "pwrite", full)
    assert identical(images.raw([1, 1], 8)[0], to_raw(images.pil(1), 8))


def test_stores_are_bounded(tmp_path, cache, monkeypatch):
    images = load_dataset(str(make_folder(tmp_path / "mine"))).images
    monkeypatch.setattr(files, "_LARGEST", 12 * (4 + 3 * 8 * 8))
    assert open_store("abc", 12, 8) is not None
    assert open_store("abc", 12, 9) is None
    monkeypatch.setattr(files, "_TOTAL", 2 * 12 * (4 + 3 * 8 * 8))
    (cache / "mine.txt").write_text("not ours")
    stores = []
    for size in (6, 7, 8):
        images.raw(range(12), size)
        stores.append(images.store(size).path)
        os.utime(stores[-1], (size, size))
    assert [store.exists() for store in stores] == [False, True, True], "the oldest was removed"
    assert (cache / "mine.txt").exists()


def test_images_go_to_other_processes_without_the_open_file(tmp_path, cache):
    images = load_dataset(str(make_folder(tmp_path / "mine"))).images
    raw = images.raw([2], 8)
    assert identical(pickle.loads(pickle.dumps(images)).raw([2], 8), raw)


def test_large_jpegs_are_decoded_small_and_look_the_same(tmp_path, cache):
    folder = make_folder(tmp_path / "mine", size=(400, 300), suffix="jpg")
    images = load_dataset(str(folder)).images
    assert min(images.pil(0, 32).size) in range(32, 76)
    assert images.pil(0, 200).size == (400, 300)
    assert images.pil(0).size == (400, 300)
    full, small = to_raw(images.pil(0), 16).float(), images.raw([0], 16)[0].float()
    assert (full - small).abs().mean() <= 2, "a shade of 255"
