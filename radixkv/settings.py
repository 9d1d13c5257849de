"""Where ``radixkv serve`` takes its options from beside the command line: the environment, then a file.

The first that names an option decides: command line, ``RADIXKV_SERVE_...``, ``--config FILE``, default.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection
from cyclopts.config import Dict, Env

PREFIX = "RADIXKV_SERVE_"
FILE_OPTION = "--config"

_from_environment = Env(PREFIX, command=False, show=False)


def from_environment(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Take options from variables; raises ``ValueError`` for one that is named like an option's and is none's."""
    known = {_variable(name) for name in _options(arguments)}
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable not in known:
            raise ValueError(f"environment variable {variable} is no option of radixkv serve (see radixkv serve --help)")
    _from_environment(app, commands, arguments)


def from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Take options from the TOML file that ``--config`` names: ``port = 8000``, dashes or underscores in the names.

    Raises ``ValueError`` naming file and key where a key is no option or no single value, ``OSError`` where it can't be read.
    """
    given = next(argument for argument in arguments if FILE_OPTION in argument.names).tokens
    if not given:
        return
    path = Path(given[-1].value)
    try:
        settings = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML file: {error}") from None
    known = set(_options(arguments)) - {FILE_OPTION}
    options: dict[str, Any] = {}
    for key, value in settings.items():
        name = key.replace("_", "-")
        if f"--{name}" not in known:
            raise ValueError(f"{path}: {key!r} is no option of radixkv serve (see radixkv serve --help)")
        if isinstance(value, dict | list):
            raise ValueError(f"{path}: {key} must be a single value, got {value!r}")
        if name in options:
            raise ValueError(f"{path}: {name} stands there twice, once with - and once with _")
        options[name] = value
    Dict(options, source=str(path), use_commands_as_keys=False)(app, commands, arguments)


def _options(arguments: ArgumentCollection) -> list[str]:
    """Their long names, as in ``--hang-timeout``."""
    return [argument.name for argument in arguments if argument.name.startswith("--")]


def _variable(option: str) -> str:
    return PREFIX + option.removeprefix("--").replace("-", "_").upper()
