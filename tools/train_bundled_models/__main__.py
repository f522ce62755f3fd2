"""``python -m tools.train_bundled_models``."""

from tools.train_bundled_models.cli import app

app()
