"""Which namespaces lost outputs in a restart, and which replicas were asked to give them back."""

from __future__ import annotations

from collections.abc import Collection

LEASE_S = 10.0
"""How long a replica that was asked may stay silent before another one is asked."""


class Refills:
    """One replica at a time is asked for each namespace, and each replica once: what was published
    shortly before the loss is held by nobody but the replica that generated it."""

    def __init__(self) -> None:
        self._asked_until: dict[str, float] = {}
        self._answered: dict[str, set[str]] = {}

    def note_lost(self, namespace: str) -> None:
        """A caller knows outputs of ``namespace`` that are not here."""
        self._asked_until.setdefault(namespace, 0.0)

    def ask(self, namespace: str, reader: str, now_s: float) -> bool:
        """Whether to ask ``reader``, who calls; if so nobody else is asked for a while."""
        if reader in self._answered.get(namespace, ()):
            return False
        if now_s < self._asked_until.get(namespace, float("inf")):
            return False
        self._asked_until[namespace] = now_s + LEASE_S
        return True

    def is_wanted(self, namespace: str, reader: str) -> bool:
        """Whether ``reader`` is to be asked, at the latest after all others."""
        return namespace in self._asked_until and reader not in self._answered.get(namespace, ())

    def extend(self, namespace: str, now_s: float) -> None:
        """The replica that was asked is answering."""
        if namespace in self._asked_until:
            self._asked_until[namespace] = now_s + LEASE_S

    def finish(self, namespace: str, reader: str) -> None:
        """``reader`` has given all it has."""
        if namespace in self._asked_until:
            self._asked_until[namespace] = 0.0
            self._answered.setdefault(namespace, set()).add(reader)

    def forget_readers(self, readers: Collection[str]) -> None:
        """Forget readers that are gone.  One that comes back is asked once more."""
        for answered in self._answered.values():
            answered.difference_update(readers)

    def forget(self, namespace: str) -> None:
        """Nothing of ``namespace`` is wanted back."""
        self._asked_until.pop(namespace, None)
        self._answered.pop(namespace, None)
