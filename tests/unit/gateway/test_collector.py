"""A stream answered whole: it waits for the end, or for its client to leave."""

from tests.unit.gateway.scene import LOST, Scene, play
from tests.unit.gateway.stub import turns


def test_a_whole_answer_waits_for_the_end() -> None:
    async def story(scene: Scene) -> None:
        await scene.says("a", "b")
        assert scene.answer.status == 0
        await scene.ends()

    assert play(story, Scene("/whole")).answer.body == b'{"text":"ab"}'


def test_a_whole_answer_that_breaks_has_the_status_of_its_failure() -> None:
    async def story(scene: Scene) -> None:
        await scene.says("a")
        await scene.ends(LOST)

    assert play(story, Scene("/whole")).answer.status == 503


def test_a_whole_answer_nobody_waits_for_is_cancelled_at_once() -> None:
    async def story(scene: Scene) -> None:
        await scene.says("a")
        scene.call.leave()
        await turns()
        assert scene.service.calls == ["cancel disconnected", "finished"]

    assert play(story, Scene("/whole")).answer.status == 0


def test_a_whole_answer_may_be_finished_without_its_client() -> None:
    async def story(scene: Scene) -> None:
        scene.call.leave()
        await turns()
        await scene.ends()

    assert play(story, Scene("/whole", {"x-headrace-on-disconnect": "finish"})).service.calls == ["finished"]


def test_a_whole_answer_is_refused_when_the_drain_is_over() -> None:
    async def story(scene: Scene) -> None:
        scene.app.close_streams()
        await turns()

    assert play(story, Scene("/whole")).answer.status == 503
