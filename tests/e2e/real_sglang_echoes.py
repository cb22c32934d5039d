"""Quoted answers against real SGLang: are the ids that it generated told, taken again, and hit?

    KEEPWARM_SGLANG_PYTHON=…/bin/python .venv/bin/python -m tests.e2e.real_sglang_echoes

One server (a tiny random Llama, which generates tokens that no rendering of their text makes) behind a gateway. A chat
grows by its answers, whole and streamed; each request's prompt tokens as counted by the gateway are held against those
that SGLang reports, with tools under every choice of one as well. Prints a row a request, ends with 0 when all agree,
every quoted answer was kept and hit, and nothing was shown that the client did not ask for. About five minutes of a
core; see ``real_sglang_index/README.md`` for the interpreter.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from tests.e2e.real_sglang_index.processes import HERE, GatewayProcess, Json, SglangServer, running, sglang_python

PAGE, STEPS = 16, 4
TOOLS: list[Json] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, "description": "read a file"}}
    for name in ("read", "write")
]
CHOICES: tuple[object, ...] = ("auto", "none", {"type": "function", "function": {"name": "write"}})


class Run:
    """Asks through the gateway and reads back what it wrote down."""

    def __init__(self, gateway: GatewayProcess, server: SglangServer) -> None:
        self._gateway, self._server = gateway, server
        self.is_good = True

    def settle(self) -> None:
        """Wait until the gateway has folded everything that the server published."""
        for _ in range(300):
            known = self._gateway.instances()["one"]
            if known["events"] == "complete" and known["next_event_batch"] == self._server.next_batch():
                return
            time.sleep(0.1)
        raise RuntimeError("the events did not settle")

    def ask(self, what: str, **body: object) -> tuple[str, Json]:
        """Return an answer's text and its record; print a row."""
        self.settle()
        data = json.dumps({"model": "tiny", "max_tokens": 40, "temperature": 0, "ignore_eos": True, **body}).encode()
        headers = {"content-type": "application/json", "authorization": "Bearer secret-of-red"}
        request = urllib.request.Request(f"{self._gateway.url}/v1/chat/completions", data, headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            raw, told = response.read().decode(), response.headers
        self.expect("sglext" not in raw, "an answer shows what was asked for by the gateway")
        record = self._record(told["x-keepwarm-run"], told["x-keepwarm-request-id"])
        usage, decision = record["usage"], record["decision"]
        hits = sum(usage[f"hit_{tier}_tokens"] for tier in ("device", "host", "disk", "pool"))
        prompt = hits + usage["fresh_tokens"]
        note = record["prompt"] or {}
        counted, predicted = record["gateway_prompt_tokens"], decision["predicted_hit_tokens"]
        print(f"{what:28} prompt {counted:5} / {prompt:5}  hit {predicted:5} / {hits:5}  {note.get('echo')}", end="")
        print(f" {note.get('echo_won_tokens')}  (the gateway's word / SGLang's)", flush=True)
        self.expect(counted == prompt, "counts differ")
        self.expect(predicted == hits, "the prediction was wrong")
        return _text(raw), record

    def expect(self, holds: bool, what: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.is_good = False
            print(f"  !! {what}")

    def _record(self, run_id: str, request_id: str) -> Json:
        for _ in range(200):
            try:
                records = self._gateway.ask(f"/keepwarm/v1/runs/{run_id}", key="red")[0]["records"]
            except OSError:
                records = []
            for record in records:
                if record["request_id"] == request_id:
                    found: Json = record
                    return found
            time.sleep(0.05)
        raise RuntimeError(f"no record of {request_id}")


def _text(raw: str) -> str:
    if raw.startswith("{"):
        return str(json.loads(raw)["choices"][0]["message"]["content"])
    chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def scripted(run: Run) -> None:
    """Grow two chats, and ask for tools in every way."""
    for streams in (False, True):
        messages: list[Json] = [
            {"role": "system", "content": f"You are an agent, {streams}. " + "read the file and test it " * 12},
            {"role": "user", "content": "open the path"},
        ]
        before = 0
        for step in range(STEPS):
            text, record = run.ask(
                f"step {step + 1}{' streamed' if streams else ''}", messages=messages, stream=streams
            )
            usage = record["usage"]
            if step:
                run.expect(record["prompt"]["echo"] in ("kept", "same"), "the quoted answer was not kept")
                run.expect(usage["hit_device_tokens"] >= (before - 1) // PAGE * PAGE, "generated pages missed")
            before = record["gateway_prompt_tokens"] + usage["output_tokens"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"and then, {step}?"}]
    counts = []
    for choice in CHOICES:
        _, record = run.ask(f"tools, {str(choice)[:16]}", messages=messages[:2], tools=TOOLS, tool_choice=choice)
        counts.append(record["gateway_prompt_tokens"])
    auto, none, named = counts
    run.expect(none < named < auto, "the template does not show what the choice leaves")


def _show_tools(model: Path) -> None:
    """Put what a request's tools are before the conversation, in the tiny model's chat template."""
    config = model / "tokenizer_config.json"
    described = json.loads(config.read_text())
    file = model / "chat_template.jinja"
    template = file.read_text() if file.is_file() else described["chat_template"]
    shown = "{% for tool in tools or [] %}<|im_start|>tool\n{{ tool | tojson }}<|im_end|>\n{% endfor %}" + template
    file.write_text(shown)
    config.write_text(json.dumps({**described, "chat_template": shown}))


def main() -> int:
    """Run it."""
    python = sglang_python()
    if python is None:
        return 2
    with tempfile.TemporaryDirectory(prefix="keepwarm-sglang-") as scratch:
        folder = Path(scratch)
        subprocess.run([python, str(HERE / "tiny_model.py"), str(folder / "model")], check=True)
        _show_tools(folder / "model")
        server = SglangServer(python, folder / "model", "one", page=PAGE, tokens=8192, folder=folder)
        gateway = GatewayProcess([server], folder)
        settings = folder / "keepwarm.toml"
        settings.write_text(settings.read_text() + '[[models]]\nname = "tiny"\ntemplate = "model"\n')
        run = Run(gateway, server)
        with running(server, gateway):
            scripted(run)
    return 0 if run.is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
