"""From the name of an engine to the engine: `package.module:Factory`, called with its options.

What a user can get wrong here (the name, the options, an object that is no engine) is a ConfigError. What goes wrong
inside of the factory is the engine's own, and comes out as it is.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from kvstream.engine import Engine
from kvstream.errors import ConfigError

__all__ = ["make_engine"]


def make_engine(name: str, options: Mapping[str, Any]) -> Engine:
    """The engine of that name. Imports its module. Raises ConfigError."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError("engine", f"must be package.module:Factory, is {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "engine", f"can't import {module_name}: {error}; modules are looked for in the installation and PYTHONPATH"
        ) from error
    factory: object = getattr(module, attribute, None)
    if not callable(factory):
        raise ConfigError("engine", f"{module_name} has no function or class {attribute!r}")
    made: object = _checked(name, factory, options)(**options)
    for method in ("start", "close"):
        if not inspect.iscoroutinefunction(getattr(made, method, None)):
            raise ConfigError("engine", f"{name} made {type(made).__name__}, which has no `async def {method}`")
    return cast("Engine", made)


def _checked(name: str, factory: Callable[..., object], options: Mapping[str, Any]) -> Callable[..., object]:
    """The factory, when these are options of it."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        known = [
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        for option in options:
            if option not in known:
                near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
                raise ConfigError("options", f"{name} has no option {option!r}; {hint}") from None
        raise ConfigError("options", f"{name}: {error}") from None
    return factory
