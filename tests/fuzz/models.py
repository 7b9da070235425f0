"""Bad model folders: configuration, tokenizer, index and weights."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz.harness import Case, Place
from fuzz.recipes import base_recipe, plan, train

HTML = b"<!doctype html><html><body>404 Not Found</body></html>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda old: b"",
    "HTML": lambda old: HTML,
    "git-lfs pointer": lambda old: POINTER,
    "truncated": lambda old: old[: len(old) // 2],
    "zeros": lambda old: b"\0" * len(old),
    "a list": lambda old: b"[]",
    "null": lambda old: b"null",
    "an empty object": lambda old: b"{}",
    "deep": lambda old: b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "latin-1": lambda old: b'{"model_type": "caf\xe9"}',
    "text": lambda old: b'"llama"',
}
JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
HARMLESS = {
    ("generation_config.json", "an empty object"),
    ("tokenizer_config.json", "an empty object"),
}
"""An empty object is a valid file there."""
CONFIG: dict[str, Any] = {
    "model_type": (None, "no_such", 7, [], "", "bert"),
    "hidden_size": (0, -64, "64", 64.5, None, [], 63, True),
    "num_hidden_layers": (0, -1, "2", 2.5, None, []),
    "num_attention_heads": (0, -4, 3, "4", None, []),
    "num_key_value_heads": (0, 3, "2", [], -1),
    "head_dim": (0, -1, "16", []),
    "intermediate_size": (0, -1, "128", None, []),
    "vocab_size": (0, -1, "288", None, [], 1.5),
    "max_position_embeddings": (0, -1, "64", None),
    "rms_norm_eps": ("small", None, [], -1),
    "hidden_act": ("no_such", None, 7, []),
    "rope_parameters": ("x", 7, {"rope_type": "no_such"}, {"rope_type": "yarn"}, [1]),
    "attention_dropout": ("x", -1, [], 2),
    "torch_dtype": ("no_such", 7, []),
    "dtype": ("no_such", 7, [], {"a": 1}),
    "architectures": (7, "x", ["NoSuchModel"], [7], {"a": 1}),
    "quantization_config": (
        {},
        [],
        "x",
        {"quant_method": "no_such"},
        {"quant_method": "gptq", "bits": 4},
        {"load_in_4bit": True, "quant_method": "bitsandbytes"},
    ),
    "auto_map": ("x", 7, {"AutoConfig": "x.Y"}, []),
    "tie_word_embeddings": ("maybe", [], None),
    "pad_token_id": (-1, 9999, "x", []),
    "eos_token_id": ("x", {}, [["a"]]),
    "initializer_range": ("x", [], None),
    "attn_implementation": ("no_such", 7),
    "use_cache": ("x", []),
}
DRAWN = 1


def header_of(tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def split(old: bytes) -> tuple[dict[str, Any], bytes]:
    size = struct.unpack("<Q", old[:8])[0]
    return json.loads(old[8 : 8 + size]), old[8 + size :]


def with_header(old: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    tensors, body = split(old)
    return header_of(change(tensors) or tensors) + body


def first(tensors: dict[str, Any]) -> str:
    return next(name for name in tensors if name.endswith("q_proj.weight"))


def reshaped(tensors: dict[str, Any]) -> None:
    shape = tensors[first(tensors)]["shape"]
    tensors[first(tensors)]["shape"] = [shape[0] * 2, shape[1] // 2]


WEIGHTS: dict[str, Callable[[bytes], bytes]] = {
    "header cut": lambda old: old[:20],
    "body cut": lambda old: old[:-1000],
    "a byte more": lambda old: old + b"\0",
    "header of 2**60": lambda old: struct.pack("<Q", 2**60) + old[8:],
    "header of 0": lambda old: struct.pack("<Q", 0) + old[8:],
    "header not JSON": lambda old: struct.pack("<Q", 16) + b"not JSON, 16 byt" + old[24:],
    "header a list": lambda old: struct.pack("<Q", 2) + b"[]",
    "no tensors": lambda old: header_of({}),
    "unknown dtype": lambda old: with_header(old, lambda t: t[first(t)].update(dtype="X99")),
    "offsets beyond": lambda old: with_header(old, lambda t: t[first(t)].update(data_offsets=[0, 10**12])),
    "offsets reversed": lambda old: with_header(old, lambda t: t[first(t)].update(data_offsets=[100, 0])),
    "shape negative": lambda old: with_header(old, lambda t: t[first(t)].update(shape=[-1, 64])),
    "shape too large": lambda old: with_header(old, lambda t: t[first(t)].update(shape=[64, 65])),
    "shape of 2**60": lambda old: with_header(old, lambda t: t[first(t)].update(shape=[2**60, 2**60])),
    "another shape": lambda old: with_header(old, reshaped),
    "tensor renamed": lambda old: with_header(
        old, lambda t: {(k if k != first(t) else "model.nothing"): v for k, v in t.items()}
    ),
    "all renamed": lambda old: with_header(old, lambda t: {f"x.{k}" if k != "__metadata__" else k: v for k, v in t.items()}),
    "pickle": lambda old: b"\x80\x04\x95" + b"\0" * 100,
}
INDEX: dict[str, Any] = {
    "empty": b"",
    "HTML": HTML,
    "git-lfs pointer": POINTER,
    "list": [],
    "null": None,
    "no map": {"metadata": {}},
    "map null": {"metadata": {}, "weight_map": None},
    "map a list": {"metadata": {}, "weight_map": ["model.safetensors"]},
    "map empty": {"metadata": {}, "weight_map": {}},
    "map of numbers": {"metadata": {}, "weight_map": {"model.embed_tokens.weight": 7}},
    "file missing": {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}},
    "file outside": {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "../../../etc/passwd"}},
    "file absolute": {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "/dev/zero"}},
    "no metadata": {"weight_map": {"model.embed_tokens.weight": "nothing.safetensors"}},
    "metadata a list": {"metadata": [], "weight_map": {"model.embed_tokens.weight": "nothing.safetensors"}},
    "name with a null byte": {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "a\0b"}},
    "name of 5,000": {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "n" * 5000}},
}
TOKENIZER: dict[str, dict[str, Any]] = {
    "model missing": {"model": None},
    "model a list": {"model": []},
    "unknown model": {"model": {"type": "NoSuch"}},
    "vocab a list": {"model": {"type": "BPE", "vocab": [], "merges": []}},
    "vocab of text": {"model": {"type": "BPE", "vocab": {"a": "x"}, "merges": []}},
    "vocab negative": {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
    "merges unknown": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}},
    "added tokens": {"added_tokens": [7]},
    "unknown normalizer": {"normalizer": {"type": "NoSuch"}},
    "version": {"version": "99.0"},
}
TOKENIZER_CONFIG: dict[str, dict[str, Any]] = {
    "class unknown": {"tokenizer_class": "NoSuchTokenizer"},
    "class a number": {"tokenizer_class": 7},
    "eos a list": {"eos_token": []},
    "eos a number": {"eos_token": 7},
    "no eos": {"eos_token": None},
    "length a text": {"model_max_length": "long"},
    "decoder text": {"added_tokens_decoder": "x"},
    "decoder junk": {"added_tokens_decoder": {"x": {"content": 7}}},
    "side": {"padding_side": "up"},
    "extra tokens": {"extra_special_tokens": 7},
}


def trained(place: Place, command: Any, **sections: dict[str, Any]) -> int:
    recipe = base_recipe(place)
    recipe["model"]["name"] = str(place.folder / "model")
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values}
    return command(place, recipe)


def replaced(name: str, change: Callable[[bytes], bytes], command: Any = train) -> Callable[[Place], int]:
    def run(place: Place) -> int:
        file = place.copy("model") / name
        file.write_bytes(change(file.read_bytes() if file.exists() else b""))
        return trained(place, command)

    return run


def merged(name: str, values: dict[str, Any], command: Any = train) -> Callable[[Place], int]:
    return replaced(name, lambda old: json.dumps({**json.loads(old), **values}).encode(), command)


def indexed(content: Any) -> Callable[[Place], int]:
    def run(place: Place) -> int:
        folder = place.copy("model")
        (folder / "model.safetensors").unlink()
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / "model.safetensors.index.json").write_bytes(data)
        return trained(place, train)

    return run


def odd(name: str, make: Callable[[Path], Any]) -> Callable[[Place], int]:
    def run(place: Place) -> int:
        file = place.copy("model") / name
        file.unlink(missing_ok=True)
        make(file)
        return trained(place, train)

    return run


def cases() -> Iterator[Case]:
    import random

    generator = random.Random(17)
    for turn, file in enumerate(JSON_FILES):
        for number, (name, change) in enumerate(BROKEN.items()):
            if (turn + number) % 2 and (file, name) not in HARMLESS:
                command = plan if file == "config.json" and name in ("HTML", "truncated", "deep") else train
                yield Case(f"model/{file}/{name}", replaced(file, change, command), (file, "model.name"), f"{file}: {name}")
    for key, values in CONFIG.items():
        for number in sorted(generator.sample(range(len(values)), min(DRAWN, len(values)))):
            value = values[number]
            yield Case(
                f"model/config/{key}/{number}",
                merged("config.json", {key: value}, train if number % 2 else plan),
                (key, "config.json", "model.name", "model:"),
                f"config.json {key}: {value!r}",
            )
    for name, change in {
        **WEIGHTS,
        **{k: BROKEN[k] for k in ("empty", "HTML", "git-lfs pointer", "truncated", "zeros")},
    }.items():
        yield Case(f"model/weights/{name}", replaced("model.safetensors", change), ("model.safetensors", "model.name"), name)
    for name, content in INDEX.items():
        yield Case(
            f"model/index/{name}", indexed(content), ("model.safetensors", "model.name", "index.json"), f"{content!r}"
        )
    for name, values in TOKENIZER.items():
        yield Case(f"model/tokenizer/{name}", merged("tokenizer.json", values), ("tokenizer",), f"tokenizer.json {values}")
    for name, values in TOKENIZER_CONFIG.items():
        yield Case(
            f"model/tokenizer_config/{name}",
            merged("tokenizer_config.json", values),
            ("tokenizer",),
            f"tokenizer_config.json {values}",
        )
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        kinds: dict[str, Callable[[Path], Any]] = {
            "missing": lambda path: None,
            "folder": lambda path: path.mkdir(),
            "fifo": os.mkfifo,
            "device": lambda path: path.symlink_to("/dev/zero"),
        }
        for name, make in kinds.items():
            yield Case(f"model/{file}/{name}", odd(file, make), (file, "model.name"), f"{file}: {name}")
