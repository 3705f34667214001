"""The tokenizers of the engines' models: bundles are fetched by digest, and tokenizers built once and kept while used.

A bundle is checked against its digest. Building the tokenizer of a large vocabulary takes long and happens in a thread.
A control process of its own fetches the bundles from engines' control ports, and workers get them from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Set

import aiohttp

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.peer_body import TooLarge, read_bounded
from pagemill_protocol.source_errors import SourceError
from pagemill_protocol.tokenizer_bundle import TokenizerBundle
from pagemill_servers.process.malloc import trim_heap

FETCH_TIMEOUT_S = 30.0
MAX_BUNDLE_BYTES = 128 * 1024 * 1024
MAX_REFUSED = 64
"""Digests of unusable bundles that are kept, the latest ones: an engine that announces one is asked only once."""

Source = Callable[[str], Awaitable[bytes]]
"""Returns the bundle with a digest. Raises `PagemillError`."""


class BundleError(Exception):
    """There is no valid tokenizer bundle."""


class Bundles:
    def __init__(
        self,
        session: aiohttp.ClientSession | None,
        *,
        source: Source | None = None,
        keeps_tokenizers: bool = True,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`session` is for `fetch`; `None` if all bundles come from `source`, which returns an unknown bundle.

        `keeps_tokenizers`: whether this process tokenizes prompts. `on_change` is called for each new bundle.
        """
        self._session = session
        self._source = source
        self._keeps_tokenizers = keeps_tokenizers
        self._on_change = on_change
        self._bundles: dict[str, TokenizerBundle] = {}
        self._tokenizers: dict[tuple[str, str | None], Tokenizer] = {}
        self._warm_ups: set[asyncio.Task[None]] = set()
        self._locks: dict[str, asyncio.Lock] = {}
        self._refused: dict[str, str] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._bundles

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(self._bundles)

    def data(self, digest: str) -> bytes:
        """Return the bytes of a known bundle. Raises `BundleError`."""
        return self._known(digest).to_bytes()

    async def fetch(self, digest: str, control_url: str, token: str) -> None:
        """Fetch an unknown bundle from an engine, once for concurrent callers.

        Raises `BundleError` or `aiohttp.ClientError`.
        """
        await self._learn(digest, lambda: self._download(control_url, token))

    async def load(self, digest: str) -> None:
        """Get an unknown bundle from the source. Raises `BundleError` or `PagemillError`."""
        source = self._source
        if source is not None and digest not in self._bundles:
            await self._learn(digest, lambda: source(digest))

    async def tokenizer(self, digest: str, chat_template: str | None) -> Tokenizer:
        """Return the tokenizer of a bundle, with `chat_template` instead of the bundle's own unless it is None.

        Raises `BundleError` or `PagemillError`.
        """
        known = self._tokenizers.get((digest, chat_template))
        if known is not None:
            return known
        await self.load(digest)
        bundle = self._known(digest)
        async with self._locks.setdefault(digest, asyncio.Lock()):
            if (digest, chat_template) not in self._tokenizers:
                self._tokenizers[digest, chat_template] = await asyncio.to_thread(_built, bundle, chat_template)
            return self._tokenizers[digest, chat_template]

    def forget_all_but(self, digests: Set[str], templates: Set[str]) -> None:
        """Drop all bundles and tokenizers but those with these digests and chat templates.

        A request in progress may still use a dropped tokenizer, which is closed with its last reference.
        """
        for digest in self._bundles.keys() - digests:
            del self._bundles[digest]
            self._locks.pop(digest, None)
        for key in list(self._tokenizers):
            if key[0] not in digests or (key[1] is not None and key[1] not in templates):
                del self._tokenizers[key]

    async def close(self) -> None:
        await asyncio.gather(*self._warm_ups)
        for tokenizer in self._tokenizers.values():
            tokenizer.close()
        self.forget_all_but(frozenset(), frozenset())

    def _known(self, digest: str) -> TokenizerBundle:
        bundle = self._bundles.get(digest)
        if bundle is None:
            raise BundleError(f"the tokenizer bundle {digest} is not known")
        return bundle

    async def _learn(self, digest: str, download: Callable[[], Awaitable[bytes]]) -> None:
        async with self._locks.setdefault(digest, asyncio.Lock()):
            if digest in self._bundles:
                return
            if digest in self._refused:
                raise BundleError(self._refused[digest])
            bundle = await asyncio.to_thread(_checked, await download(), digest)
            try:
                tokenizer = await asyncio.to_thread(_built, bundle, None)
            except BundleError as error:
                self._refuse(digest, str(error))
                raise
            if self._keeps_tokenizers:
                self._tokenizers[digest, None] = tokenizer
            self._bundles[digest] = bundle
            self._on_change()
        if not self._keeps_tokenizers:
            tokenizer.close()
            return
        self._warm_ups.add(warm_up := asyncio.create_task(asyncio.to_thread(_warm_up, tokenizer)))
        warm_up.add_done_callback(self._warm_ups.discard)

    def _refuse(self, digest: str, reason: str) -> None:
        """Keep why a bundle is unusable: its content cannot change."""
        self._refused[digest] = reason
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    async def _download(self, control_url: str, token: str) -> bytes:
        assert self._session is not None
        async with self._session.get(
            f"{control_url}/internal/bundle",
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S),
            allow_redirects=False,
        ) as response:
            if response.status != 200:
                raise BundleError(f"/internal/bundle answered {response.status}")
            try:
                return await read_bounded(response, MAX_BUNDLE_BYTES)
            except TooLarge as error:
                raise BundleError(f"the tokenizer bundle is {error}") from error


def _built(bundle: TokenizerBundle, chat_template: str | None) -> Tokenizer:
    try:
        return Tokenizer(bundle, chat_template)
    except SourceError as error:
        raise BundleError(str(error)) from error


def _warm_up(tokenizer: Tokenizer) -> None:
    """Prepare the chat template, and release the memory that reading the vocabulary took."""
    tokenizer.warm_up()
    trim_heap()


def _checked(data: bytes, digest: str) -> TokenizerBundle:
    try:
        bundle = TokenizerBundle.from_bytes(data)
    except PagemillError as error:
        raise BundleError(error.message) from error
    if bundle.digest != digest:
        raise BundleError(f"the tokenizer bundle has digest {bundle.digest}, the engine announced {digest}")
    return bundle
