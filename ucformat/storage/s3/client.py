"""A botocore client for S3, with time limits, and what its errors mean. `s3_store` and `s3_upload` send requests through it.

Settings come from where boto's come from (environment, `~/.aws`), and from fsspec's configuration of `s3`.
"""

from __future__ import annotations

import logging
import os
import threading
from functools import cache
from typing import Any, Final

import fsspec.config

from ucformat.errors import StorageError

CONNECT_SECONDS = 10  # until an endpoint takes a connection
READ_SECONDS = 30  # between two bytes of an answer, and until its first
ATTEMPTS = 3  # of each request, with pauses of a few seconds between them
FAREWELL_SECONDS = 5  # for clearing up after a failure, which is tried once
CONNECTIONS = 64  # kept open; threads beyond that wait for none, they open more
_LOG = logging.getLogger("ucformat")
_OPTIONS: Final = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "endpoint_url",
}
"""Names in fsspec's configuration → names of botocore's client."""
_OURS: Final = frozenset({"anon", "profile", "client_kwargs", "config_kwargs"})
_ABSENT: Final = frozenset({"404", "NoSuchKey", "NotFound"})
_DENIED: Final = {
    "InvalidAccessKeyId": "the access key is not known there: check the credentials",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: check the credentials",
    "ExpiredToken": "the session token has expired: renew the credentials",
    "InvalidToken": "the session token is not valid: renew the credentials",
    "RequestTimeTooSkewed": "this host's clock is wrong, so the signature is refused",
    "AccessDenied": "access denied: these credentials may not do that here",
    "403": "access denied: these credentials may not do that here, or are not known",
    "Forbidden": "access denied: these credentials may not do that here, or are not known",
}


def client() -> Any:  # botocore is untyped
    """The client of this process: a forked process has its own, since connections can't be shared. Raises StorageError."""
    return _client(os.getpid(), farewell=False)


def farewell_client() -> Any:
    """A client that gives up at once, for clearing up where the storage may be away."""
    return _client(os.getpid(), farewell=True)


_CREATING = threading.Lock()


def _client(process: int, *, farewell: bool) -> Any:
    options = dict(fsspec.config.conf.get("s3", {}))
    settings = repr((sorted(options.items()), [os.environ.get(name) for name in _ENVIRONMENT]))
    with _CREATING:  # botocore's sessions are not made for several threads
        return _create(process, farewell, settings)


_ENVIRONMENT: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE")
"""Variables whose change asks for a new client."""


@cache
def _create(process: int, farewell: bool, settings: str) -> Any:
    try:
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise StorageError("s3://", "needs botocore: pip install 'ucformat[s3]'") from error
    options: dict[str, Any] = dict(fsspec.config.conf.get("s3", {}))
    unknown = sorted(set(options) - set(_OPTIONS) - _OURS)
    if unknown:
        _LOG.warning("s3: ignored in fsspec's configuration: %s", ", ".join(unknown))
    try:
        session = botocore.session.Session(profile=options.get("profile"))
        config: dict[str, Any] = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "max_pool_connections": CONNECTIONS,
            "tcp_keepalive": True,
        }
        if session.get_config_variable("max_attempts") is None:
            config["retries"] = {"total_max_attempts": ATTEMPTS, "mode": "standard"}
        config |= options.get("config_kwargs", {})
        if options.get("anon"):
            config["signature_version"] = UNSIGNED
        if farewell:
            config |= {"connect_timeout": FAREWELL_SECONDS, "read_timeout": FAREWELL_SECONDS}
            config["retries"] = {"total_max_attempts": 1}
        given = {name: options[key] for key, name in _OPTIONS.items() if options.get(key)}
        return session.create_client("s3", **given, **options.get("client_kwargs", {}), config=Config(**config))
    except (BotoCoreError, ValueError, TypeError) as error:
        raise StorageError("s3://", error) from error


def _response(error: BaseException | None) -> Any:
    return getattr(error, "response", None) or {}


def code(error: BaseException | None) -> str:
    """What an S3 server calls an error; empty for errors that no server sent."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def is_absent(error: BaseException) -> bool:
    """Whether a server says that there is no such object (a missing bucket is another error, but HEAD can't tell)."""
    return code(error) in _ABSENT


def was_repeated(error: BaseException | None) -> bool:
    """Whether an answer is that to a second attempt, so that an earlier one may have been carried out."""
    return bool(_response(error).get("ResponseMetadata", {}).get("RetryAttempts", 0))


def failure(error: Exception, url: str, start: int | None = None, stop: int | None = None) -> StorageError:
    """The error for a request about `url` that failed, in words that say what to do."""
    return StorageError(url, _explain(error, url), start, stop)


def _explain(error: Exception, url: str) -> Exception | str:
    from botocore import exceptions as boto

    bucket = url.removeprefix("s3://").split("/", 1)[0]
    said = code(error)
    if said == "NoSuchBucket":
        return f"the bucket {bucket!r} does not exist: create it, or check the endpoint and the name"
    if said in _DENIED:
        return f"{_DENIED[said]} ({said})"
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return f"no credentials found ({error}): set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws"
    if isinstance(error, (boto.EndpointConnectionError, boto.ConnectTimeoutError)):
        return f"the endpoint can't be reached ({error}): check AWS_ENDPOINT_URL and the network"
    if isinstance(error, boto.ReadTimeoutError):
        return f"the endpoint accepts requests and does not answer within the time limit ({error})"
    return error
