"""Tokenizers of the engines' models: bundles fetched from control ports by digest, built once, kept while in use.

A bundle is checked against its digest before it is used, so a wrong or changed tokenizer is never applied. Building a
tokenizer takes long for large vocabularies and happens off the event loop. Where the control process is a process of
its own, it fetches from engines and checks, and the workers get their bundles from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Set

import aiohttp

from pagemill_protocol.bounded import TooLarge, read_bounded
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.sources import SourceError
from pagemill_protocol.text.bundle import TokenizerBundle
from pagemill_protocol.text.tokenizer import Tokenizer

FETCH_TIMEOUT_S = 30.0
MAX_BUNDLE_BYTES = 128 * 1024 * 1024

Source = Callable[[str], Awaitable[bytes]]
"""The bundle of a digest. Raises `PagemillError`."""


class BundleError(Exception):
    """An engine gave no usable tokenizer bundle."""


class Bundles:
    def __init__(
        self,
        session: aiohttp.ClientSession | None,
        *,
        source: Source | None = None,
        keeps_tokenizers: bool = True,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`session`: for `fetch`; `None`: all bundles come from the source. `source`: where to get an unknown bundle.
        `keeps_tokenizers`: prompts are tokenized here. `on_change`: one more bundle is known.
        """
        self._session = session
        self._source = source
        self._keeps_tokenizers = keeps_tokenizers
        self._on_change = on_change
        self._bundles: dict[str, TokenizerBundle] = {}
        self._tokenizers: dict[tuple[str, str | None], Tokenizer] = {}
        self._warm_ups: set[asyncio.Task[None]] = set()
        self._locks: dict[str, asyncio.Lock] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._bundles

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(self._bundles)

    def data(self, digest: str) -> bytes:
        """The bytes of a known bundle. Raises `BundleError`."""
        return self._known(digest).to_bytes()

    async def fetch(self, digest: str, control_url: str, token: str) -> None:
        """Make `digest` known; concurrent callers fetch it once. Raises `BundleError` or `aiohttp.ClientError`."""
        await self._learn(digest, lambda: self._download(control_url, token))

    async def load(self, digest: str) -> None:
        """Make `digest` known from the source. Raises `BundleError` or `PagemillError`."""
        source = self._source
        if source is not None and digest not in self._bundles:
            await self._learn(digest, lambda: source(digest))

    async def tokenizer(self, digest: str, chat_template: str | None) -> Tokenizer:
        """The tokenizer of a known bundle, with `chat_template` in place of the bundle's own unless None.

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
        """Drop what no endpoint and no deployment uses any more.

        A request in progress may still hold such a tokenizer: it closes itself with its last user.
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
            bundle = await asyncio.to_thread(_checked, await download(), digest)
            tokenizer = await asyncio.to_thread(_built, bundle, None)
            if self._keeps_tokenizers:
                self._tokenizers[digest, None] = tokenizer
            self._bundles[digest] = bundle
            self._on_change()
        if not self._keeps_tokenizers:
            tokenizer.close()
            return
        self._warm_ups.add(warm_up := asyncio.create_task(asyncio.to_thread(tokenizer.warm_up)))
        warm_up.add_done_callback(self._warm_ups.discard)

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


def _checked(data: bytes, digest: str) -> TokenizerBundle:
    try:
        bundle = TokenizerBundle.from_bytes(data)
    except PagemillError as error:
        raise BundleError(error.message) from error
    if bundle.digest != digest:
        raise BundleError(f"the tokenizer bundle has digest {bundle.digest}, the engine announced {digest}")
    return bundle
