"""Needs Python only. The engine's end of the socket: frames in any pieces, and what is no frame."""

import socket

import msgspec
import pytest

from octavo.host.channel import RECEIVE_BYTES, ChannelClosed, SocketChannel, Undecodable
from octavo.protocol import (
    MAX_FRAME_BYTES,
    Abort,
    EngineCoreRequest,
    EngineFailed,
    FrameSplitter,
    Shutdown,
    ToClient,
    encode_frame,
)
from octavo.sampling_params import SamplingParams

ENCODER = msgspec.msgpack.Encoder()


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    yield SocketChannel(theirs), ours
    ours.close()
    theirs.close()


def frame(message):
    return encode_frame(ENCODER, message)


def raw(body):
    return len(body).to_bytes(4, "little") + body


def test_frames_arrive_whatever_the_pieces(ends):
    channel, ours = ends
    messages = [Abort(["a"]), EngineCoreRequest("r", [1, 2], SamplingParams(seed=5), [3], [3], 1.5, [9]), Shutdown()]
    received = []
    for byte in b"".join(map(frame, messages)):
        ours.send(bytes([byte]))
        received += channel.receive(0)
    assert received == messages


@pytest.mark.parametrize("first", range(1, 12))
def test_pieces_that_end_within_a_frame_lose_nothing(first):
    bodies = [b"", b"ab", b"cde"]
    data = b"".join(map(raw, bodies))
    for second in range(first, len(data)):
        splitter = FrameSplitter()
        assert [*splitter.feed(data[:first]), *splitter.feed(data[first:second]), *splitter.feed(data[second:])] == bodies


def test_a_message_longer_than_one_read_arrives(ends):
    channel, ours = ends
    message = EngineCoreRequest("r", list(range(100_000)), SamplingParams(seed=5), [], [], 0.0)
    data = frame(message)
    assert len(data) > 3 * RECEIVE_BYTES
    received = []
    ours.setblocking(False)
    at = 0
    while not received:
        at += ours.send(data[at : at + 50_000])
        received = channel.receive(0)
    assert received == [message]


def test_receive_waits_only_as_long_as_told(ends):
    channel, _ = ends
    assert channel.receive(0) == []
    assert channel.receive(0.01) == []


def test_what_is_sent_can_be_read(ends):
    channel, ours = ends
    channel.send(EngineFailed("why", True))
    (body,) = FrameSplitter().feed(ours.recv(1000))
    assert msgspec.msgpack.decode(body, type=ToClient) == EngineFailed("why", True)


@pytest.mark.parametrize(
    ("body", "request_id"),
    [
        (b"", None),
        (b"\xc1", None),
        (msgspec.msgpack.encode(["EngineCoreRequest", "r9", "not a list"]), "r9"),
        (msgspec.msgpack.encode(["EngineCoreRequest", "r9", [1], {"top_p": 7.0}, [], [], 0.0]), "r9"),
        (msgspec.msgpack.encode(["EngineCoreRequest", 5]), None),
        (msgspec.msgpack.encode(["EngineReady", "r9"]), None),
        (msgspec.msgpack.encode({"r9": 1}), None),
        (b"\x91" * 100_000 + b"\x01", None),
    ],
)
def test_a_body_that_is_no_message_names_its_request_if_it_has_one(ends, body, request_id):
    channel, ours = ends
    ours.sendall(raw(body) + frame(Shutdown()))
    received = []
    while len(received) < 2:
        received += channel.receive(0)
    assert isinstance(received[0], Undecodable)
    assert received[0].request_id == request_id
    assert received[1] == Shutdown()


def test_a_frame_beyond_the_limit_ends_the_connection(ends):
    channel, ours = ends
    ours.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(ChannelClosed, match="limit"):
        channel.receive(0)


def test_the_end_of_the_stream_is_told_both_ways(ends):
    channel, ours = ends
    ours.close()
    with pytest.raises(ChannelClosed):
        channel.receive(None)
    with pytest.raises(ChannelClosed):
        channel.send(EngineFailed("why", True))
