"""An outbox numbers, keeps until acknowledged, and says when it is full."""

import threading

from headrace.core.messages import Frame, ScoreTable
from headrace.worker.outbox import Outbox, frame_bytes


class Desk:
    def __init__(self, max_bytes: int = 1000) -> None:
        self.sent: list[Frame] = []
        self.news: list[bool] = []
        self.box = Outbox(self.news.append, max_bytes)

    def push(self, frame: Frame) -> None:
        self.sent.append(self.box.add(frame))


def frame(size: int = 0) -> Frame:
    return Frame(number=0, step=1, keys=b"x" * size)


def test_frames_are_numbered_from_one_and_kept_until_acknowledged() -> None:
    desk = Desk()
    for _ in range(3):
        desk.push(frame())
    assert [sent.number for sent in desk.sent] == [1, 2, 3]
    desk.box.acknowledge(2)
    assert desk.box.size_bytes == frame_bytes(frame())
    desk.box.acknowledge(3)
    assert desk.box.is_empty and desk.box.size_bytes == 0


def test_acknowledgements_of_what_was_never_sent_or_long_ago_change_nothing() -> None:
    desk = Desk()
    desk.push(frame())
    for number in (2, 2**63 - 1, 0, -5):
        desk.box.acknowledge(number)
    assert not desk.box.is_empty
    desk.box.acknowledge(1)
    desk.box.acknowledge(1)
    assert desk.box.is_empty


def test_full_is_said_once_and_room_at_half() -> None:
    desk = Desk(max_bytes=1000)
    for _ in range(6):
        desk.push(frame(200))
    assert desk.news == [True] and len(desk.sent) == 6
    desk.box.acknowledge(1)
    assert desk.news == [True]
    desk.box.acknowledge(5)
    assert desk.news == [True, False]


def test_scores_count() -> None:
    scores = ScoreTable(b"o" * 80, b"p" * 40, b"l" * 40, b"t" * 400, b"q" * 400, 10)
    assert frame_bytes(Frame(1, 1, scores=scores)) >= 960 + frame_bytes(Frame(1, 1))


def test_two_threads_agree_on_what_is_in_it() -> None:
    desk = Desk(max_bytes=10_000)

    def acknowledge() -> None:
        for number in range(1, 5001):
            desk.box.acknowledge(number)

    acks = threading.Thread(target=acknowledge)
    acks.start()
    for _ in range(5000):
        desk.push(frame(50))
    acks.join()
    desk.box.acknowledge(5000)
    assert desk.box.size_bytes == 0 and not desk.box.is_full
    assert desk.news == [True, False] * (len(desk.news) // 2)
