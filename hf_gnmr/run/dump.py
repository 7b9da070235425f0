"""YAML that reads back as it was: by YAML 1.1 and 1.2 readers alike, and inside the Python string of `hf_gnmr.script`."""

from __future__ import annotations

from typing import Any

import yaml

from .yaml12 import Yaml12

AWKWARD = "'\x85\u2028\u2029"
"""Text that has one of these is double-quoted: in single quotes a quote is doubled, so that two of them could end the Python
string, and the others, which YAML 1.1 counts as line ends, would be read back as a newline."""


class Dumper(yaml.SafeDumper):
    """A safe dumper that quotes text which either version would not read as text (``1e5`` is a number to YAML 1.2 only)."""


Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *Yaml12.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *Yaml12.yaml_implicit_resolvers}
}


def _text(dumper: Any, text: str) -> Any:
    style = '"' if any(character in text for character in AWKWARD) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, _text)


def dump(values: dict[str, Any]) -> str:
    """Plain values as YAML, keys in their order; three single quotes in a row stand in double-quoted scalars only."""
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True)
