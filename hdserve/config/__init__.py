"""The configuration of a serving system: strict, frozen, and read from one file."""

from __future__ import annotations

from hdserve.config.application import (
    AccessConfig,
    GatewayConfig,
    ModelDatabaseConfig,
    ServeConfig,
    TelemetryConfig,
)
from hdserve.config.defaults import DefaultsConfig
from hdserve.config.loading import (
    ADMIN_KEY_ENVIRONMENT_VARIABLE,
    ADMIN_KEY_FILE_ENVIRONMENT_VARIABLE,
    API_KEYS_FILE_ENVIRONMENT_VARIABLE,
    CONFIG_ENVIRONMENT_VARIABLE,
    checked,
    default_config,
    load_config,
    parse_config,
    read_config,
)
from hdserve.config.model import (
    AutoscalingConfig,
    Device,
    DrafterConfig,
    DraftingConfig,
    Dtype,
    EngineConfig,
    ModelConfig,
)
from hdserve.config.strict_model import StrictModel

__all__ = [
    "ADMIN_KEY_ENVIRONMENT_VARIABLE",
    "ADMIN_KEY_FILE_ENVIRONMENT_VARIABLE",
    "API_KEYS_FILE_ENVIRONMENT_VARIABLE",
    "CONFIG_ENVIRONMENT_VARIABLE",
    "AccessConfig",
    "AutoscalingConfig",
    "DefaultsConfig",
    "Device",
    "DrafterConfig",
    "DraftingConfig",
    "Dtype",
    "EngineConfig",
    "GatewayConfig",
    "ModelConfig",
    "ModelDatabaseConfig",
    "ServeConfig",
    "StrictModel",
    "TelemetryConfig",
    "checked",
    "default_config",
    "load_config",
    "parse_config",
    "read_config",
]
