"""The export of spans and metrics, from the settings."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from opentelemetry.sdk.resources import Resource

from gateway.settings import Settings
from tracing.attributes import SemanticConventions
from tracing.content import ContentPolicy
from tracing.export import SpanExport, SpanExportOptions, otlp_exporter, otlp_metric_reader
from tracing.semantic_metrics import SemanticMetrics


def span_export(settings: Settings) -> SpanExport | None:
    """Return what sends spans and metrics to the backend that the settings name, ``None`` where there is none.

    Raises ``ExportUnavailable`` without the extra that it needs.
    """
    tracing = settings.tracing
    if tracing.otlp_endpoint is None:
        return None
    endpoint, protocol = tracing.otlp_endpoint, tracing.otlp_protocol
    headers = {name: value.get_secret_value() for name, value in tracing.otlp_headers.items()}
    options = SpanExportOptions(
        SemanticConventions(tracing.conventions),
        service_version=_version(),
        content=ContentPolicy(tracing.content),
    )

    def metrics(resource: Resource) -> SemanticMetrics:
        reader = otlp_metric_reader(endpoint, protocol=protocol, headers=headers)
        return SemanticMetrics([reader], options.conventions, resource)

    exporter = otlp_exporter(endpoint, protocol=protocol, headers=headers)
    return SpanExport(exporter, options, metrics if tracing.otlp_metrics else None)


def _version() -> str:
    try:
        return version("keepwarm")
    except PackageNotFoundError:
        return ""
