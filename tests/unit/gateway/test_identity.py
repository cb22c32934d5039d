"""Keys let in, salts keep apart."""

import pytest

from gateway.errors import Forbidden, NoInstance, NotFound, Unauthorized
from gateway.identity import Caller, Key, KeyRing, digest_of, effective_salt, new_secret
from gateway.models import ModelDirectory
from tracing.record import Identity

_A, _B = Identity("acme", "red", "key-a"), Identity("bolt", "blue", "key-b")
_RING = KeyRing(
    [
        Key(digest_of("sk-a"), Caller(_A, is_salted=True, models=frozenset({"m"}))),
        Key(digest_of("sk-b"), Caller(_B, is_salted=True)),
    ]
)


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer sk-a"}, {"authorization": "bearer  sk-a"}, {"x-api-key": "sk-a"}, {"api-key": "sk-a"}],
)
def test_a_key_is_taken_from_any_of_the_usual_headers(headers: dict[str, str]) -> None:
    caller = _RING.authenticate(headers)
    assert caller.identity == _A
    assert caller.is_salted
    assert caller.may_use("m")
    assert not caller.may_use("other")


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer"}, {"authorization": "Basic sk-a"}, {"authorization": "Bearer sk-c"},
     {"api-key": ""}, {"x-api-key": " "},
     {"authorization": f"Bearer {digest_of('sk-a')}"}, {"x-api-key": "\udcff"}],
)  # fmt: skip
def test_anything_else_is_refused_without_telling_why(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized) as caught:
        _RING.authenticate(headers)
    assert "sk-" not in caught.value.message


def test_an_empty_ring_knows_one_tenant() -> None:
    caller = KeyRing().authenticate({"authorization": "Bearer whatever"})
    assert (caller.identity.tenant, caller.is_salted, caller.may_use("x")) == ("default", False, True)


def test_a_client_narrows_its_namespace_and_never_leaves_it() -> None:
    a, b, free = Caller(_A, is_salted=True), Caller(_B, is_salted=True), Caller(_A, is_salted=False)
    assert effective_salt(free, None) is None
    salts = [
        effective_salt(caller, wish) for caller in (a, b, free) for wish in ("", "x", effective_salt(a, None), "acme")
    ]
    salts += [effective_salt(a, None), effective_salt(b, None)]
    assert None not in salts
    assert len(set(salts)) == len(salts)
    assert effective_salt(a, "x") == effective_salt(Caller(_A, is_salted=True), "x")


def test_new_secrets_differ() -> None:
    assert new_secret() != new_secret()


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8400", "a.localhost", "127.0.0.1:8400", "127.9.9.9", "[::1]:8400"]
)
def test_without_keys_this_machine_is_let_in_by_its_own_names(host: str) -> None:
    ring = KeyRing()
    assert ring.authenticate({"host": host}).is_admin
    assert ring.authenticate({"host": host, "origin": f"http://{host}"}).is_admin
    assert ring.authenticate({}).is_admin


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"host": "127.0.0.1.evil.example:8400"}, {"host": "10.0.0.1"}, {"host": ""},
     {"host": "[::1"}, {"host": "localhost", "origin": "http://evil.example"}, {"host": "localhost", "origin": "null"}],
)  # fmt: skip
def test_without_keys_other_peoples_pages_are_not_let_in(headers: dict[str, str]) -> None:
    with pytest.raises(Forbidden):
        KeyRing().authenticate(headers)
    assert _RING.authenticate({**headers, "x-api-key": "sk-a"}).identity == _A


def test_a_model_is_unknown_only_when_every_instance_has_said_what_it_serves() -> None:
    served: list[str] = []
    models = ModelDirectory([], lambda: served, lambda: bool(served))
    caller = KeyRing().authenticate({})
    with pytest.raises(NoInstance) as not_yet:
        models.resolve("m", caller)
    assert not_yet.value.retry_after_s
    served.append("m")
    assert models.resolve("m", caller) == "m"
    with pytest.raises(NotFound):
        models.resolve("n", caller)
