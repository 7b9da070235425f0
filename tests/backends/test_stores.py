"""Stores of recovery weights: bit for bit in each, slots under a slow copy, pages given back, changed files, the budget."""

from __future__ import annotations

import gc
import os
import pathlib
import shutil
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES
from conftest import load_bf16, load_int8, save_llama, token_rows, trace_lines, with_lora
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_gnmr import ConfigError, GNMRCallback, GNMRConfig, GNMRSession, SetupError, quantize_int8
from hf_gnmr.backends.base import Backend
from hf_gnmr.backends.bnb.int8 import Int8Backend
from hf_gnmr.backends.bnb.pages import file_backed, give_back
from hf_gnmr.backends.bnb.stores import in_place
from hf_gnmr.backends.bnb.stores.host import InPlace
from hf_gnmr.backends.bnb.stores.placement import SlotCache
from hf_gnmr.backends.bnb.stores.residual import Workspace, decode, encode
from hf_gnmr.backends.bnb.stores.slots import Slots
from hf_gnmr.backends.units import find_units
from hf_gnmr.config import parse_bytes
from hf_gnmr.control.gnmr import Controller
from hf_gnmr.training.options import Options, within_budget

IDS = torch.tensor([row["input_ids"] for row in token_rows(4)])


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def active(*on, of=3):
    mask = np.zeros(of, dtype=bool)
    mask[list(on)] = True
    return mask


@pytest.fixture
def slotted(monkeypatch):
    """`host` as on an accelerator, with the CPU playing the device."""
    monkeypatch.setattr("hf_gnmr.backends.bnb.int8.is_accelerator", lambda device: True)


def backend_for(model, **options):
    return Int8Backend(model, find_units(model), eval_path="active", **options)


# -- bit for bit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "biased", "fp16 checkpoint", "in memory"])
@pytest.mark.parametrize("store", ["in place", "slots", "device"])
def test_every_store_gives_the_original_model_bit_for_bit(store, kind, tmp_path, request):
    folder = save_llama(
        tmp_path / "llama",
        dtype=torch.float16 if kind == "fp16 checkpoint" else torch.bfloat16,
        attention_bias=kind == "biased",
        mlp_bias=kind == "biased",
    )
    if store == "slots":
        request.getfixturevalue("slotted")
    expected = logits(load_bf16(folder).eval())
    model = with_lora(quantize_int8(load_bf16(folder)) if kind == "in memory" else load_int8(folder)).eval()
    plain = logits(model)
    backend = backend_for(model, recovery="device" if store == "device" else "host")
    backend.reserve(3)
    for on in ((), (1,), (0, 2), (0, 1, 2), (2,)):
        backend.apply(active(*on))
        found = logits(model)
        assert torch.equal(found, plain) == (on == ()) and torch.equal(found, expected) == (len(on) == 3), on
    backend.apply(active(0, 1, 2))
    assert torch.equal(logits(model.train()), expected)
    backend.remove()
    assert torch.equal(logits(model.eval()), plain)


@pytest.mark.parametrize("store", ["slots", "device"])
def test_transposed_weights_in_every_store(store, tmp_path, request):
    """GPT-2's Conv1D; its checkpoint has (in, out)."""
    if store == "slots":
        request.getfixturevalue("slotted")
    architecture = ARCHITECTURES["gpt2"]
    torch.manual_seed(0)
    architecture.model(architecture.config).to(torch.bfloat16).save_pretrained(tmp_path / "gpt2")
    expected = logits(architecture.model.from_pretrained(tmp_path / "gpt2", dtype=torch.bfloat16).eval())
    model = architecture.model.from_pretrained(
        tmp_path / "gpt2", dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    model = with_lora(model, target_modules=architecture.targets).eval()
    backend = backend_for(model, recovery="device" if store == "device" else "host")
    backend.apply(active(0, 1, 2))
    assert torch.equal(logits(model), expected)


def test_gradients_are_the_same_in_every_store(tiny, request):
    gradients = {}
    for store in ("in place", "device", "slots"):
        if store == "slots":
            request.getfixturevalue("slotted")
        model = with_lora(load_int8(tiny), trained=True).train()
        backend = backend_for(model, recovery="device" if store == "device" else "host")
        backend.reserve(2)
        backend.apply(active(0, 2))
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients[store] = [p.grad for p in model.parameters() if p.requires_grad]
    for store in ("device", "slots"):
        assert all(torch.equal(a, b) for a, b in zip(gradients[store], gradients["in place"], strict=True)), store


@pytest.mark.parametrize("recovery", ["host", "device", "slots"])
def test_training_in_every_store_gives_the_same_run(tiny, trainer_for, tmp_path, recovery, request):
    if recovery == "slots":
        request.getfixturevalue("slotted")
    callback = GNMRCallback(max_o=2, alpha=0.9, alpha_init_fraction=0, recovery=recovery.replace("slots", "host"))
    trainer_for(with_lora(load_int8(tiny)), callback).train()
    header, lines = trace_lines(tmp_path / "run")
    reference = GNMRCallback(max_o=2, alpha=0.9, alpha_init_fraction=0, trace_path=tmp_path / "reference.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_gnmr.backends.bnb.int8.is_accelerator", lambda device: False)
        trainer_for(with_lora(load_int8(tiny)), reference).train()
    assert reference.summary["promotion_ratio"] == callback.summary["promotion_ratio"] > 0
    assert max(line["recovery_bytes"] for line in lines) <= header["census"]["recovery_bytes_bound"]
    assert (recovery == "device") == (header["census"]["recovery_bytes_bound"] == 0)
    from hf_gnmr.trace.file import read_trace

    assert [line["norms"] for line in read_trace(tmp_path / "reference.jsonl").steps] == [line["norms"] for line in lines]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(["normal", "student", "bits"]), st.integers(0, 2**31 - 1))
