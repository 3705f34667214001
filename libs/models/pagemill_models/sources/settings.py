"""Settings of sources in the environment: the node's cache of models, and credentials that no library reads.

The libraries that fetch read `HF_ENDPOINT` and `HF_TOKEN`, `AWS_*` and `GOOGLE_*`; what is read of them here decides
whether requests are signed, and whether plain HTTP is allowed.
"""

from __future__ import annotations

import base64
import binascii
import configparser
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import orjson

CACHE_FOLDER, CACHE_LIMIT = "PAGEMILL_MODEL_CACHE", "PAGEMILL_MODEL_CACHE_SIZE"
DOCKER_CONFIG_CONTENT = "DOCKER_AUTH_CONFIG"
PLAIN_REGISTRIES = "PAGEMILL_PLAIN_HTTP_REGISTRIES"
_LOOPBACK = ("localhost", "127.0.0.1")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_AWS_SIGNERS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_AWS_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_GOOGLE_SIGNERS = ("GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS")


class CacheSettings(NamedTuple):
    folder: Path
    limit_bytes: int | None
    """Maximum size of all models together; `None`: only the disk limits it."""
    is_chosen: bool
    """Whether the folder was set explicitly, so that all remote models are stored there."""


def cache_settings() -> CacheSettings:
    """Return `PAGEMILL_MODEL_CACHE` and `PAGEMILL_MODEL_CACHE_SIZE` (such as `200Gi`). Raises `ValueError`."""
    named = os.environ.get(CACHE_FOLDER)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    limit = os.environ.get(CACHE_LIMIT)
    folder = Path(named).expanduser() if named else base / "pagemill" / "models"
    return CacheSettings(folder, parse_size(limit) if limit else None, bool(named))


def parse_size(text: str) -> int:
    """Return the bytes of `200Gi`, `1.5T` or a plain number. Raises `ValueError`."""
    number = text.rstrip("KMGTi ")
    unit = text[len(number) :].strip()
    try:
        return int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"`{text}` is not a size; write bytes, or a number with Mi, Gi or Ti such as 200Gi") from None


class S3Settings(NamedTuple):
    options: Mapping[str, str]
    """Options that the library does not read itself."""
    is_signed: bool
    endpoint: str | None


def s3_settings() -> S3Settings:
    """Return the credentials of variables, or of the profile in `~/.aws/credentials`.

    Without either, requests are not signed.
    """
    endpoint = next(filter(None, map(os.environ.get, _AWS_ENDPOINTS)), None)
    if any(os.environ.get(name) for name in _AWS_SIGNERS):
        return S3Settings({}, True, endpoint)
    path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
    file = configparser.ConfigParser()
    file.read(path)
    profile = os.environ.get("AWS_PROFILE", "default")
    section = file[profile] if file.has_section(profile) else {}
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    options = {name.removeprefix("aws_"): section[name] for name in names if name in section}
    return S3Settings(options, bool(options), endpoint)


def s3_region() -> str | None:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


def proxy_of(url: str) -> str | None:
    """Return the proxy for requests to a URL, as the libraries read it from `HTTPS_PROXY` and its kind."""
    from urllib.request import getproxies_environment, proxy_bypass

    parts = urlsplit(url)
    proxies = getproxies_environment()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def google_is_signed() -> bool:
    default = Path.home() / ".config" / "gcloud" / "application_default_credentials.json"
    return any(os.environ.get(name) for name in _GOOGLE_SIGNERS) or default.is_file()


def google_endpoint_is_plain() -> bool:
    """Whether the service account's key names an `http://` server, as those of emulators do."""
    key = os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY", "")
    return '"http://' in key


def is_plain_registry(host: str) -> bool:
    """Whether a registry uses plain HTTP: on this machine, or in `PAGEMILL_PLAIN_HTTP_REGISTRIES` (comma-separated)."""
    named = [name.strip() for name in os.environ.get(PLAIN_REGISTRIES, "").split(",")]
    return host in named or host.partition(":")[0] in _LOOPBACK


def registry_login(host: str) -> tuple[str, str] | None:
    """Return user and password of a registry from `DOCKER_AUTH_CONFIG` or `~/.docker/config.json`, or None."""
    for content in _docker_configs():
        entry = content.get(host) or content.get(f"https://{host}") or {}
        encoded = entry.get("auth")
        if isinstance(encoded, str):
            try:
                user, _, password = base64.b64decode(encoded).decode().partition(":")
            except (binascii.Error, UnicodeDecodeError):
                continue
            return user, password
        if entry.get("username"):
            return str(entry["username"]), str(entry.get("password", ""))
    return None


def _docker_configs() -> list[dict[str, dict[str, str]]]:
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    texts = [os.environ.get(DOCKER_CONFIG_CONTENT, "")]
    if (folder / "config.json").is_file():
        texts.append((folder / "config.json").read_text())
    found = []
    for text in texts:
        try:
            auths = orjson.loads(text).get("auths") if text.strip() else None
        except (orjson.JSONDecodeError, AttributeError):
            continue
        if isinstance(auths, dict):
            found.append({host.removesuffix("/v1/").rstrip("/"): entry for host, entry in auths.items()})
    return found
