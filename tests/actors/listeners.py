"""An actor that has nothing to do with databases."""


class Listener:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self._told: list[bytes] = []

    def tell(self, message: bytes) -> None:
        self._told.append(message)

    def told(self) -> list[bytes]:
        return self._told
