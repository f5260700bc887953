"""Who sends: resource attributes, with an identity that stays true after fork."""

from __future__ import annotations

import functools
import os
import socket
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from pasta_otel import semconv
from pasta_otel.exporters.otlp import wire
from pasta_otel.model import Attributes, AttributeValue


def _new_id() -> str:
    return str(uuid.uuid4())


class ProcessIdentity:
    """``service.instance.id`` and ``process.pid`` of the process that asks.

    Workers forked from one parent must not share an instance id: a metric series has one writer
    (opentelemetry-python#4390). Ids are kept by pid, so no fork handler and no lock is needed, and of two threads that
    ask first in a child both get the same.

    Args:
        instance_id: This process's id; a new one if not given.
        new_id: Makes the id of a forked child.
    """

    def __init__(self, instance_id: str | None = None, *, new_id: Callable[[], str] = _new_id) -> None:
        self._new_id = new_id
        self._ids = {os.getpid(): instance_id or new_id()}

    @classmethod
    def following(cls, resource: Callable[[], Attributes]) -> ProcessIdentity:
        """Return the identity that a resource names, also after fork if its owner renews it there."""
        first = resource().get(semconv.SERVICE_INSTANCE_ID)

        def renewed() -> str:
            now = resource().get(semconv.SERVICE_INSTANCE_ID)
            return str(now) if now and now != first else _new_id()

        return cls(str(first) if first else None, new_id=renewed)

    def attributes(self) -> dict[str, AttributeValue]:
        """Return the two attributes of this very process."""
        pid = os.getpid()
        if pid not in self._ids:
            self._ids.setdefault(pid, self._new_id())
        return {semconv.SERVICE_INSTANCE_ID: self._ids[pid], semconv.PROCESS_PID: pid}


def renew_resource(encoded: Any, identity: ProcessIdentity) -> None:
    """Write this process's identity into an encoded ``Resource`` message."""
    own = identity.attributes()
    others = [pair for pair in encoded.attributes if pair.key not in own]
    del encoded.attributes[:]
    encoded.attributes.extend(others)
    encoded.MergeFromString(wire.resource(own))


def default_service_name() -> str:
    """Return ``unknown_service:<argv0>``, as the OpenTelemetry specification names a service without a name."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in {"", "-c", "-m"} else "python"
    return f"unknown_service:{program}"


def default_identity() -> ProcessIdentity:
    """Return this process's identity, always the same: traces, metrics and rows of one process say one instance id.

    The id is what the user set in ``OTEL_RESOURCE_ATTRIBUTES``, or a new one.
    """
    chosen = OTELResourceDetector().detect().attributes.get(semconv.SERVICE_INSTANCE_ID)
    return _identity(str(chosen) if chosen else None)


@functools.cache
def _identity(instance_id: str | None) -> ProcessIdentity:
    return ProcessIdentity(instance_id)


def identity_of(resource: Callable[[], Attributes]) -> ProcessIdentity:
    """Return the identity of a resource's owner: this process's where it says that id or none, else one that follows.

    Args:
        resource: Returns the resource attributes of the owner.
    """
    ours, said = default_identity(), resource().get(semconv.SERVICE_INSTANCE_ID)
    if not said or said == ours.attributes()[semconv.SERVICE_INSTANCE_ID]:
        return ours
    return ProcessIdentity.following(resource)


def build_resource(identity: ProcessIdentity, attributes: Attributes | None = None) -> Resource:
    """Return this process's resource.

    Args:
        identity: Instance id and pid.
        attributes: Further attributes; ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` win over them.
    """
    ours: dict[str, AttributeValue] = {semconv.HOST_NAME: socket.gethostname(), **(attributes or {})}
    user = OTELResourceDetector().detect()
    resource = Resource.create().merge(Resource(ours)).merge(user).merge(Resource(identity.attributes()))
    if not {**ours, **user.attributes}.get(semconv.SERVICE_NAME):
        resource = resource.merge(Resource({semconv.SERVICE_NAME: default_service_name()}))
    return resource