def test_a_residual_decodes_to_the_original_whatever_it_is(rows, columns, kind, seed):
    """Also for bit patterns that are no reasonable weight: then nearly everything is an exception."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "bits":
        weight = torch.randint(-(2**15), 2**15, (rows, columns), dtype=torch.int16, generator=generator).view(torch.bfloat16)
    else:
        weight = torch.randn(rows, columns, generator=generator)
        if kind == "student":
            weight = weight / torch.randn(rows, columns, generator=generator).abs().clamp(min=0.05)
        weight = weight.to(torch.bfloat16)
        weight[0, 0], weight[-1, -1] = 0.0, -0.0
    finite = torch.nan_to_num(weight.float(), 0.0, 1.0, -1.0)
    scale = finite.abs().amax(1)
    codes = torch.nan_to_num(finite / scale[:, None] * 127).round().clamp(-127, 127).to(torch.int8)
    workspace = Workspace(weight.numel(), weight.device)
    residual = encode(weight, codes, scale, workspace)
    for _ in range(2):
        assert torch.equal(decode(residual, codes, scale, workspace).view(torch.int16), weight.view(torch.int16))
    assert residual.nbytes == weight.numel() + 6 * residual.index.numel()


def test_the_price_of_both_paths_resident_is_told_to_the_byte(tmp_path):
    folder = save_llama(tmp_path / "llama", hidden_size=256, intermediate_size=512)
    model = with_lora(load_int8(folder))
    backend = backend_for(model, recovery="device")
    store = backend.store
    weights = int(store.weights.sum())
    held = sum(residual.nbytes for residual, _ in store._residuals.values())
    held += sum(workspace.nbytes for workspace in store._workspaces.values())
    assert backend.resident_bytes == held
    assert held - 6 * store.exceptions - sum(w.nbytes for w in store._workspaces.values()) == weights
    assert 0.005 < store.exceptions / weights < 0.05 and backend.recovery_bytes_bound(3) == 0
    assert f"{store.exceptions:,} exceptions" in backend.census()["recovery_path"]


# -- slots ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_slots_hold_every_active_unit_and_copy_no_more_than_needed(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))
    slots = data.draw(st.integers(1, len(sizes)))
    cache = SlotCache(sizes, slots)
    assert sum(cache.slot_sizes) == sum(sorted(sizes)[-slots:])
    used = {}
    for step in range(data.draw(st.integers(1, 12))):
        units = data.draw(st.lists(st.integers(0, len(sizes) - 1), unique=True, max_size=slots))
        before = list(cache.holds)
        brought = dict(cache.place(units))
        for unit in units:
            slot = cache.slot_of(unit)
            assert slot is not None and cache.slot_sizes[slot] >= sizes[unit]
            assert (unit in brought) == (before[slot] != unit)
        held = [u for u in cache.holds if u is not None]
        assert len(held) == len(set(held))
        if len(set(sizes)) == 1:
            assert set(brought) == {u for u in units if u not in before}, "what is there is not copied again"
            gone = [u for u in before if u is not None and u not in cache.holds]
            stayed = [u for u in before if u in cache.holds and u not in units]
            assert all(used[g] <= used[s] for g in gone for s in stayed), "least recently used goes first"
        used |= dict.fromkeys(units, step)


def test_more_units_than_slots_is_an_error():
    with pytest.raises(ValueError, match="3 units for 2 slots"):
        SlotCache([1, 1, 1], 2).place([0, 1, 2])


def test_a_large_unit_finds_room_when_small_ones_sit_in_large_slots():
    cache = SlotCache([1, 4, 1, 4], 2)
    assert cache.slot_sizes == [4, 4]
    cache = SlotCache([1, 4, 1], 2)
    assert cache.slot_sizes == [4, 1]
    cache.place([0])
    cache.place([2])
    assert len(cache.place([0, 1])) >= 1 and cache.slot_of(1) == 0 and cache.slot_of(0) == 1


class SlowCopy:
    """A copy that waits for its gate, takes its time, and tells where it ran."""

    def __init__(self, seconds):
        self.seconds, self.threads, self.count, self.gate = seconds, set(), 0, threading.Event()

    def __call__(self, destination, source):
        if not self.gate.wait(timeout=30):
            raise TimeoutError("somebody waits for this copy who should not")
        time.sleep(self.seconds)
        self.threads.add(threading.current_thread().name)
        self.count += 1
        destination.copy_(source)


def slow_slots(tiny, seconds):
    model = with_lora(load_int8(tiny)).eval()
    backend = backend_for(model)
    copy = SlowCopy(seconds)
    backend.store._copy = copy
    return model, backend, copy


def test_copies_run_beside_and_only_the_layer_that_needs_them_waits(slotted, tiny):
    model, backend, copy = slow_slots(tiny, 0.02)
    backend.reserve(1)
    expected = logits(load_bf16(tiny).eval())
    # The gate opens when layers 0 and 1 are through: had the decision or they waited for a copy, it would fail.
    handle = model.get_base_model().model.layers[2].register_forward_pre_hook(lambda m, a: copy.gate.set())
    backend.apply(active(2))
    assert copy.count == 0, "the decision does not wait"
    lifted = logits(model)
    assert copy.count == 7, "the layer itself does"
    handle.remove()
    assert torch.equal(lifted, logits(model)) and copy.count == 7
    assert all(name.startswith("hf_gnmr") for name in copy.threads)
    backend.apply(active())
    backend.apply(active(2))
    logits(model)
    assert copy.count == 7, "a layer that returns soon is not copied again"
    backend.apply(active(0))
    backend.apply(active(1))
    logits(model)
    assert copy.count == 21 and backend.store.copied == 3
    assert not torch.equal(logits(model), expected)
    backend.remove()
    assert not [t for t in threading.enumerate() if t.name.startswith("hf_gnmr")]


def test_slots_are_allocated_once_and_never_exceed_the_bound(slotted, tiny):
    model = with_lora(load_int8(tiny)).eval()
    backend = backend_for(model)
    backend.reserve(2)
    buffers = [buffer.data_ptr() for slots in backend.store._by_device.values() for buffer in slots.buffers]
    assert backend.store.slot_bytes == backend.recovery_bytes_bound(2) == backend.census()["slot_bytes"]
    for on in ((0, 1), (1, 2), (0,), (2, 0), ()):
        backend.apply(active(*on))
        logits(model)
        assert [b.data_ptr() for s in backend.store._by_device.values() for b in s.buffers] == buffers
    views = {view.untyped_storage().data_ptr() for view in backend.store._views.values()}
    assert views <= set(buffers)
    assert backend.host_bytes == 0, "a mapped checkpoint takes no anonymous memory of the host"


def test_evaluation_on_the_recovery_path_streams_through_one_slot(slotted, tiny):
    model = with_lora(load_int8(tiny)).eval()
    backend = Int8Backend(model, find_units(model), eval_path="recovery")
    backend.reserve(0)
    assert len(next(iter(backend.store._by_device.values())).buffers) == 1
    expected = logits(load_bf16(tiny).eval())
    assert torch.equal(logits(model), expected) and torch.equal(logits(model), expected)
    assert backend.store.copied == 6
    backend.store.reserve(2)
    backend.apply(active(0, 1))
    logits(model)
    backend.paths[0].in_eval = backend.paths[1].in_eval = True
    backend.paths[2].in_eval = False
    copied = backend.store.copied
    logits(model)
    assert backend.store.copied == copied + 1, "the one that evaluation drove out, and no other"


def test_a_failed_copy_is_never_passed_over(slotted, tiny):
    model, backend, copy = slow_slots(tiny, 0)
    copy.gate.set()

    def broken(destination, source):
        raise OSError("the disk is gone")

    backend.reserve(3)
    backend.store._copy = broken
    backend.apply(active(1))
    for _ in range(9):
        with pytest.raises(OSError, match="the disk is gone"):
            logits(model)
    backend.store._copy = copy
    backend.apply(active(0, 1, 2))
    assert torch.equal(logits(model), logits(load_bf16(tiny).eval())), "tried again, and whole"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 3), max_size=3)), min_size=2, max_size=8))
def test_units_of_different_size_never_see_another_ones_weights(uneven, steps):
    """Decisions and evaluations of the whole model on the recovery path, in any order, through three slots."""
    model, expected, plain = uneven
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_gnmr.backends.bnb.int8.is_accelerator", lambda device: True)
        backend = Int8Backend(model, find_units(model), eval_path="recovery")
        assert len(set(backend.store.weights.tolist())) > 1
        backend.reserve(3)
        for whole, units in steps:
            backend.apply(active(*units, of=4))
            for unit in range(4):
                backend.paths[unit].in_eval = whole or unit in units
            found = logits(model)
            assert not whole or torch.equal(found, expected)
            assert units or whole or torch.equal(found, plain)
            for unit in units if not whole else ():  # a whole evaluation may have driven out what is lifted
                assert all(module in backend.store._views for module in backend.modules[unit])
        backend.remove()


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Four layers, of which three have only their attention in 8 bits."""
    folder = save_llama(tmp_path_factory.mktemp("uneven") / "llama", num_hidden_layers=4)
    skip = ["lm_head", *(f"model.layers.{i}.mlp" for i in (1, 2, 3))]
    quantization = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=quantization)
    model = with_lora(model, target_modules=["q_proj"]).eval()
    return model, logits(load_bf16(folder).eval()), logits(model)


