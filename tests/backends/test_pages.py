"""Pages of the mapped checkpoint: given back when layers leave; files that change during training are noticed."""

from __future__ import annotations

import os
import pathlib
import shutil
import threading

import pytest
import torch
from conftest import load_bf16, load_int8, save_llama, with_lora
from switching import active, backend_for, logits, play_accelerator

from hf_gnmr import SetupError
from hf_gnmr.backends.bnb.pages import file_backed, give_back
from hf_gnmr.backends.bnb.stores import in_place
from hf_gnmr.backends.bnb.stores.in_place import InPlace


@pytest.fixture
def slotted(monkeypatch):
    """The store `host` as on an accelerator."""
    play_accelerator(monkeypatch)


def resident_file_bytes(file):
    """Resident bytes of this process's mappings of `file`, by start address."""
    sizes, begin = {}, None
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            begin = line.split("-")[0] if line.endswith(str(file)) else None
        elif begin is not None and line.startswith("Rss:"):
            sizes[begin] = 1024 * int(line.split()[1])
    return sizes


@pytest.mark.skipif(not pathlib.Path("/proc/self/smaps").exists(), reason="Linux only")
def test_pages_of_layers_that_left_are_given_back(tmp_path):
    folder = save_llama(tmp_path / "llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=4, vocab_size=16)
    file = pathlib.Path(folder) / "model.safetensors"
    model = with_lora(load_int8(folder)).eval()
    # transformers' own mapping, which its embeddings may keep alive, and whose pages the system may take back at any time
    loading = resident_file_bytes(file)

    def resident():
        return sum(size for begin, size in resident_file_bytes(file).items() if begin not in loading)

    ids = torch.ones(1, 4, dtype=torch.long)
    backend = backend_for(model)
    assert isinstance(backend.store, InPlace)
    backend.reserve(1)
    bound, seen = backend.recovery_bytes_bound(1), []
    assert resident() < 0.3 * bound, "pages read by the check are given back"
    for on in (0, 1, 2, 3, 0):
        backend.apply(active(on, of=4))
        with torch.no_grad():
            model(input_ids=ids)
        backend.store._worker.close()
        seen.append(resident())
        for path in backend.paths:
            path.in_eval = True
        with torch.no_grad():
            model(input_ids=ids)  # evaluation on the recovery path passes through all layers
        backend.store._worker.close()
        seen.append(resident())
        for path in backend.paths:
            path.in_eval = path.in_train
    # Reading also brings in a few neighbouring pages; the layer's own are what counts. No lower bound for each: the system
    # may reclaim pages at any time (that the store does not is tested below).
    assert 0.7 * bound < max(seen) < 1.3 * bound, [size / bound for size in seen]
    backend.remove()
    assert resident() < 0.3 * bound


@pytest.mark.parametrize("returns", [False, True])
def test_pages_of_a_layer_that_returned_stay(tiny, monkeypatch, returns):
    """Pages are dropped in parallel with training, so a layer may have returned before its turn comes."""
    given_back = []
    monkeypatch.setattr(in_place, "give_back", lambda tensors: given_back.extend(t.data_ptr() for t in tensors))
    store = backend_for(with_lora(load_int8(tiny))).store
    assert isinstance(store, InPlace)
    pages = [{t.data_ptr() for t in tensors} for tensors in store._mapped]
    assert all(pages)
    store.reserve(1)
    busy = threading.Event()
    store._worker.start(lambda: busy.wait(timeout=30))
    given_back.clear()
    for unit in (0, 1, 0, 2) if not returns else (0, 1, 0):
        store.apply(active(unit))
    assert not given_back
    busy.set()
    store._worker.close()
    assert set(given_back) == (pages[1] if returns else pages[0] | pages[1])


def test_only_mapped_memory_is_ever_given_back(tiny):
    from safetensors import safe_open

    with safe_open(f"{tiny}/model.safetensors", framework="pt") as file:
        mapped = file.get_tensor("model.embed_tokens.weight")
        copy = mapped.clone()
        assert file_backed([mapped, copy, torch.ones(10**6)]) == [True, False, False]
        give_back([mapped])
        assert torch.equal(mapped, copy), "it is read again from the file"


@pytest.mark.parametrize("change", ["time", "size", "replaced", "deleted"])
@pytest.mark.parametrize("store", ["in place", "slots"])
def test_a_checkpoint_that_changes_during_training(change, store, tiny, tmp_path, request):
    if store == "slots":
        request.getfixturevalue("slotted")
    folder = tmp_path / "llama"
    shutil.copytree(tiny, folder)
    file = folder / "model.safetensors"
    model = with_lora(load_int8(folder)).eval()
    backend = backend_for(model)
    backend.apply(active(0))
    if change == "time":
        os.utime(file, ns=(1, 1))
    elif change == "size":
        with file.open("ab") as end:
            end.write(b" ")
    else:
        file.unlink()
        if change == "replaced":
            file.write_bytes(b"another file of the same name")
    backend.apply(active())  # nothing new is read
    if change in ("time", "size"):
        for _ in range(3):  # and it stays an error
            with pytest.raises(SetupError, match=r"model.safetensors was changed since training began"):
                backend.apply(active(1, 2))
    else:
        backend.apply(active(0, 1, 2))
        assert torch.equal(logits(model), logits(load_bf16(tiny).eval())), "the mapping keeps the old file"


def test_the_device_store_needs_its_checkpoint_only_at_the_start(tiny, tmp_path):
    folder = tmp_path / "llama"
    shutil.copytree(tiny, folder)
    model = with_lora(load_int8(folder)).eval()
    backend = backend_for(model, recovery="device")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    backend.apply(active(0, 1, 2))
    assert torch.equal(logits(model), logits(load_bf16(tiny).eval()))
