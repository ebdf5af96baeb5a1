"""The frozen models of a run as its server registers them. Keys come from the environment, and from nowhere else."""

import os
from collections.abc import Mapping
from typing import Any

from lightning_rl.config import ConfigError
from lightning_rl.config.schema import GatewayConfig


def registrations(gateway: GatewayConfig, environment: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """What `gateway.backends` registers with the server, keys included.

    Raises ConfigError where the variable that is to hold a key is not set.
    """
    engines = []
    for name, backend in gateway.frozen_models().items():
        fields = {"kind": backend.kind, "url": backend.url, "remote_model": backend.remote_model}
        if backend.api_key_env is not None:
            fields["api_key"] = environment.get(backend.api_key_env)
            if not fields["api_key"]:
                raise ConfigError(
                    f"config key gateway.backends.{name}.api_key_env: the environment variable {backend.api_key_env} "
                    f"is not set, and it is to hold the key of the service of model {name!r}: set it, or name another"
                )
        engines.append({"model": name} | {field: value for field, value in fields.items() if value is not None})
    return engines
