"""Keys let in, salts keep apart."""

import pytest

from gateway.errors import Unauthorized
from gateway.identity import Caller, Key, KeyRing, digest_of, effective_salt, new_secret
from tracing.record import Identity

_A, _B = Identity("acme", "red", "key-a"), Identity("bolt", "blue", "key-b")
_RING = KeyRing([Key(digest_of("sk-a"), _A, frozenset({"m"})), Key(digest_of("sk-b"), _B)])


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
