"""The document: every route of the gateway, what it takes, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version

import msgspec

from gateway.openapi.admin import ADMIN_SCHEMAS, admin_paths
from gateway.openapi.console import console_paths
from gateway.openapi.endpoints import LABEL, endpoint_paths, span_paths
from gateway.openapi.operators import OPERATOR_SCHEMAS, operator_paths
from gateway.openapi.schemas import SCHEMAS, Schema
from gateway.paths import ROOTS

_ABOUT = (
    "What agents use is there with and without /v1, and both behind /c/{label}, which names the agent of its runs. "
    "/v1/traces is there unless the settings have it off."
)


@cache
def document() -> bytes:
    """Return the document as JSON."""
    everywhere = {**endpoint_paths(), **span_paths()}
    paths: dict[str, Mapping[str, object]] = {
        root + path: _at(root, operations) for path, operations in everywhere.items() for root in ROOTS
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "keepwarm", "version": version("keepwarm"), "description": _ABOUT},
            "paths": {**paths, **operator_paths(), **admin_paths(), **console_paths()},
            "components": {
                "schemas": {**SCHEMAS, **OPERATOR_SCHEMAS, **ADMIN_SCHEMAS},
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                    "basic": {"type": "http", "scheme": "basic"},
                },
            },
        }
    )


def _at(root: str, operations: Mapping[str, Schema]) -> Mapping[str, object]:
    return {"parameters": [LABEL], **operations} if "{label}" in root else operations
