"""Which namespaces lost outputs in a restart, and which replicas were asked to send them again."""

from __future__ import annotations

from collections.abc import Collection

LEASE_S = 10.0
"""How long a replica that was asked may stay silent before another one is asked."""

_NOBODY = "", 0.0


class Refills:
    """One replica at a time is asked for each namespace, and each replica once: outputs published
    shortly before the loss are only held by the replica that generated them."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[str, float]] = {}
        """By namespace that lost outputs: who was asked last, and until when nobody else is."""
        self._answered: dict[str, set[str]] = {}

    def note_lost(self, namespace: str) -> None:
        """A caller knows outputs of ``namespace`` that are missing here."""
        self._asked.setdefault(namespace, _NOBODY)

    def ask(self, namespace: str, reader: str, now_s: float) -> bool:
        """Whether to ask ``reader``, who is polling; if so nobody else is asked for a while.  If it
        polls again, it did not get the request, or could not send everything."""
        if not self.is_wanted(namespace, reader):
            return False
        asked, until_s = self._asked[namespace]
        if now_s < until_s:
            return reader == asked
        self._asked[namespace] = reader, now_s + LEASE_S
        return True

    def is_wanted(self, namespace: str, reader: str) -> bool:
        """Whether ``reader`` is still to be asked, now or after others."""
        return namespace in self._asked and reader not in self._answered.get(namespace, ())

    def extend(self, namespace: str, sender: str, now_s: float) -> None:
        """``sender`` has published: if it is the replica that was asked, it is answering."""
        if self._is_asked(namespace, sender):
            self._asked[namespace] = sender, now_s + LEASE_S

    def finish(self, namespace: str, reader: str) -> None:
        """``reader`` has sent all it has."""
        if self._is_asked(namespace, reader):
            self._asked[namespace] = _NOBODY
        if namespace in self._asked:
            self._answered.setdefault(namespace, set()).add(reader)

    def _is_asked(self, namespace: str, reader: str) -> bool:
        return self._asked.get(namespace, _NOBODY)[0] == reader

    def forget_readers(self, readers: Collection[str]) -> None:
        """Forget readers that are gone.  One that returns is asked once more."""
        for answered in self._answered.values():
            answered.difference_update(readers)

    def forget(self, namespace: str) -> None:
        """Stop asking for ``namespace``."""
        self._asked.pop(namespace, None)
        self._answered.pop(namespace, None)
