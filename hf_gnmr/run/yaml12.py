"""Safe YAML loading with the plain scalars of YAML 1.2."""

from __future__ import annotations

import re
from typing import Any

import yaml


class Yaml12(yaml.SafeLoader):
    """A safe loader for YAML 1.2's plain scalars: ``2e-5`` is a float, ``on`` and ``1:30`` are strings, ``010`` is 10.

    A duplicate key in a mapping is refused; PyYAML would take the last value.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        duplicate = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        if duplicate is not None:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {duplicate!r}", node.start_mark)
        return super().construct_mapping(node, deep)


Yaml12.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":float", ":int", ":bool", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Yaml12.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
Yaml12.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+.0123456789"),
)


def _int(loader: Any, node: Any) -> int:
    return int(loader.construct_scalar(node))


def _float(loader: Any, node: Any) -> float:
    return float(loader.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


Yaml12.add_constructor("tag:yaml.org,2002:int", _int)
Yaml12.add_constructor("tag:yaml.org,2002:float", _float)
