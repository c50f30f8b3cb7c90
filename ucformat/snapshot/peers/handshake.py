"""Proof that both ends of a connection have the key of one job, without sending it.

    server → client   greeting (8 bytes), server's nonce (32)
    client → server   client's nonce (32), HMAC-SHA256 of both nonces as a client
    server → client   HMAC-SHA256 of both nonces as a server

The key travels through the job's process group. What follows is neither encrypted nor authenticated: the network that
ranks talk over has to be trusted, as it is by torch.distributed. Checksums find what was damaged on the way.
"""

from __future__ import annotations

import hmac
import secrets

GREETING = b"ucfpeer1"
NONCE_BYTES = PROOF_BYTES = KEY_BYTES = 32
HELLO_BYTES = len(GREETING) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES


def new_key() -> bytes:
    """A key for one start of a job."""
    return secrets.token_bytes(KEY_BYTES)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def client_proof(key: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(key, b"client" + server_nonce + client_nonce, "sha256")


def server_proof(key: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(key, b"server" + server_nonce + client_nonce, "sha256")


def proves(found: bytes, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(found, expected)