def test_slots_on_two_devices_are_counted_on_both(slotted, tiny):
    model = with_lora(load_int8(tiny))
    backend = backend_for(model)
    backend.store._devices = [torch.device("cpu"), torch.device("cpu", 0), torch.device("cpu", 0)]
    for units in range(4):
        backend.reserve(units)
        assert backend.store.slot_bytes == backend.recovery_bytes_bound(units)
    assert backend.recovery_bytes_bound(1) == 2 * 73_728, "any one of each device's units may be the lifted one"


def test_a_closed_store_lets_go_of_its_memory(tmp_path):
    folder = save_llama(tmp_path / "llama", dtype=torch.float16)
    backend = backend_for(with_lora(load_int8(folder)))
    copies = [weakref.ref(original.weight) for original in backend.store.originals.values()]
    assert backend.resident_bytes > 0 and all(copy() is not None for copy in copies)
    backend.remove()
    gc.collect()
    assert not any(copy() is not None for copy in copies)


@pytest.mark.parametrize("recovery", ["host", "device", "dequantize"])
def test_a_switch_makes_no_tensor(recovery, tiny):
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    backend = backend_for(with_lora(load_int8(tiny)), recovery=recovery)
    backend.reserve(1)
    with Count():
        for unit in (0, 1, 2, 0, 1):
            backend.apply(active(unit))
    assert Count.calls == 0


