"""Write docs/configuration.md from the configuration models.

python -m tools.config_reference > docs/configuration.md
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hdserve.config import ServeConfig
from hdserve.drafting.registry import DRAFTERS

_INTRODUCTION = """\
# Configuration reference

`hdserve serve --config FILE.yaml`, or `serve run --name hdserve deployments:app config=FILE.yaml`,
or the environment variable `HDSERVE_CONFIG`. Without any of them the bundled models are served. The
file is YAML; an unknown key is an error that names the known ones, and a wrong value is an error
that says what is expected, each with its line. `hdserve check-config FILE.yaml` checks it without
starting anything. Without `--name hdserve` the application of `serve run` is another one than that
of `hdserve serve`, at the same place. A relative path begins at the working directory of the
command, not at the file; on a Ray cluster that runs already (`RAY_ADDRESS`, `serve deploy`, a
RayService) in the directory of its `ray start`, so paths should be absolute there. `~/` is the home
directory. For `serve deploy` and a RayService, write the configuration itself below `args`: where
that names a file, Ray Serve compares the name, and deploying the file once more when it has changed
does nothing.

A smallest one:

```yaml
models:
  - name: assistant
    model: hdserve-tiny
```

This page is written by `python -m tools.config_reference` from the models in `hdserve/config/`.
"""

_DRAFTERS = """
## Options of the draft sources

`drafting.drafters` is a list of sources, each a `name` and its `options`; each fills a tree of its
own, and the likeliest nodes of all are verified. The default, `hierarchy`, is the one to use; the
others are for comparisons.
"""

_UNITS = ((2**30, "GiB"), (2**20, "MiB"))


def reference() -> str:
    """Return the whole page."""
    return _INTRODUCTION + "".join(_sections(ServeConfig, "")) + _DRAFTERS + "".join(_drafters())


def _sections(model: type[BaseModel], where: str) -> Iterator[str]:
    """Yield a table of the plain fields of ``model``, then those of the models in it."""
    nested: list[tuple[str, type[BaseModel]]] = []
    rows = []
    for name, field in model.model_fields.items():
        inner, is_list = _model_of(field.annotation)
        if inner is None or inner.__name__ == "DrafterConfig":
            rows.append(_row(name, field))
        else:
            nested.append((f"{where}{name}{'[]' if is_list else ''}.", inner))
    title = f"`{where.rstrip('.')}`" if where else "Top level"
    if rows:
        yield f"\n## {title}\n\n{_summary(model)}\n\n{_table(rows)}"
    for deeper, inner in nested:
        yield from _sections(inner, deeper)


def _drafters() -> Iterator[str]:
    for name, drafter in DRAFTERS.items():
        rows = [_row(option, field) for option, field in drafter.options_model.model_fields.items()]
        yield f"\n### `{name}`\n\n{_summary(drafter)}\n\n{_table(rows)}"


def _model_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the model a field holds, and whether it holds many."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for argument in get_args(annotation):
        found, _ = _model_of(argument)
        if found is not None:
            return found, get_origin(annotation) is tuple
    return None, False


def _table(rows: list[str]) -> str:
    return "| key | type | default | |\n|---|---|---|---|\n" + "".join(rows)


def _row(name: str, field: FieldInfo) -> str:
    text = _markdown(field.description or "")
    kind = _type(field.annotation) + _bounds(field)
    return f"| `{name}` | {kind} | {_default(field)} | {text} |\n"


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    arguments = [part for part in get_args(annotation) if part not in (type(None), ...)]
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_type, arguments))
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping"
    names = {str: "text", Path: "path", bool: "`true`, `false`", int: "integer", float: "number"}
    names |= {Any: "any"}
    found = names.get(annotation)
    if found is not None:
        return found
    return {"SecretStr": "text", "DrafterConfig": "sources"}[annotation.__name__]


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {_number(getattr(item, name))}"
        for item in field.metadata
        for name, sign in signs.items()
        if getattr(item, name, None) is not None
    ]
    return ", " + ", ".join(found) if found else ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return f"`{_literal(value)}`"


def _literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, BaseModel):
        shown = value.model_dump(mode="json", exclude_defaults=True)
        return "{" + ", ".join(f"{key}: {_literal(item)}" for key, item in shown.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, Enum):
        return str(value.value)
    return _number(value) if isinstance(value, (int, float)) else str(value)


def _number(value: float) -> str:
    for unit, name in _UNITS:
        if value >= unit and value % unit == 0:
            return f"{int(value)} ({int(value // unit)} {name})"
    return f"{value:g}" if value < 1e6 else f"{value}"


def _summary(thing: type) -> str:
    return _markdown((thing.__doc__ or "").strip().split("\n\n")[0])


def _markdown(text: str) -> str:
    """Return a docstring in one line: double backquotes and roles become code."""
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").replace("|", "\\|").replace("`None`", "`null`").split())


if __name__ == "__main__":
    print(reference(), end="")
