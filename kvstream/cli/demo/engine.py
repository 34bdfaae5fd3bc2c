"""The one place that knows where the example engine is: beside the package in a clone, inside it in a wheel.

It only finds and imports. Nothing of the engine is imported before it is asked for, since NumPy must not be loaded
before a worker's BLAS settings are known.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from kvstream.errors import ConfigError

if TYPE_CHECKING:
    from examples.smollm.engine import Engine
    from examples.smollm.loading import Model
    from kvstream.memory import KVPool

__all__ = ["ModelName", "blas_environment", "load_model", "make_engine", "prompt_text", "prompts", "smollm2_available"]

ModelName = Literal["smollm2", "synthetic"]

_INSTALLED: Final = "kvstream._examples.smollm"
_IN_CLONE: Final = "kvstream_examples_smollm"
_NEEDED: Final = ("tokenizers", "gguf")


def _package() -> str:
    """Import the engine's package and return its name. Raises ConfigError where it, or what it needs, is missing."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError("demo", f"{' and '.join(missing)} missing; pip install 'kvstream-runtime[demo]'")
    if _IN_CLONE in sys.modules:
        return _IN_CLONE
    try:
        return import_module(_INSTALLED).__name__
    except ModuleNotFoundError as error:
        if error.name is None or not _INSTALLED.startswith(error.name):
            raise
    # By its path and under a name of its own: `examples` on sys.path could be anybody's.
    directory = Path(__file__).parents[3] / "examples" / "smollm"
    spec = spec_from_file_location(_IN_CLONE, directory / "__init__.py", submodule_search_locations=[str(directory)])
    if spec is None or not (directory / "__init__.py").is_file():
        raise ConfigError("demo", f"the example engine is neither in the package nor at {directory}; reinstall it")
    return _run(spec)


def _run(spec: ModuleSpec) -> str:
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return spec.name


def blas_environment(threads: int) -> Mapping[str, str]:
    """Environment variables that give the BLAS of a child process so many threads."""
    environment: Mapping[str, str] = import_module(_package()).blas_environment(threads)
    return environment


def smollm2_available() -> bool:
    """Whether the weights of SmolLM2 are installed."""
    try:
        import_module(f"{_package()}.weights").smollm2_path()
    except ConfigError as error:
        if error.field != "model":
            raise
        return False
    return True


def load_model(name: ModelName) -> Model:
    """The model by name. Blocks, for seconds the first time; raises ConfigError that says what to install."""
    model: Model = import_module(f"{_package()}.loading").load_model(name)
    return model


def make_engine(model: Model, pool: KVPool) -> Engine:
    """An engine with `pool` as its KV memory."""
    engine: Engine = import_module(f"{_package()}.engine").Engine(model.weights, pool)
    return engine


def prompts() -> Mapping[str, str]:
    """The demo's prompts by name, short to long."""
    found: Mapping[str, str] = import_module(f"{_package()}.prompts").PROMPTS
    return found


def prompt_text(model: Model, text: str) -> str:
    """What is tokenised for a user's `text`: in the chat format where the model was trained on one."""
    if model.name != "smollm2":
        return text
    formatted: str = import_module(f"{_package()}.tokenizer").chat(text)
    return formatted
