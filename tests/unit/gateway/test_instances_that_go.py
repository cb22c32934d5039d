"""An instance that is taken out leaves nothing behind, whenever the requests that run there end."""

from __future__ import annotations

from engine_adapter.openai_compatible import OpenAICompatible
from gateway.assembly import rates
from gateway.dispatch import Dispatcher
from gateway.fleet import Fleet
from gateway.instance import Instance, InstanceSpec
from gateway.routing import ExpectedTtft
from gateway.settings import Settings
from radix_index.index import RadixIndex
from tracing.record import Usage, UsageSource


async def test_what_is_known_of_an_instance_goes_with_it_and_its_name_begins_anew() -> None:
    index, its_rates = RadixIndex(), rates(Settings())
    spec = InstanceSpec("a", "http://10.0.0.1", OpenAICompatible(), models=("m",))

    def forget(name: str) -> None:
        dispatcher.places.forget(name)

    fleet = Fleet([spec], client=None, index=index, rates=its_rates, on_emptied=forget)  # type: ignore[arg-type]
    dispatcher = Dispatcher(fleet, index, ExpectedTtft(), 1, lambda after_s, call: call())
    old = fleet.instances["a"]
    old.is_healthy = True
    ended, late = (dispatcher.route("m", None, 400, frozenset(), run) for run in ("r1", "r2"))
    assert ended is not None
    assert late is not None
    usage = Usage(fresh_tokens=100, output_tokens=5, source=UsageSource.ENGINE)
    for route in (ended, late):
        assert route.watch is not None
        route.release()
        if route is late:
            await fleet.remove("a")
        assert ("a" not in dispatcher.places.known) == (route is late)
        route.watch.answered(usage)
    assert "a" not in dispatcher.places.known
    assert (old.load.running, old.load.queued_tokens) == (0, 0)


async def test_a_request_that_ends_late_is_not_taken_from_who_has_the_name_now() -> None:
    index, its_rates = RadixIndex(), rates(Settings())
    spec = InstanceSpec("a", "http://10.0.0.1", OpenAICompatible(), models=("m",))
    fleet = Fleet([spec], client=None, index=index, rates=its_rates)  # type: ignore[arg-type]
    dispatcher = Dispatcher(fleet, index, ExpectedTtft(), 1, lambda after_s, call: call())
    fleet.instances["a"].is_healthy = True
    late = dispatcher.route("m", None, 400, frozenset())
    assert late is not None
    await fleet.remove("a")
    new = fleet.instances["a"] = Instance(spec, its_rates)
    new.is_healthy = True
    running = dispatcher.route("m", None, 400, frozenset())
    assert running is not None
    late.release()
    assert (new.load.running, new.load.queued_tokens) == (1, 100)
    running.release()
    assert (new.load.running, new.load.queued_tokens) == (0, 0)


async def test_prompts_that_engines_refuse_teach_nothing() -> None:
    index, its_rates = RadixIndex(), rates(Settings())
    spec = InstanceSpec("a", "http://10.0.0.1", OpenAICompatible(), models=("m",))
    fleet = Fleet([spec], client=None, index=index, rates=its_rates)  # type: ignore[arg-type]
    dispatcher = Dispatcher(fleet, index, ExpectedTtft(), 1, lambda after_s, call: call())
    fleet.instances["a"].is_healthy = True
    for number in range(20):  # bodies of 30 MB, which no context holds
        refused = dispatcher.route("m", None, 30 << 20, frozenset(), f"huge {number}")
        assert refused is not None
        assert refused.watch is not None
        refused.release()
        refused.watch.answered(Usage(source=UsageSource.NONE))
    assert (dispatcher.places.mean_prompt, dispatcher.places.mean_square_s) == (0, 0)
    taken = dispatcher.route("m", None, 4000, frozenset(), "run")
    assert taken is not None
    assert taken.watch is not None
    taken.watch.answered(Usage(fresh_tokens=1000, output_tokens=5, source=UsageSource.ENGINE))
    assert 0 < dispatcher.places.mean_prompt <= 1000
    assert dispatcher.places.mean_square_s > 0
