"""The OpenAPI document of the client-facing endpoints, at ``/openapi.json``."""
