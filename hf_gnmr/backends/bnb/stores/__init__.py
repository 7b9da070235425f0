"""Where the recovery path's weights are kept, and how an active unit gets at them: one file a store, one line in `STORES`.

| `recovery` | class | what is kept |
|---|---|---|
| `host` | `host.Host`: `in_place.InPlace` (CPU), `slots.Slots` (accelerator) | originals off the device |
| `device` | `decoded.Decoded` | one byte per weight besides the 8-bit ones |
| `dequantize` | `dequantised.Dequantised` | nothing |
"""

from __future__ import annotations

from .base import StoreKind
from .decoded import Decoded
from .dequantised import Dequantised
from .host import Host

STORES: dict[str, type[StoreKind]] = {"host": Host, "device": Decoded, "dequantize": Dequantised}
"""By the value of the option `recovery`."""
