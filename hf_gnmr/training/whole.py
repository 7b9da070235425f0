"""Whether a checkpoint's files are whole: read from their headers and ends, without unpickling and without loading a tensor.

A process that is killed while it saves, a full disk or an interrupted copy leaves files that exist and are cut off.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import zipfile
import zlib
from pathlib import Path

from ..files import FileError, read_json
from ..reading import MAX_DATA_BYTES, open_regular

STATE = "trainer_state.json"
"""The Trainer writes it last."""
CHECKPOINT = (STATE, "optimizer.pt", "scheduler.pt")
"""Files without which a run cannot be resumed exactly."""
WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json", "adapter_model.bin")
"""One of these holds a checkpoint's parameters."""
INDEX = ".index.json"
LONGEST_HEADER = 100_000_000
"""Bytes; safetensors refuses longer ones too."""
DTYPE_BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
              "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8}  # fmt: skip

Shapes = dict[str, tuple[int, ...]]


def damage(checkpoint: Path) -> str | None:
    """Why an exact resume from a checkpoint is impossible: the first file that is missing or cut off; None: it is whole."""
    missing = [name for name in CHECKPOINT if not (checkpoint / name).is_file()]
    if missing:
        return f"no {', '.join(missing)}"
    if not any((checkpoint / name).is_file() for name in WEIGHTS):
        return f"no weights (one of {', '.join(WEIGHTS)})"
    try:
        read_json(checkpoint / STATE)
        for file in sorted(checkpoint.iterdir()):
            _check(file)
        for file in sorted(checkpoint.glob("*/adapter_model.*")):  # a second adapter
            _check(file)
    except (FileError, OSError) as error:
        return str(error)
    return _missing_rank(checkpoint)


def _check(file: Path) -> None:
    """Raise FileError if a file that a resumed run reads is cut off."""
    if file.suffix == ".safetensors":
        shapes_in(file)
    elif file.name.endswith(INDEX):
        shapes_of_shards(file)
    elif file.suffix in (".pt", ".pth") or re.fullmatch(r"(adapter|pytorch)_model.*\.bin", file.name):
        check_torch_file(file)


def _missing_rank(checkpoint: Path) -> str | None:
    """One process writes rng_state.pth; several write rng_state_0.pth, rng_state_1.pth, …, each its own."""
    matches = [re.fullmatch(r"rng_state_(\d+)\.pth", file.name) for file in checkpoint.iterdir()]
    ranks = {int(match[1]) for match in matches if match is not None}
    first_missing = next(rank for rank in itertools.count() if rank not in ranks)
    if ranks and first_missing < max(2, max(ranks) + 1):
        return f"no rng_state_{first_missing}.pth, but those of other processes"
    return None


def lacks_random_state(checkpoint: Path) -> bool:
    """Whether there is no file of any process's random state: training can be resumed, but not with the same numbers."""
    return not any(checkpoint.glob("rng_state*.pth"))


def shapes_in(file: Path) -> Shapes:
    """Names and shapes of a safetensors file's tensors.

    Raises:
        FileError: the file is cut off, longer than its header says, or no safetensors file.
    """
    with open_regular(file, MAX_DATA_BYTES) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise FileError(f"{file} is empty or cut off within its header ({size} bytes)")
        text = stream.read(length)
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: tuple(int(side) for side in entry["shape"]) for name, entry in tensors.items()}
        ends = {name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for name, entry in tensors.items()}
        dtypes = {name: str(entry["dtype"]) for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise FileError(f"{file}: its header cannot be read ({type(error).__name__})") from error
    expected = 8 + length + max((end for _, end in ends.values()), default=0)
    if size != expected:
        raise FileError(f"{file} has {size} bytes, expected {expected}: it is cut off or damaged")
    for name, (begin, end) in ends.items():
        bits = DTYPE_BITS.get(dtypes[name])
        if bits is not None and 8 * (end - begin) != bits * math.prod(shapes[name]):
            raise FileError(f"{file}: {name} has {end - begin} bytes, which do not fit its shape {list(shapes[name])}")
    return shapes


def shapes_of_shards(index: Path) -> Shapes:
    """Names and shapes of the tensors in the files that an index lists.

    Raises:
        FileError: a broken index, or a shard that is missing, cut off, or lacks a tensor.
    """
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise FileError(f"{index}: expected a weight_map that names the file of each tensor")
    shapes: Shapes = {}
    for name in sorted(set(places.values())):
        shard = index.parent / name
        if Path(name).name != name or not shard.is_file():
            raise FileError(f"{index}: no {name} beside it")
        if shard.suffix != ".safetensors":
            check_torch_file(shard)
            continue
        inside = shapes_in(shard)
        missing = [key for key, place in places.items() if place == name and key not in inside]
        if missing:
            raise FileError(f"{shard} lacks {len(missing)} of its tensors (first: {missing[0]})")
        shapes |= {key: shape for key, shape in inside.items() if places.get(key) == name}
    return shapes


def check_torch_file(file: Path) -> None:
    """Check a file that `torch.save` wrote: a zip archive, whose directory is at its end.

    Raises:
        FileError: empty, cut off, an archive whose entries are not where its directory says, or do not have their checksums
            (all of it is read; without checksums, as `torch.serialization.set_crc32_options(False)` writes them, not).
    """
    with open_regular(file, MAX_DATA_BYTES) as stream:
        start = stream.read(2)
        if start == b"\x80\x02":  # torch's format before 1.6: a pickle without an end mark
            return
        try:
            with zipfile.ZipFile(stream) as archive:
                entries, first = archive.infolist(), archive.start_dir
                whole = any(entry.filename.endswith("data.pkl") for entry in entries)
                for entry in entries:
                    stream.seek(entry.header_offset)
                    whole = whole and stream.read(4) == b"PK\x03\x04"
                    whole = whole and entry.header_offset + 30 + entry.compress_size <= first
                damaged = archive.testzip() if whole and any(entry.CRC for entry in entries) else None
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
            raise FileError(f"{file} is empty or cut off ({file.stat().st_size} bytes)") from error
    if not whole:
        raise FileError(f"{file} is damaged: its entries are not where its directory says")
    if damaged is not None:
        raise FileError(f"{file} is damaged: {damaged.rpartition('/')[2]} does not have its checksum")
