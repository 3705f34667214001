"""The connection to Redis: runs scripts and commands within a deadline, or raises `RedisUnavailable`. It does not
retry.

`store` counts limits with it, and `shared_keys` reads API keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from pagemill_gateway.config import RedisConfig, SettingsError
from pagemill_servers.secrets.secret_file import SecretFile

logger = logging.getLogger("pagemill.gateway.limits")

MAX_CONNECTIONS = 32
MAX_FAILURES = 3
"""The breaker opens at this many failures in a row."""
CONNECT_TIMEOUT_S = 1.0
"""The timeout of probes, which no request waits for."""

SOCKET_TIMEOUT_S = 15.0
"""A connection without a reply for this long is closed; its caller has stopped waiting long before."""

Result = TypeVar("Result")


class RedisUnavailable(Exception):
    """Redis is unavailable. `in_doubt`: it may have executed the command."""

    def __init__(self, *, in_doubt: bool) -> None:
        super().__init__("Redis did not answer")
        self.in_doubt = in_doubt


class Script:
    """A Lua script of this folder, or several that are joined, which is run by its digest."""

    def __init__(self, *names: str) -> None:
        self.text = "".join(resources.files(__package__).joinpath(f"{name}.lua").read_text() for name in names)
        self.digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class Breaker:
    """The circuit breaker: it opens after a few failures in a row, and a probe in the background closes it.

    While it is open, requests do not call Redis.
    """

    def __init__(self) -> None:
        self.closed = False
        """Whether requests may call Redis. At the start only a probe may, because Redis may be unavailable."""
        self.num_openings = 0
        self._num_failures = 0
        self._announced: bool | None = None

    def succeeded(self) -> None:
        self._num_failures = 0

    def failed(self, why: str, *, certain: bool) -> None:
        """Count a failure. `certain`: there is no server, so the breaker opens at the first failure."""
        self._num_failures += 1
        if (certain or self._num_failures >= MAX_FAILURES) and self.closed:
            self.closed = False
            self.num_openings += 1
        if not self.closed and self._announced is not False:
            self._announced = False
            logger.warning("Redis cannot be used (%s); this gateway goes on with its own share of every limit", why)

    def probed(self) -> bool:
        """Note a successful probe. Return whether it closed the breaker."""
        self._num_failures = 0
        if self.closed:
            return False
        self.closed = True
        self._announced = True
        logger.info("Redis answers; limits are shared with the other gateways")
        return True


class RedisLink:
    def __init__(self, config: RedisConfig) -> None:
        """Create the client without connecting. Raises `SettingsError`."""
        self._timeout_s = config.timeout_ms / 1000
        self.breaker = Breaker()
        self.prefix = config.prefix
        self._unexpected = ""
        self._abandoned: set[asyncio.Task[Any]] = set()
        """Calls that are past their deadline and have not ended."""
        self._client = _client(config)

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        """Run a script, and return its result. Raises `RedisUnavailable`."""

        async def evaluate() -> Any:
            try:
                return await _reply(self._client.evalsha(script.digest, len(keys), *keys, *arguments))
            except NoScriptError:
                return await _reply(self._client.eval(script.text, len(keys), *keys, *arguments))

        return await self._ask(evaluate)

    async def run_all(self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[str | int]]]) -> list[Any]:
        """Run a script for each of `calls` in one pipeline, and return the results. Raises `RedisUnavailable`."""

        async def evaluate() -> list[Any]:
            async with self._client.pipeline(transaction=False) as pipeline:
                pipeline.script_load(script.text)
                for keys, arguments in calls:
                    pipeline.evalsha(script.digest, len(keys), *keys, *arguments)
                results: list[Any] = await pipeline.execute(raise_on_error=False)
                return [self._result(each) for each in results[1:]]

        return await self._ask(evaluate)

    async def call(self, command: Callable[[Redis], Any]) -> Any:
        """Run a command, and return its reply. Raises `RedisUnavailable`."""
        return await self._ask(lambda: _reply(command(self._client)))

    async def call_or_probe(self, command: Callable[[Redis], Any]) -> Any:
        """Run a command like `call`; while the breaker is open, probe first. For callers that may take longer."""
        if not self.breaker.closed:
            await self._within(lambda: _reply(self._client.ping()), CONNECT_TIMEOUT_S)
            self.breaker.probed()
        return await self.call(command)

    async def add(self, amounts: dict[str, int], expire_s: int) -> None:
        """Add to counters. Raises `RedisUnavailable`."""

        async def add_all() -> None:
            async with self._client.pipeline(transaction=True) as pipeline:
                for key, amount in amounts.items():
                    pipeline.incrby(key, amount)
                    pipeline.expire(key, expire_s)
                await pipeline.execute()

        await self._ask(add_all)

    async def remove(self, key: str, members: Sequence[str]) -> None:
        """Remove members of a sorted set. Raises `RedisUnavailable`."""
        await self._ask(lambda: _reply(self._client.zrem(key, *members)))

    async def hash_of(self, key: str) -> dict[bytes, bytes]:
        """Return the fields of a hash. Raises `RedisUnavailable`."""
        return dict(await self._ask(lambda: _reply(self._client.hgetall(key))))

    async def probe(self, script: Script, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        """Run a script like `run`, also while the breaker is open; connecting may then take `CONNECT_TIMEOUT_S`."""
        if not self.breaker.closed:
            await self._within(lambda: _reply(self._client.ping()), CONNECT_TIMEOUT_S)
        return await self._within(
            lambda: _reply(self._client.eval(script.text, len(keys), *keys, *arguments)), self._timeout_s
        )

    async def close(self) -> None:
        await self._client.aclose()
        await self._client.connection_pool.aclose()  # the client does not close a pool that it was given
        if self._abandoned:
            await asyncio.wait(set(self._abandoned), timeout=CONNECT_TIMEOUT_S)

    async def _ask(self, call: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        if not self.breaker.closed:
            raise RedisUnavailable(in_doubt=False)
        result = await self._within(call, self._timeout_s)
        self.breaker.succeeded()
        return result

    def _result(self, result: Any) -> Any:
        """Return a script's result, or None if it failed because another program wrote to the account's counters.

        The other accounts must still be published.
        """
        if type(result) is ResponseError:
            self._note_unexpected(result)
            return None
        if isinstance(result, Exception):
            raise result
        return result

    def _note_unexpected(self, error: ResponseError) -> None:
        if (shown := _shown(error)) != self._unexpected:
            self._unexpected = shown
            logger.warning(
                "Redis refuses a script of the limits (%s); does another program write to `%s:*`?", shown, self.prefix
            )

    async def _within(self, call: Callable[[], Coroutine[Any, Any, Result]], timeout_s: float) -> Result:
        """Run a call with a deadline. It runs in a task, because redis-py may ignore that it is cancelled."""
        task = asyncio.create_task(call())
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            if not task.done():
                self._abandon(task)
        if not task.done():
            self.breaker.failed("no answer in time", certain=False)
            raise RedisUnavailable(in_doubt=True)
        try:
            return task.result()
        except ResponseError as error:
            if type(error) is ResponseError:
                self._note_unexpected(error)
            else:  # the server is read-only or out of memory, so that no call can succeed
                self.breaker.failed(_shown(error), certain=False)
            raise RedisUnavailable(in_doubt=False) from error
        except Exception as error:  # no error of the client library may fail a request
            if not isinstance(error, RedisError | OSError):
                logger.exception("Redis's client failed")
            self.breaker.failed(_shown(error), certain=isinstance(error, RedisConnectionError))
            raise RedisUnavailable(in_doubt=True) from error

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.add(task)
        task.add_done_callback(self._forget)
        task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio logs it


async def _reply(call: Any) -> Any:
    """Await a reply; redis-py declares the same types for its synchronous and its asynchronous client."""
    return await call


def _shown(error: BaseException) -> str:
    """Return the error's text, without the URL and the user's name."""
    return "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"[:200]


class _PasswordFile(CredentialProvider):
    """Reads the password for every connection, because it may be rotated while the gateway runs."""

    def __init__(self, path: str, user: str | None) -> None:
        self._file = SecretFile(Path(path))
        self._user = user

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = next(iter(self._file.lines()), "")
        return (self._user, password) if self._user else (password,)


def _client(config: RedisConfig) -> Redis:
    url = config.url
    try:
        if config.url_file is not None:
            url = next(iter(SecretFile(Path(config.url_file)).lines()), "")
        # A blocking pool: more calls than connections must not count as failures of Redis.
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=None,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=SOCKET_TIMEOUT_S,
            retry=None,
            client_name="pagemill-gateway",
        )
        if config.password_file is not None:
            kwargs = pool.connection_kwargs
            provider = _PasswordFile(config.password_file, kwargs.pop("username", None))
            kwargs.pop("password", None)
            kwargs["credential_provider"] = provider
    except OSError as error:
        raise SettingsError(
            f"redis: cannot read {error.filename}: {error.strerror}. Mount the Secret there."
        ) from error
    except ValueError as error:
        where = f"of the file {config.url_file}" if config.url_file else "in `url`"
        raise SettingsError(f"redis: the URL {where} is none of redis://, rediss:// and unix://.") from error
    return Redis(connection_pool=pool)
