"""A request to a model: what its route knows of it from its arrival on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from fastapi import Request

from deployments.generation import GenerationRequest
from deployments.http.access import identity_of
from deployments.http.json_body import off_loop_by_body, read_json
from deployments.http.request_id import request_id
from deployments.http.tracing import trace_of
from deployments.off_loop import MAX_INLINE_SIZE
from deployments.openai.held_schema import not_held
from deployments.openai.request_body import OfferedBody
from deployments.session import SESSION_HEADER, session_id
from hdserve.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from deployments.gateway import Gateway

SPECULATION_HEADER = "x-hdserve-speculation"
"""The header that switches drafts off, for clients that cannot add fields to their bodies."""

_MAX_HEADER_CHARACTERS = 1000

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=OfferedBody)


class Arrival:
    """A request that has arrived; all that is done for it ends by its deadline.

    Attributes:
        deadline: by which it must be answered.
        own_id: the id it was sent with, or a new one.
    """

    def __init__(self, gateway: Gateway, request: Request) -> None:
        self.gateway = gateway
        self.request = request
        self.deadline = gateway.deadline(getattr(request.state, "arrived_s", None))
        self.own_id = request_id(request.scope)

    async def read(self, kind: type[BodyT]) -> BodyT:
        """Return the body.

        Raises:
            InvalidRequest: it is not JSON, or not a ``kind``.
        """
        reading = read_json(self.request, self.gateway.off_loop, kind.parse)
        return await self.deadline.wait(reading)

    async def work(self, function: Callable[..., T], *arguments: object) -> T:
        """Return the result of ``function``, which looks at the entire body; it runs in a thread if
        the body is long."""
        off_loop = self.gateway.off_loop
        working = off_loop_by_body(self.request, off_loop, function, *arguments)
        return await self.deadline.wait(working)

    async def generation(
        self, make: Callable[..., GenerationRequest], *arguments: object
    ) -> GenerationRequest:
        """Return what ``make`` makes of the body; it runs in a thread unless the body is short,
        because the grammars of many tools take 6 us a byte."""
        off_loop = self.gateway.off_loop
        making = off_loop_by_body(
            self.request, off_loop, make, *arguments, max_inline_bytes=MAX_INLINE_SIZE
        )
        return await self.deadline.wait(making)

    async def sized(self, generation: GenerationRequest) -> GenerationRequest:
        """Return ``generation`` with the size of the body."""
        return replace(generation, num_body_bytes=len(await self.request.body()))

    async def owned(self, generation: GenerationRequest) -> GenerationRequest:
        """Return ``generation`` with the namespace of its sender, its session, its trace and the
        size of the body; without drafts if a header says so.

        Raises:
            InvalidRequest: the header says something else.
        """
        request = self.request
        speculation = request.headers.get(SPECULATION_HEADER, "on")
        if speculation not in ("on", "off"):
            raise InvalidRequest(f"{SPECULATION_HEADER} is 'on' or 'off'", SPECULATION_HEADER)
        if speculation == "off":
            switched = {**generation.speculation, "is_enabled": False}
            generation = replace(generation, speculation=switched)
        return replace(
            await self.sized(generation),
            namespace=identity_of(request).namespace,
            session_id=session_id(request.headers.get(SESSION_HEADER, ""), generation),
            trace=trace_of(request),
        )

    async def ignored_header(
        self, body: OfferedBody, unheld: tuple[str, ...] = ()
    ) -> dict[str, str]:
        """Return the header that names what of ``body`` is ignored, which the metrics are told.

        Args:
            unheld: the paths of keywords of its schemas that are not enforced.

        Raises:
            Unsupported: something is left out or not enforced, and the configuration wants strict
                requests.
            InvalidRequest: there are undocumented fields, and it does.
        """
        gateway = self.gateway
        unread = await gateway.unread_by_template(body.model, self.deadline, body.variables)
        ignored, left_out, undocumented = await self.work(_unheeded, body)
        if gateway.config.gateway.strict_requests:
            for error in left_out.values():
                raise error
            for path in unheld:
                raise not_held(path)
            if undocumented:
                name = _header_value(undocumented[:1])[:100]
                raise InvalidRequest(f"the parameter {name!r} is unknown", name)
        ignored = tuple(sorted(unread.union(ignored, unheld)))
        gateway.http_metrics.ignored(len(ignored))
        return {"x-hdserve-ignored": _header_value(ignored)} if ignored else {}


def _unheeded(
    body: OfferedBody,
) -> tuple[tuple[str, ...], Mapping[str, Unsupported], list[str]]:
    """Return the ignored parameters of ``body``, and of these what is left out, and the
    undocumented ones."""
    ignored, left_out = body.ignored, body.left_out
    known = body.unmet.union(left_out)
    return ignored, left_out, [name for name in ignored if name not in known]


def _header_value(names: Iterable[str]) -> str:
    """Return names that a client chose as printable ASCII of bounded length."""
    most = _MAX_HEADER_CHARACTERS
    shown = (name[:most] for name in islice(names, most))
    return ", ".join(shown)[:most].encode("unicode_escape").decode()[:most]
