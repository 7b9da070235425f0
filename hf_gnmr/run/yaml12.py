"""Safe YAML loading with the plain scalars of YAML 1.2, within the limits of `reading`."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from ..reading import MAX_DEPTH, MAX_YAML_BYTES, MAX_YAML_KEYS, MAX_YAML_NODES, whole_number
from ..terminal import printable, shown


class YamlError(ValueError):
    """Text that is not valid YAML, or beyond a limit; the message has line and column, and shows no line of the text."""


def load_yaml(text: str, *, foreign: bool = False) -> Any:
    """The value of a YAML text.

    Args:
        text: of at most `MAX_YAML_BYTES` bytes.
        foreign: of a file that the user did not name: the message then shows nothing of its contents.

    Raises:
        YamlError: not valid, or beyond a limit.
    """
    if len(text) > MAX_YAML_BYTES:
        raise YamlError(f"expected at most {MAX_YAML_BYTES:,} bytes, got {len(text):,}")
    try:
        return yaml.load(text, Loader=Yaml12)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
        why = "" if foreign else ", ".join(printable(p) for p in (error.context, error.problem) if p)
        raise YamlError(": ".join(part for part in (where, why) if part) or "not readable") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        why = "" if foreign else f" ({printable(' '.join(str(error).split()))})"
        raise YamlError(f"a character that YAML does not allow{why}") from None
    except RecursionError:
        raise YamlError(f"expected at most {MAX_DEPTH} levels of nesting, got more") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:  # a tag on text that it does not fit
        raise YamlError("a value does not fit its tag") from error


class Yaml12(yaml.SafeLoader):
    """A safe loader for YAML 1.2's plain scalars: ``2e-5`` is a float, ``on`` and ``1:30`` are strings, ``010`` is 10.

    A duplicate key in a mapping is refused; PyYAML would take the last value.  Sizes are checked while nodes are composed,
    so that what is too large is refused before any value is built from it.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._keys = 0
        self._sizes: dict[int, int] = {}
        """How many nodes a finished node stands for, by identity."""
        self._total = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias = self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark
        before = self._total
        level = int(self.check_event(yaml.CollectionStartEvent))
        self._depth += level
        if self._depth > MAX_DEPTH:
            raise _beyond(f"{MAX_DEPTH} levels of nesting", mark)
        if isinstance(parent, yaml.MappingNode) and index is None:
            self._keys += 1
            if self._keys > MAX_YAML_KEYS:
                raise _beyond(f"{MAX_YAML_KEYS:,} keys", mark)
        node = super().compose_node(parent, index)
        self._depth -= level
        if alias:
            if id(node) not in self._sizes:
                raise yaml.composer.ComposerError(None, None, "an alias inside the value that it stands for", mark)
            self._total += self._sizes[id(node)]
        else:
            self._total += 1
            self._sizes[id(node)] = self._total - before
        if self._total > MAX_YAML_NODES:
            raise _beyond(f"{MAX_YAML_NODES:,} values, aliases counted with what they stand for", mark)
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key that is a list or mapping", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {shown(key)}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _beyond(expected: str, mark: Any) -> yaml.composer.ComposerError:
    return yaml.composer.ComposerError(None, None, f"expected at most {expected}, got more", mark)


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
    try:
        return whole_number(loader.construct_scalar(node))
    except ValueError as error:
        raise yaml.constructor.ConstructorError(None, None, printable(str(error)), node.start_mark) from None


def _float(loader: Any, node: Any) -> float:
    return float(loader.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


Yaml12.add_constructor("tag:yaml.org,2002:int", _int)
Yaml12.add_constructor("tag:yaml.org,2002:float", _float)
