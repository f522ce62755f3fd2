"""Whether traces can be sent; ``deployments/tracing`` sends them."""

from __future__ import annotations

import importlib

from hdserve.config import TelemetryConfig
from hdserve.errors import ConfigError


def check_tracing(config: TelemetryConfig) -> None:
    """Refuse a configuration that wants traces if they cannot be sent from here.

    Raises:
        ConfigError: traces are wanted, and the packages that send them are missing.
    """
    if config.endpoint is None:
        return
    try:
        importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        raise ConfigError(
            f"telemetry.endpoint needs more packages: pip install 'hdserve[tracing]' ({error})"
        ) from error
