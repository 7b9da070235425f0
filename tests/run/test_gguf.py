"""GGUF files: an honest one is imported; a header that promises more than the limits or the file is one line."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from test_limits import command, refused

from hf_gnmr import SetupError
from hf_gnmr.reading import FileError
from hf_gnmr.run.gguf import import_gguf
from hf_gnmr.run.gguf_header import check_gguf


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(tensors=0, keys=0, rest=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def array(kind, count, rest=b""):
    return header(0, 1, text(b"k") + struct.pack("<IIQ", 9, kind, count) + rest)


def tensor(*dimensions, offset=0, name=b"t"):
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return header(1, 0, text(name) + shape + struct.pack("<IQ", 0, offset))


HEADERS = {
    "other contents": (b"GGML" + bytes(50), "expected a GGUF file"),
    "empty": (b"", "expected a GGUF file"),
    "version": (header(version=9), "version 9: expected 2 or 3"),
    "cut": (header()[:18], "cut off within its header"),
    "tensors": (header(tensors=10**12), "number of tensors: expected at most .*got 1,000,000,000,000"),
    "keys": (header(keys=2**63), "number of keys: expected at most"),
    "more keys than bytes": (header(keys=5000), "number of keys: expected at most 24, got 5,000"),
    "length of a key": (header(0, 1, struct.pack("<Q", 2**60)), "key 0: length of its name: expected at most"),
    "type": (header(0, 1, text(b"k") + struct.pack("<I", 99)), "key 'k': expected a GGUF type, got 99"),
    "length of a text": (header(0, 1, text(b"k") + struct.pack("<IQ", 8, 2**62)), "expected at most the rest of the file"),
    "elements": (array(4, 2**61), "number of elements: expected at most"),
    "elements than bytes": (array(4, 40, bytes(16)), "expected at most the rest of the file, got 160 bytes"),
    "texts": (array(8, 30, text(b"a") * 3 + struct.pack("<Q", 2**40)), "expected at most the rest of the file"),
    "array of arrays": (array(9, 1, array(9, 1)), "expected an array of numbers or texts, got type 9"),
    "control characters": (header(0, 1, text(b"\x1b[31m\xff") + struct.pack("<I", 99)), "expected a GGUF type"),
    "dimensions": (
        header(1, 0, text(b"t") + struct.pack("<I", 30) + bytes(300)),
        "number of dimensions: expected at most 8",
    ),
    "weights": (tensor(2**40, 2**40), "tensor 't': expected weights within the file"),
    "offset": (tensor(1, offset=2**50), "tensor 't': expected weights within the file"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_one_line(tmp_path, name):
    content, message = HEADERS[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(FileError, match=message) as error:
        check_gguf(file)
    assert len(str(error.value)) < 1000 and "\x1b" not in str(error.value)


def test_elements_are_counted_over_all_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_gnmr.run.gguf_header.MAX_ELEMENTS", 50)
    one = text(b"k") + struct.pack("<IIQ", 9, 0, 30) + bytes(30)
    file = tmp_path / "model.gguf"
    file.write_bytes(header(0, 2, one + one))
    with pytest.raises(FileError, match="expected at most 50 elements in all arrays"):
        check_gguf(file)


@pytest.mark.parametrize("name", ["keys", "elements", "length of a text", "weights"])
def test_the_command_is_refused_under_limits(tmp_path, name):
    (tmp_path / "model.gguf").write_bytes(HEADERS[name][0])
    refused(command("import-gguf", tmp_path / "model.gguf", tmp_path / "new"), "model.gguf")
    assert not (tmp_path / "new").exists()


def small_gguf(path, *, layers=1, skip=()):
    """A GPT-2-like tokenizer and a LLaMA of random weights, as llama.cpp writes them."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    tokens = ["<unk>", "<s>", "</s>", *map(chr, range(97, 123)), "ab"]
    for name, value in {
        "context_length": 64, "embedding_length": 32, "block_count": layers, "feed_forward_length": 64, "head_count": 2,
        "head_count_kv": 2,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_name("small")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 27)
    writer.add_token_merges(["a b"])
    for name, value in {"bos": 1, "eos": 2, "unk": 0}.items():
        getattr(writer, f"add_{name}_token_id")(value)
    shapes = {
        "token_embd": (len(tokens), 32), "output": (len(tokens), 32), "output_norm": (32,), "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (32, 32), "blk.0.attn_v": (32, 32),
        "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64),
    }  # fmt: skip
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        if name not in skip:
            writer.add_tensor(f"{name}.weight", generator.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_honest_file_is_imported(tmp_path):
    from transformers import AutoModelForCausalLM

    file = small_gguf(tmp_path / "model.gguf")
    assert check_gguf(file) == 2 * 30 * 32 + 3 * 32 + 4 * 32 * 32 + 3 * 64 * 32
    folder = import_gguf(file, tmp_path / "new")
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


@pytest.mark.parametrize(("layers", "message"), [(10**9, "num_hidden_layers=1000000000"), (500, "expected tensors for the")])
def test_sizes_beyond_the_tensors_are_refused(tmp_path, layers, message):
    with pytest.raises((SetupError, ValueError), match=message):
        import_gguf(small_gguf(tmp_path / "model.gguf", layers=layers), tmp_path / "new")
