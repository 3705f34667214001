"""Which endpoint a session was on last. Bounded: sessions not seen for long are forgotten first."""

from __future__ import annotations

MAX_SESSIONS = 65536


class Sessions:
    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._endpoints: dict[tuple[str, bytes], str] = {}

    def endpoint(self, deployment: str, session: bytes) -> str | None:
        return self._endpoints.get((deployment, session))

    def chosen(self, deployment: str, session: bytes, endpoint_id: str) -> None:
        self._endpoints.pop((deployment, session), None)
        self._endpoints[deployment, session] = endpoint_id
        if len(self._endpoints) > self._max_sessions:
            del self._endpoints[next(iter(self._endpoints))]
