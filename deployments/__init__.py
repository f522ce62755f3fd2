"""hdserve on Ray Serve; ``serve run deployments:app``."""

from deployments.application import app

__all__ = ["app"]