def test_what_the_slots_cannot_hold_is_refused(slotted, tiny):
    model = with_lora(load_int8(tiny))
    with pytest.raises(ConfigError, match="fidelity_warmup=0.5 lifts all 3 units.*recovery='host' holds 1"):
        GNMRSession(model, max_o=1, total_steps=10, fidelity_warmup=0.5)
    GNMRSession(model, max_o=1, total_steps=10, fidelity_warmup=0.5, recovery="device").detach()
    GNMRSession(model, max_o=3, total_steps=10, fidelity_warmup=0.5).detach()


def test_pinning_is_for_accelerators(tiny):
    with pytest.raises(SetupError, match="pin_memory=True is for copies to an accelerator"):
        backend_for(with_lora(load_int8(tiny)), pin_memory=True)
    with pytest.raises(ConfigError, match="pin_memory=True.*recovery='host' only"):
        GNMRCallback(recovery="device", pin_memory=True)


# -- pages and files ------------------------------------------------------------------------------------------------


def resident_file_bytes(file):
    """Resident bytes of this process's mappings of `file`, by the address that each begins at."""
    found, begin = {}, None
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            begin = line.split("-")[0] if line.endswith(str(file)) else None
        elif begin is not None and line.startswith("Rss:"):
            found[begin] = 1024 * int(line.split()[1])
    return found


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
    assert resident() < 0.3 * bound, "what the check has read is given back"
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
    # Reading brings a few neighbouring pages as well; the layer's own are what counts. No lower bound for each: the system
    # may take pages back at any time (that the store does not is tested below).
    assert 0.7 * bound < max(seen) < 1.3 * bound, [size / bound for size in seen]
    backend.remove()
    assert resident() < 0.3 * bound


