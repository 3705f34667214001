"""The gateway's two ASGI apps as data: which path goes to which route, and the layers around them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from pagemill_gateway.core import Gateway
from pagemill_gateway.routes.access import AccessLog
from pagemill_gateway.routes.control import ControlRoutes
from pagemill_gateway.routes.generate import GenerateRoute
from pagemill_gateway.routes.health import HealthRoutes
from pagemill_gateway.routes.models import ModelRoutes
from pagemill_gateway.routes.tokens import TokenRoutes
from pagemill_protocol.http.door import Door, install_error_handlers
from pagemill_protocol.openai.openapi import OPENAPI_PATH

MAX_CATALOG_BYTES = 64 * 1024 * 1024


def data_app(gateway: Gateway) -> ASGIApp:
    """What clients see."""
    models, tokens, health = ModelRoutes(gateway), TokenRoutes(gateway), HealthRoutes(gateway)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", GenerateRoute(gateway, "chat"), methods=["POST"]),
            Route("/v1/completions", GenerateRoute(gateway, "completions"), methods=["POST"]),
            Route("/v1/models", models.list),
            Route("/v1/models/{model:path}", models.get),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/health", health.readyz),
            Route("/livez", health.livez),
            Route("/readyz", health.readyz),
            Route("/version", health.version),
            Route(OPENAPI_PATH, health.openapi),
            Route("/metrics", health.guarded_metrics),
        ]
    )
    install_error_handlers(app)
    config = gateway.config
    door = Door(
        app,
        max_body_bytes=config.max_body_bytes,
        max_header_bytes=config.max_header_bytes,
        body_timeout_s=config.body_timeout_s,
    )
    return AccessLog(door, gateway)


def control_app(gateway: Gateway) -> ASGIApp:
    """What the platform sees."""
    control, health = ControlRoutes(gateway), HealthRoutes(gateway)
    app = Starlette(
        routes=[
            Route("/catalog", control.put_catalog, methods=["PUT"]),
            Route("/status", control.status),
            Route("/debug/decisions", control.decisions),
            Route("/internal/load", control.load),
            Route("/livez", health.livez),
            Route("/readyz", health.readyz),
            Route("/version", health.version),
            Route("/metrics", health.metrics),
        ]
    )
    install_error_handlers(app)
    config = gateway.config
    return Door(
        app,
        max_body_bytes=MAX_CATALOG_BYTES,
        max_header_bytes=config.max_header_bytes,
        body_timeout_s=config.body_timeout_s,
    )
