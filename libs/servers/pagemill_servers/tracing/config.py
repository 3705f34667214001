"""The settings of tracing, for gateways and engines: destination and share of requests. `tracing` applies them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pagemill_servers.process.settings import SettingsError


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where OpenTelemetry traces of requests are sent, including the spans of engines."""

    endpoint: str
    """URL of an OTLP/HTTP receiver's traces, such as `http://collector:4318/v1/traces`."""
    headers_file: str | None = None
    """File of headers for the receiver, such as credentials: `NAME: VALUE` on each line, read at the start."""
    sample_ratio: float = 1.0
    """Share of requests without a trace that are sampled; for a request with one, the client has decided."""

    def check(self) -> None:
        """Raise `SettingsError` for the first invalid setting."""
        if not self.endpoint.startswith(("http://", "https://")):
            raise SettingsError(
                f"tracing.endpoint: {self.endpoint!r} does not begin with http:// or https://. Name the OTLP/HTTP "
                "receiver's traces, such as http://collector:4318/v1/traces."
            )
        if not 0 <= self.sample_ratio <= 1:
            raise SettingsError(f"tracing.sample_ratio: {self.sample_ratio} is not between 0 and 1.")

    def headers(self) -> dict[str, str]:
        """Return the headers of the file. Raises `SettingsError`, which shows no value."""
        if self.headers_file is None:
            return {}
        try:
            lines = Path(self.headers_file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"tracing.headers_file: cannot read {self.headers_file}. Mount the Secret.") from error
        found: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            name, colon, value = line.partition(":")
            if not line.strip() or line.startswith("#"):
                continue
            if not colon or not name.strip().isascii() or not value.strip():
                raise SettingsError(f"tracing.headers_file: line {number} of {self.headers_file} is not NAME: VALUE.")
            found[name.strip()] = value.strip()
        return found
