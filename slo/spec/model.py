"""OpenSLO's objects as frozen records, and ``SLO``: one objective, resolved, which the controller evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

from pasta_otel.model import SpanSLI

BudgetingMethod = Literal["Occurrences", "Timeslices", "RatioTimeslices"]
Labels = tuple[tuple[str, tuple[str, ...]], ...]
Annotations = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """Name, labels and annotations of an OpenSLO object."""

    name: str
    display_name: str = ""
    labels: Labels = ()
    annotations: Annotations = ()


@dataclass(frozen=True, slots=True)
class MetricSource:
    """Where a metric comes from: ``spec`` is the data source's own language.

    Attributes:
        type: Data source type as written, e.g. ``Prometheus`` or ``spans``.
        ref: ``metadata.name`` of a DataSource, or empty.
        spec: The source's own fields.
        path: Field path in the file, for messages.
    """

    type: str
    ref: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict, hash=False)
    path: str = ""


@dataclass(frozen=True, slots=True)
class PointSelector:
    """OTLP metric points: a sum's values, or the counts of a histogram.

    Attributes:
        metric: Metric name.
        where: Attributes of the point or its resource that must equal these texts.
        threshold: For a histogram, count what is at most this, in the metric's unit; None = everything.
    """

    metric: str
    where: tuple[tuple[str, str], ...] = ()
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class OtlpSLI:
    """Events counted by OTLP metrics that the sidecar receives; exactly one of ``good`` and ``bad``."""

    total: PointSelector
    good: PointSelector | None = None
    bad: PointSelector | None = None


@dataclass(frozen=True, slots=True)
class RatioMetric:
    """Good or bad events over total ones, or a ready ratio (``raw``); ``spans`` or ``otlp`` if the source is ours."""

    counter: bool = False
    good: MetricSource | None = None
    bad: MetricSource | None = None
    total: MetricSource | None = None
    raw: MetricSource | None = None
    raw_type: str = ""
    spans: SpanSLI | None = None
    otlp: OtlpSLI | None = None

    def sli_of_raw(self, value: float) -> float:
        """Return the share of good events that a raw value means."""
        return 1 - value if self.raw_type == "failure" else value


@dataclass(frozen=True, slots=True)
class Indicator:
    """An SLI: a ratio, or a value that an objective compares with its own threshold."""

    metadata: Metadata
    ratio: RatioMetric | None = None
    threshold: MetricSource | None = None
    description: str = ""


@dataclass(frozen=True, slots=True)
class DurationText:
    """A duration as OpenSLO writes it: a count and a unit (m h d w M Q Y); months and longer are not a fixed length."""

    count: int
    unit: str

    @property
    def text(self) -> str:
        """Return the shorthand, e.g. ``30d``."""
        return f"{self.count}{self.unit}"


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """The period of an SLO: rolling, or calendar-aligned to a local start time in a named zone.

    Attributes:
        duration: Length.
        calendar_start: Local start time (no zone), None for a rolling window.
        time_zone: IANA zone name.
    """

    duration: DurationText
    calendar_start: datetime | None = None
    time_zone: str = ""


@dataclass(frozen=True, slots=True)
class Objective:
    """One objective of an SLO document; ``target`` is a ratio in [0, 1)."""

    target: Decimal
    display_name: str = ""
    op: str = ""
    value: Decimal | None = None
    slice_target: Decimal | None = None
    slice_window: DurationText | None = None
    indicator: Indicator | None = None
    indicator_ref: str = ""
    composite_weight: Decimal = Decimal(1)


@dataclass(frozen=True, slots=True)
class AlertCondition:
    """When to alert: a burn rate compared with a threshold over a lookback window."""

    metadata: Metadata
    severity: str = ""
    op: str = ""
    threshold: Decimal | None = None
    lookback: DurationText | None = None
    alert_after: DurationText | None = None
    description: str = ""


@dataclass(frozen=True, slots=True)
class AlertNotificationTarget:
    """Whom to tell."""

    metadata: Metadata
    target: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class AlertPolicy:
    """Which condition alerts whom; entries are names until they are resolved."""

    metadata: Metadata
    alert_when_no_data: bool = False
    alert_when_resolved: bool = False
    alert_when_breaching: bool = False
    conditions: tuple[AlertCondition | str, ...] = ()
    targets: tuple[AlertNotificationTarget | str, ...] = ()
    description: str = ""


@dataclass(frozen=True, slots=True)
class Service:
    """A service that SLOs belong to."""

    metadata: Metadata
    description: str = ""


@dataclass(frozen=True, slots=True)
class DataSource:
    """A place that metrics come from."""

    metadata: Metadata
    type: str
    connection: Mapping[str, Any] = field(default_factory=dict, hash=False)
    description: str = ""


@dataclass(frozen=True, slots=True)
class Alerting:
    """What the generated alerts of an SLO carry (Sloth's ``alerting``).

    Attributes:
        name: Alert name.
        labels: Labels of both alerts.
        annotations: Annotations of both alerts.
        severity_labels: Further labels by severity (``page``, ``ticket``).
        severity_annotations: Further annotations by severity.
        disabled: Severities that have no alert.
    """

    name: str = ""
    labels: Annotations = ()
    annotations: Annotations = ()
    severity_labels: tuple[tuple[str, Annotations], ...] = ()
    severity_annotations: tuple[tuple[str, Annotations], ...] = ()
    disabled: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SLODocument:
    """An SLO as its file has it, references unresolved; ``composite``: several indicators share one budget."""

    metadata: Metadata
    service: str
    window: WindowSpec
    method: BudgetingMethod
    objectives: tuple[Objective, ...]
    indicator: Indicator | None = None
    indicator_ref: str = ""
    alert_policies: tuple[AlertPolicy | str, ...] = ()
    description: str = ""
    composite: bool = False
    alerting: Alerting | None = None


SpecObject = SLODocument | Indicator | Service | DataSource | AlertPolicy | AlertCondition | AlertNotificationTarget


@dataclass(frozen=True, slots=True)
class Read:
    """An object as read.

    Attributes:
        object: The object.
        name_field: Where its name stands, below the document's or list entry's top.
        scope: Path below which errors concern this object alone; empty = it has the document or entry to itself.
    """

    object: SpecObject
    name_field: str = "metadata.name"
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Good events of a classic histogram: those at most ``threshold``, in the metric's unit."""

    histogram: str
    threshold: Decimal
    selector: str = ""


@dataclass(frozen=True, slots=True)
class PrometheusSLI:
    """Queries in PromQL; ``{{.window}}`` stands for the window.

    Attributes:
        total: All events.
        good: Good events, or None.
        bad: Bad events, or None.
        raw: A ratio that the query itself computes, or None.
        raw_failure: True when ``raw`` is a share of bad events.
        threshold: A value that is good while ``value op bound`` holds, or None.
        op: ``lte``, ``gte``, ``lt`` or ``gt``.
        bound: What ``threshold`` is compared with.
        connection: Connection details of the data source, or empty.
        bucket: Good events by a histogram's buckets, which only a server knows; ``good`` is None then.
    """

    total: str = ""
    good: str | None = None
    bad: str | None = None
    raw: str | None = None
    raw_failure: bool = False
    threshold: str | None = None
    op: str = ""
    bound: Decimal = Decimal(0)
    connection: tuple[tuple[str, str], ...] = ()
    bucket: Bucket | None = None


@dataclass(frozen=True, slots=True)
class AlertRule:
    """One AlertCondition of one AlertPolicy, as an SLO names it, references resolved.

    Attributes:
        policy: Name of the AlertPolicy.
        condition: Name of the AlertCondition.
        severity: As the author writes it.
        op: ``lte``, ``gte``, ``lt`` or ``gt``.
        threshold: Burn rate that is compared with.
        lookback: Window of the burn rate, as written.
        lookback_ns: Its length.
        after: For how long the condition must hold, as written, or empty.
        after_ns: Its length, 0 = at once.
        when_no_data: Fire when there is no data.
        when_resolved: Tell when it ceases to fire.
        when_breaching: Tell when it begins to fire.
        targets: Names and kinds of the notification targets.
    """

    policy: str
    condition: str
    severity: str
    op: str
    threshold: Decimal
    lookback: str
    lookback_ns: int
    after: str = ""
    after_ns: int = 0
    when_no_data: bool = False
    when_resolved: bool = False
    when_breaching: bool = False
    targets: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """Return a name that is stable and unique within an SLO."""
        return f"{self.policy}/{self.condition}"


@dataclass(frozen=True, slots=True)
class SLO:
    """One objective, resolved: what the controller evaluates.

    Attributes:
        name: ``metadata.name``, with the objective's name appended when the document has several.
        service: The service it belongs to.
        objective: Share of events (or slices) that must be good, in [0, 1).
        sli: A source's own frozen record (``model.SpanSLI`` for spans).
        window: The period over which the budget counts.
        method: How the budget counts.
        slice_target: For Timeslices: share of good events that makes a slice good.
        slice_window: Length of a slice.
        weight: Composite weight.
        composite_of: Name of the composite SLO this is a part of, or empty.
        description: For people.
        labels: Labels of the document.
        annotations: Owner, runbook and dashboard, as the document gives them.
        file: Where it was read, for messages.
        alerting: What its alerts carry, None = nothing of its own.
        alerts: The conditions of its AlertPolicies.
    """

    name: str
    service: str
    objective: Decimal
    sli: Any
    window: WindowSpec
    method: BudgetingMethod = "Occurrences"
    slice_target: Decimal | None = None
    slice_window: DurationText | None = None
    weight: Decimal = Decimal(1)
    composite_of: str = ""
    description: str = ""
    labels: Labels = ()
    annotations: Annotations = ()
    file: str = ""
    alerting: Alerting | None = None
    alerts: tuple[AlertRule, ...] = ()