@pytest.mark.parametrize("returns", [False, True])
def test_pages_of_a_layer_that_came_back_stay(tiny, monkeypatch, returns):
    """Pages are dropped beside the training, so that a layer may have returned before its turn comes."""
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
        assert torch.equal(mapped, copy), "it comes back from the file"


@pytest.mark.parametrize("change", ["time", "size", "replaced", "deleted"])
@pytest.mark.parametrize("store", ["in place", "slots"])
def test_a_checkpoint_that_changes_under_the_training(change, store, tiny, tmp_path, request):
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


# -- budget ---------------------------------------------------------------------------------------------------------


class Sized:
    """A backend that is only sizes."""

    def __init__(self, sizes):
        self.bytes_added = np.array(sizes, dtype=np.int64)
        self.recoverable = np.ones(len(sizes), dtype=bool)

    recovery_bytes = Backend.recovery_bytes
    recovery_bytes_bound = Backend.recovery_bytes_bound


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_budget_is_never_exceeded_and_no_smaller_than_it_must_be(data):
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=1, max_size=12))
    budget = data.draw(st.integers(1, 1 + sum(sizes)))
    backend, options = Sized(sizes), Options(max_recovery_memory=budget)
    bounds = [backend.recovery_bytes_bound(units) for units in range(len(sizes) + 1)]
    if budget < max(sizes):
        with pytest.raises(ConfigError, match="is below one unit: the largest adds"):
            within_budget(GNMRConfig(), options, bounds, holds_all=True)
        return
    config = within_budget(GNMRConfig(alpha_init_fraction=0.0), options, bounds, holds_all=True)
    worst = sorted(sizes)[::-1]
    assert sum(worst[: config.max_o]) <= budget
    assert config.max_o == len(sizes) or sum(worst[: config.max_o + 1]) > budget
    controller = Controller(len(sizes), config)
    for _ in range(10):
        norms = data.draw(st.lists(st.floats(0, 1e3), min_size=len(sizes), max_size=len(sizes)))
        assert backend.recovery_bytes(controller.step(norms).active) <= budget


def test_a_budget_in_place_of_max_o(tiny, trainer_for, tmp_path):
    callback = GNMRCallback(max_recovery_memory="150KB", alpha=0.5, alpha_init_fraction=0)
    trainer_for(with_lora(load_int8(tiny)), callback).train()
    header, lines = trace_lines(tmp_path / "run")
    assert header["max_o"] == 2 and header["census"]["recovery_bytes_bound"] == 2 * 73_728
    assert max(line["recovery_bytes"] for line in lines) == 2 * 73_728 <= 150_000
    for options, message in (
        ({"max_recovery_memory": "10KB"}, "below one unit: the largest adds 73,728 bytes"),
        ({"max_recovery_memory": "150KB", "max_o": 1}, "max_recovery_memory='150KB' and max_o=1: give one of them"),
        ({"max_recovery_memory": "150KB", "recovery": "device"}, "lifted units add no memory here"),
        ({"max_recovery_memory": "150KB", "fidelity_warmup": 0.5}, "lifts all 3 units, which add 221,184 bytes"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer_for(with_lora(load_int8(tiny)), GNMRCallback(**options)).train()


@pytest.mark.parametrize(
    ("text", "size"), [("6GB", 6 * 10**9), ("1.5 GiB", 3 * 2**29), ("500 mb", 5 * 10**8), (12, 12), ("77", 77)]
)
def test_sizes(text, size):
    assert parse_bytes("x", text) == size


@pytest.mark.parametrize("text", ["6 G", "GB", "-1GB", 0, -5, True, 1.5, "1e9", None, "0GB"])
def test_no_sizes(text):
    with pytest.raises(ConfigError, match="x=.*'6GB' or '500MiB'"):
        parse_bytes("x", text)
    if text is not None:
        with pytest.raises(ConfigError, match="max_recovery_memory="):
            GNMRCallback(max_recovery_memory=text)


def test_slots_type(slotted, tiny):
    assert isinstance(backend_for(with_lora(load_int8(tiny))).store, Slots)
