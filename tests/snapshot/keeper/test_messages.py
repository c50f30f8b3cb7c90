"""Messages arrive whole and in order, or not at all; options that make no sense are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest

from tests.snapshot.rigs.keeping import RUN
from ucformat.snapshot.keeper.messages import (
    COMMANDS,
    EVENTS,
    Begin,
    Command,
    Failed,
    Hashed,
    Inbox,
    KeeperOptions,
    Order,
    Stop,
    send,
)


@pytest.fixture
def pipe() -> Iterator[list[int]]:
    ends = list(os.pipe())
    yield ends
    for fd in ends:
        if fd >= 0:
            os.close(fd)


def test_messages_arrive_in_order_and_as_they_were(pipe: list[int]) -> None:
    said: list[Command] = [
        Begin(KeeperOptions("/dev/shm/a", 3, 8, RUN, "s3://b/run", keep=2), 17),
        Order(1, 0, persist=True),
        Order(1, None, True),
        Stop(),
    ]
    inbox = Inbox(pipe[0], COMMANDS.decode)
    assert all(send(pipe[1], message) for message in said)
    assert inbox.take(1) == said[:1]
    assert inbox.take() == said[1:]
    assert inbox.take() == []
    assert not inbox.closed


def test_half_a_message_waits_for_its_rest_and_is_dropped_when_the_writer_dies(pipe: list[int]) -> None:
    inbox = Inbox(pipe[0], EVENTS.decode)
    message = msgspec.json.encode(Failed(3, "line\nbreak")) + b"\n"
    os.write(pipe[1], message + message[:9])
    assert inbox.take() == [Failed(3, "line\nbreak")]
    os.write(pipe[1], message[9:] + message[:9])
    assert inbox.take(0) == []
    os.close(pipe[1])
    pipe[1] = -1
    inbox.wait(60.0)
    assert (inbox.closed, inbox.take(), inbox.closed) == (False, [Failed(3, "line\nbreak")], True)
    assert inbox.take() == []


def test_a_full_pipe_and_a_dead_reader_are_told_at_once(pipe: list[int]) -> None:
    os.set_blocking(pipe[1], False)
    sent = 0
    while send(pipe[1], Hashed(sent, 0, 0.5)):
        sent += 1
    inbox = Inbox(pipe[0], EVENTS.decode)
    assert inbox.take() == [Hashed(step, 0, 0.5) for step in range(sent)]
    os.close(pipe[0])
    pipe[0] = -1
    assert not send(pipe[1], Stop())


@pytest.mark.parametrize(
    "wrong",
    [
        *({"rank": rank} for rank in (2, -1)),
        *({"run": run} for run in ("", "a/b", "a.b", "x" * 65)),
        *({"timeout_s": seconds} for seconds in (0.0, float("nan"))),
        *({name: 0} for name in ("keep", "keep_every")),
        {"retries": -1},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        msgspec.convert({"directory": "d", "rank": 0, "world": 2, "run": RUN} | wrong, KeeperOptions)
