"""Which tokens a grammar allows."""
