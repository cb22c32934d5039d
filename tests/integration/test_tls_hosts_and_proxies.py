"""TLS with a certificate that is renewed under way, hosts that are served, and proxies that are believed."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.errors import SettingsError
from gateway.tls import Certificate, TlsOptions
from tests.gateways import gateway_for
from tests.scripted_engine import ScriptedEngine

KEY = {"id": "root", "secret": "sk-root", "admin": True}
AS_ROOT = {"x-api-key": "sk-root"}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a certificate for localhost whose subject says ``name``."""
    folder.mkdir(exist_ok=True)
    paths = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost", "-keyout", paths[1], "-out", paths[0]],
        check=True, capture_output=True,
    )  # fmt: skip
    return paths


async def subject_at(url: str, trusted: Path) -> str:
    """Return whom the certificate is of that a new connection is shown."""
    context = ssl.create_default_context(cafile=trusted)
    _, writer = await asyncio.open_connection("localhost", int(url.rpartition(":")[2]), ssl=context)
    found: dict[str, Any] = writer.get_extra_info("peercert")
    writer.close()
    return str(found["subject"][0][0][1])


async def test_https_on_both_paths_and_a_certificate_that_follows_its_files(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path / "tls", "first")
    tls = {"certificate": str(cert), "key": str(key), "look_s": 0.02, "minimum": "1.3"}
    async with (
        ScriptedEngine() as engine,
        gateway_for([engine], tmp_path / "home", keys=[KEY], server={"tls": tls}) as client,
    ):
        assert client.url.startswith("https://127.0.0.1:")
        url = client.url.replace("127.0.0.1", "localhost")
        context = ssl.create_default_context(cafile=cert)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
            for _ in range(2):  # the second on the same connection
                async with session.post(f"{url}/v1/chat/completions", json=BODY, headers=AS_ROOT) as response:
                    assert response.status == 200
            async with session.get(f"{url}/v1/models", headers=AS_ROOT) as response:  # given over to aiohttp
                assert response.status == 200
        old = ssl.create_default_context(cafile=cert)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=old)) as session:
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.get(f"{url}/healthz")
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(url.replace("https", "http") + "/healthz")

        assert await subject_at(url, cert) == "first"
        new_cert, new_key = certificate(tmp_path / "new", "second")
        os.replace(new_cert, cert)  # for a moment the two do not fit
        await asyncio.sleep(0.05)
        trusted = tmp_path / "both.pem"
        trusted.write_bytes(cert.read_bytes())
        os.replace(new_key, key)
        async with asyncio.timeout(10):
            while True:
                try:
                    assert await subject_at(url, trusted) == "second"
                    break
                except ssl.SSLError:  # still the first one, which is not trusted here
                    await asyncio.sleep(0.02)


def test_files_that_are_no_certificate_stop_the_start_and_no_running_gateway(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path / "tls", "first")
    other = certificate(tmp_path / "other", "other")[1]
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", locked],
        check=True,
        capture_output=True,
    )
    for files in ((tmp_path / "none", key), (key, key), (cert, other), (cert, locked)):
        with pytest.raises(SettingsError, match=r"server\.tls"):
            Certificate(TlsOptions(*files))
    kept = Certificate(TlsOptions(cert, key))
    assert not kept.refresh()
    cert.write_text("rubbish")
    assert not kept.refresh()
    assert not kept.refresh()  # said once, not at every look
    certificate(tmp_path / "tls", "again")
    assert kept.refresh()


async def test_requests_for_other_hosts_are_sent_away_in_the_callers_words(tmp_path: Path) -> None:
    hosts = ["Gateway.example", "127.0.0.1"]
    async with (
        ScriptedEngine() as engine,
        gateway_for([engine], tmp_path, keys=[KEY], server={"allowed_hosts": hosts}) as client,
    ):
        for host, status in (
            ("gateway.example", 200), ("GATEWAY.EXAMPLE:8400", 200), ("127.0.0.1:1", 200), ("evil.example", 421),
            ("gateway.example.evil.example", 421), ("", 421), ("[::1", 421), ("localhost", 421),
        ):  # fmt: skip
            headers = {**AS_ROOT, "host": host}
            async with client.session.post(f"{client.url}/v1/chat/completions", json=BODY, headers=headers) as response:
                told = await response.json()
            assert response.status == status, host
            assert status == 200 or told["error"]["code"] == "misdirected_request"
            for path in ("/v1/models", "/console", "/admin/v1/keys"):
                async with client.session.get(client.url + path, headers=headers) as response:
                    assert response.status == status, (host, path)
        headers = {**AS_ROOT, "host": "evil.example"}
        async with client.session.post(f"{client.url}/v1/messages", json=BODY, headers=headers) as response:
            assert (response.status, (await response.json())["type"]) == (421, "error")
        async with client.session.get(f"{client.url}/healthz", headers={"host": "10.1.2.3"}) as response:
            assert response.status == 200  # probes go by address


@pytest.mark.parametrize(
    ("trusted", "forwarded", "told"),
    [
        ([], "203.0.113.9", "127.0.0.1"),
        (["10.0.0.0/8"], "203.0.113.9", "127.0.0.1"),
        (["127.0.0.0/8"], None, "127.0.0.1"),
        (["127.0.0.0/8"], "203.0.113.9", "203.0.113.9"),
        (["127.0.0.0/8"], "1.1.1.1, 203.0.113.9", "203.0.113.9"),
        (["127.0.0.0/8", "10.0.0.0/8"], "6.6.6.6, 203.0.113.9:4711, 10.0.0.7", "203.0.113.9"),
        (["127.0.0.0/8"], "[2001:db8::7]:443", "2001:db8::7"),
        (["127.0.0.0/8"], "203.0.113.9, nonsense", "127.0.0.1"),
        (["127.0.0.1"], "," * 7000, "127.0.0.1"),
    ],
)
async def test_the_log_names_the_client_that_a_trusted_proxy_vouches_for(
    trusted: list[str], forwarded: str | None, told: str, tmp_path: Path
) -> None:
    async with (
        ScriptedEngine() as engine,
        gateway_for([engine], tmp_path, keys=[KEY], server={"trusted_proxies": trusted}) as client,
    ):
        headers = AS_ROOT if forwarded is None else {**AS_ROOT, "x-forwarded-for": forwarded}
        url = f"{client.url}/admin/v1"
        async with client.session.put(f"{url}/tenants/acme", json={}, headers=headers) as response:
            assert response.status == 200
        async with client.session.get(f"{url}/audit", headers=AS_ROOT) as response:
            assert {entry["source"] for entry in (await response.json())["entries"]} == {told}
