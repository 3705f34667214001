"""The gateway's settings: every knob with meaning, unit and default. Read once at start; nothing else reads settings.

What changes while the gateway runs (models and endpoints) is the catalogue, not a setting: see `discovery`.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

import msgspec

from pagemill_protocol.catalog import Catalog

_SHA256_HEX = re.compile(r"[0-9a-fA-F]{64}")


class SettingsError(ValueError):
    """The settings cannot be used; the message names the field, its value and the remedy."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8080
    """Data port: the OpenAI routes."""
    control_host: str = "127.0.0.1"
    control_port: int = 8081
    control_token: str = ""
    """Bearer token of `PUT /catalog`; empty: only allowed on a loopback bind."""
    api_keys: list[str] = []
    """SHA-256 of each accepted API key, in hex. Empty: no key is asked, only allowed on a loopback bind."""
    catalog: Catalog = Catalog()
    """What is served at start; `PUT /catalog` replaces it."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    body_timeout_s: float = 30.0
    """A body that takes longer to arrive gets 408."""
    max_requests: int = 4096
    """Requests inside the gateway at once; one more gets 503. Bounds the memory of streams."""
    max_in_flight_body_bytes: int = 256 * 1024 * 1024
    """
    Bytes of request bodies inside the gateway at once, each from its arrival to the end of its answer; one that finds
    no room gets 503. Parsed and tokenized, a body takes several times its size.
    """
    max_attempts: int = 3
    """Engines asked for one request, the first one included."""
    request_timeout_s: float | None = None
    """Deadline of requests that send no `x-request-timeout-s`; `None`: none."""
    connect_timeout_s: float = 2.0
    """Opening a connection to an engine."""
    accept_timeout_s: float = 30.0
    """An engine that neither accepts nor refuses a request within this time counts as failed."""
    silence_timeout_s: float = 60.0
    """Silence of an engine inside one request, while its state stream is silent too, before it counts as failed."""
    slow_client_timeout_s: float = 120.0
    """A client that reads nothing for this long loses its stream."""

    state_stale_after_s: float = 3.0
    """No state frame for this long (engines send one a second): its load is ignored, own in-flight counts go on."""
    state_idle_timeout_s: float = 10.0
    """A state stream silent for this long is opened again."""
    reconnect_base_s: float = 0.1
    reconnect_max_s: float = 5.0
    """First and longest pause between attempts to open a state stream; each is drawn from the upper half."""
    ejection_base_s: float = 0.5
    ejection_max_s: float = 10.0
    """First and longest pause of an endpoint that failed; doubles with each failed probe."""

    drain_delay_s: float = 0.0
    """After SIGTERM, time in which new requests are still taken while load balancers learn that `/readyz` fails."""
    drain_timeout_s: float = 30.0
    """After that, running requests get this long; then they end with an error event."""

    def checked(self) -> GatewayConfig:
        """Return self, or raise `SettingsError` for the first setting that must not be used."""
        for key in self.api_keys:
            if not _SHA256_HEX.fullmatch(key):
                raise SettingsError(
                    f"api_keys: {key[:8]!r}... is not a SHA-256 in hex (64 characters). "
                    "Hash each key first: printf %s KEY | sha256sum."
                )
        if not self.api_keys and not is_loopback(self.host):
            raise SettingsError(
                f"host: {self.host!r} can be reached from other machines and api_keys is empty, so anybody could use "
                "the models. Set api_keys, or bind to 127.0.0.1."
            )
        if not self.control_token and not is_loopback(self.control_host):
            raise SettingsError(
                f"control_host: {self.control_host!r} can be reached from other machines and control_token is empty, "
                "so anybody could replace the catalogue. Set control_token, or bind to 127.0.0.1."
            )
        for field in ("port", "control_port"):
            if not 0 <= getattr(self, field) <= 65535:
                value = getattr(self, field)
                raise SettingsError(f"{field}: {value} is not a port. Use 1 to 65535, or 0 for a free one.")
        for field in ("max_body_bytes", "max_header_bytes", "max_requests", "max_attempts"):
            if getattr(self, field) < 1:
                raise SettingsError(f"{field}: {getattr(self, field)} must be at least 1.")
        if self.max_in_flight_body_bytes < self.max_body_bytes:
            raise SettingsError(
                f"max_in_flight_body_bytes: {self.max_in_flight_body_bytes} must be at least max_body_bytes "
                f"({self.max_body_bytes}), or the largest bodies would never find room."
            )
        return self


def load_config(path: Path) -> GatewayConfig:
    """Read and check a JSON settings file; `SettingsError` names what is wrong."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"settings: cannot read {path}: {error.strerror}.") from error
    try:
        return msgspec.json.decode(raw, type=GatewayConfig).checked()
    except msgspec.ValidationError as error:
        raise SettingsError(f"settings: {path}: {error}.") from error
    except msgspec.DecodeError as error:
        raise SettingsError(f"settings: {path} is not valid JSON: {error}.") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
