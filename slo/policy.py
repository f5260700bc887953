"""The response policy: what may be degraded, how far and for how long; read from YAML, refused with file and field.

Nothing acts until ``mode`` says so, and a dependency is critical unless it says that it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from pasta_otel import semconv
from pasta_otel.errors import InputError
from pasta_otel.yamldepth import check_depth

Mode = Literal["off", "dry_run", "enforce"]
ChannelType = Literal["log", "webhook"]
MODES = ("off", "dry_run", "enforce")
ARROW = " -> "
SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Dependency:
    """One dependency of the watched services.

    Attributes:
        name: As the policy calls it.
        service: Its ``service.name`` in spans; the name, unless given.
        critical: True = never degraded, whatever it does.
        flag: ``degrade.<name>``; empty = it cannot be degraded.
        breaker: ``caller -> callee``; empty = whichever edge the cause names.
        healthy_below_seconds: A call that takes longer is not healthy; None = by the attribution's own evidence.
    """

    name: str
    service: str
    critical: bool = True
    flag: str = ""
    breaker: str = ""
    healthy_below_seconds: float | None = None

    @property
    def degradable(self) -> bool:
        """Return whether anything may be done about it."""
        return not self.critical and bool(self.flag)


@dataclass(frozen=True, slots=True)
class Channel:
    """Where notifications go.

    Attributes:
        name: As records name it.
        type: ``log`` or ``webhook``.
        url: Webhook address, which may carry a secret: never printed.
        url_env: Environment variable that holds it instead.
    """

    name: str
    type: ChannelType
    url: str = field(default="", repr=False)
    url_env: str = ""


@dataclass(frozen=True, slots=True)
class Policy:
    """How the controller may respond.

    Attributes:
        mode: ``off`` (notify only), ``dry_run`` (also say what would be done) or ``enforce``.
        dependencies: By name.
        dwell_ns: How long one cause must stay first before it is acted upon.
        cooldown_ns: After a degradation ended, how long before the same one may begin again.
        ttl_ns: How long a flag lives unless it is refreshed: the longest it survives a dead controller.
        max_hold_ns: The longest a flag is held after its burn ended, whatever the dependency does.
        max_flags: Most degradations at once.
        max_share: Most degradations at once, as a share of what can be degraded; one is always allowed.
        notify: Channels.
        pins: Flags fixed by the policy's author.
        capture_tier: Tier that a burning SLO raises capture to (``pasta.capture``); None = it does not.
        capture_ns: How long one raise lasts at most.
    """

    mode: Mode = "off"
    dependencies: Mapping[str, Dependency] = field(default_factory=dict)
    dwell_ns: int = 0
    cooldown_ns: int = 300 * SECOND_NS
    ttl_ns: int = 60 * SECOND_NS
    max_hold_ns: int = 3600 * SECOND_NS
    max_flags: int = 1
    max_share: float = 0.5
    notify: tuple[Channel, ...] = (Channel("log", "log"),)
    pins: Mapping[str, Any] = field(default_factory=dict)
    capture_tier: int | None = None
    capture_ns: int = 60 * SECOND_NS

    @property
    def allowed_flags(self) -> int:
        """Return the blast radius: how many degradations may hold at once (Envoy's rule: a share, but at least one)."""
        degradable = sum(dependency.degradable for dependency in self.dependencies.values())
        return min(self.max_flags, max(1, int(self.max_share * degradable)))

    def find(self, kind: str, service: str, target: str) -> Dependency | None:
        """Return the dependency that a cause points at: by its exact edge, else by the called or named service."""
        if kind in {"edge_latency", "edge_errors"}:
            exact = [entry for entry in self.dependencies.values() if entry.breaker == target]
            callee = target.partition(ARROW)[2]
            loose = [entry for entry in self.dependencies.values() if not entry.breaker and entry.service == callee]
            return next(iter(exact + loose), None)
        if kind in {"self_time", "error_ratio"}:
            return next((entry for entry in self.dependencies.values() if entry.service == service), None)
        return None


def load_policy(path: Path | str) -> Policy:
    """Read a policy file.

    Raises:
        InputError: Unreadable, not YAML, or wrong: names the file and the field or line.
    """
    file = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        check_depth(text)
        document = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise InputError(error.strerror or str(error), file=file) from error
    except UnicodeDecodeError as error:
        raise InputError("not UTF-8", file=file) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise InputError(problem, file=file, line=mark.line + 1 if mark else None) from error
    except (ValueError, TypeError) as error:  # a date that is none, a number of 5,000 digits, a list as a key
        raise InputError(f"not valid YAML: {error}", file=file) from error
    return parse_policy(document, file)


def parse_policy(document: Any, file: str | None = None) -> Policy:
    """Build a policy from a parsed document; an empty one is the default: off.

    Raises:
        InputError: Names the file and the field.
    """
    top = _Fields(document if document is not None else {}, "", file)
    mode = top.take("mode", "off")
    mode = "off" if mode is False else mode  # YAML 1.1 reads `off` as false
    if mode not in MODES:
        top.refuse("mode", f"expected one of {', '.join(MODES)}, got {mode!r}")
    blast, capture = top.section("blast_radius"), top.section("capture")
    policy = Policy(
        mode=mode,  # type: ignore[arg-type]  # checked above
        dependencies=_dependencies(top.section("dependencies")),
        dwell_ns=top.seconds("dwell_seconds", 0.0, least=0.0),
        cooldown_ns=top.seconds("cooldown_seconds", 300.0, least=0.0),
        ttl_ns=top.seconds("ttl_seconds", 60.0, least=1.0),
        max_hold_ns=top.seconds("max_hold_seconds", 3600.0, least=1.0),
        max_flags=int(blast.number("max_flags", 1, least=1, whole=True)),
        max_share=blast.number("max_share", 0.5, least=0.0, most=1.0),
        notify=_channels(top),
        pins=_pins(top.section("pins")),
        capture_tier=int(capture.number("tier", 0, least=0, most=4, whole=True)) or None,
        capture_ns=capture.seconds("seconds", 60.0, least=1.0),
    )
    blast.finish()
    capture.finish()
    top.finish()
    return policy


def _dependencies(section: _Fields) -> dict[str, Dependency]:
    result: dict[str, Dependency] = {}
    owners: dict[str, str] = {}
    for name in section.names():
        fields = section.section(name)
        dependency = Dependency(
            name=name,
            service=fields.text("service", name),
            critical=fields.boolean("critical", default=True),
            flag=fields.text("flag", ""),
            breaker=fields.text("breaker", ""),
            healthy_below_seconds=fields.number("healthy_below_seconds", 0.0, least=0.0) or None,
        )
        fields.finish()
        if dependency.flag and not _is_degrade_flag(dependency.flag):
            fields.refuse("flag", f"expected degrade.<name>, got {dependency.flag!r}")
        if dependency.flag in owners:
            fields.refuse("flag", f"{dependency.flag} belongs to {owners[dependency.flag]} already")
        if dependency.flag:
            owners[dependency.flag] = name
        if dependency.breaker and not all(part.strip() for part in _ends(dependency.breaker)):
            fields.refuse("breaker", f"expected 'caller -> callee', got {dependency.breaker!r}")
        result[name] = dependency
    return result


def _is_degrade_flag(flag: str) -> bool:
    return flag.startswith(semconv.FLAG_DEGRADE_PREFIX) and len(flag) > len(semconv.FLAG_DEGRADE_PREFIX)


def _ends(breaker: str) -> tuple[str, str]:
    caller, _, callee = breaker.partition(ARROW)
    return caller, callee


def _channels(top: _Fields) -> tuple[Channel, ...]:
    entries = top.take("notify", [{"type": "log"}])
    if not isinstance(entries, list):
        top.refuse("notify", "expected a list")
    channels = tuple(_channel(_Fields(entry, f"notify[{i}]", top.file)) for i, entry in enumerate(entries))
    names = [channel.name for channel in channels]
    for index, name in enumerate(names):
        if name in names[:index]:
            top.refuse(f"notify[{index}].name", f"{name!r} is used twice")
    return channels


def _channel(fields: _Fields) -> Channel:
    kind = fields.text("type", "")
    if kind not in {"log", "webhook"}:
        fields.refuse("type", f"expected log or webhook, got {kind!r}")
    channel = Channel(fields.text("name", kind), kind, fields.text("url", ""), fields.text("url_env", ""))  # type: ignore[arg-type]  # checked above
    if kind == "webhook":
        if bool(channel.url) == bool(channel.url_env):
            fields.refuse("url", "expected exactly one of url and url_env")
        if channel.url and not channel.url.startswith(("http://", "https://")):
            fields.refuse("url", "expected http:// or https://")
    fields.finish()
    return channel


def _pins(section: _Fields) -> dict[str, Any]:
    pins = {}
    for name in section.names():
        value = section.take(name, None)
        if name == semconv.FLAG_CAPTURE:
            if not isinstance(value, dict):
                section.refuse(name, "expected a mapping")
        elif not _is_degrade_flag(name):
            section.refuse(name, f"expected degrade.<name> or {semconv.FLAG_CAPTURE}")
        elif not isinstance(value, bool):
            section.refuse(name, f"expected true or false, got {value!r}")
        pins[name] = value
    return pins


class _Fields:
    """One mapping of the document: takes typed fields out and refuses what is left."""

    def __init__(self, document: Any, path: str, file: str | None) -> None:
        self._path, self.file = path, file
        if not isinstance(document, dict):
            raise InputError(f"expected a mapping, got {type(document).__name__}", file=file, field=path or None)
        for key in document:
            if not isinstance(key, str):
                raise InputError(f"expected text as a key, got {key!r}", file=file, field=path or None)
        self._left = dict(document)

    def refuse(self, name: str, message: str) -> None:
        raise InputError(message, file=self.file, field=f"{self._path}.{name}" if self._path else name)

    def names(self) -> list[str]:
        return list(self._left)

    def take(self, name: str, default: Any) -> Any:
        return self._left.pop(name, default)

    def section(self, name: str) -> _Fields:
        value = self.take(name, None)
        return _Fields({} if value is None else value, f"{self._path}.{name}" if self._path else name, self.file)

    def text(self, name: str, default: str) -> str:
        value = self.take(name, default)
        if not isinstance(value, str):
            self.refuse(name, f"expected text, got {value!r}")
        return str(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            self.refuse(name, f"expected true or false, got {value!r}")
        return bool(value)

    def number(self, name: str, default: float, *, least: float, most: float = 1e9, whole: bool = False) -> float:
        value = self.take(name, default)
        allowed = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed) or not least <= value <= most:
            kind = "a whole number" if whole else "a number"
            self.refuse(name, f"expected {kind} from {least:g} to {most:g}, got {value!r}")
        return float(value)

    def seconds(self, name: str, default: float, *, least: float) -> int:
        return int(self.number(name, default, least=least) * SECOND_NS)

    def finish(self) -> None:
        for name in self._left:
            self.refuse(name, "unknown field")


class _StrictLoader(yaml.SafeLoader):
    """Refuse a key that stands twice in one mapping, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key_node.value!r} stands twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)
