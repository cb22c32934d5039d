"""Real SGLang with radix sessions: does it keep what runs that go on need, and let go of what ended ones had?

    KEEPWARM_SGLANG_PYTHON=…/bin/python .venv/bin/python -m tests.e2e.real_sglang_sessions

One server (a tiny random Llama) whose cache holds three runs, behind a gateway. Twice two runs compute, then others
need room: the first time nobody has ended, and the older run is lost; the second time the newer one has ended, and it
is lost instead, and the gateway predicts both. Prints a row a request; ends with 0 when all is so, with priorities on
as well. About three minutes of a core; see ``real_sglang_index/README.md`` for the interpreter.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path

from tests.e2e.real_sglang_index.processes import HERE, GatewayProcess, Json, SglangServer, running, sglang_python

PAGE, CACHE_TOKENS = 16, 2048
FLAGS = ("--enable-session-radix-cache", "--enable-priority-scheduling")


class Asker:
    """Asks through the gateway, and prints what was hit."""

    def __init__(self, gateway: GatewayProcess, server: SglangServer) -> None:
        self._gateway, self._server, self.is_good = gateway, server, True

    def hit_share(self, run: str, text: str, priority: str = "normal") -> float:
        """Return how much of a prompt SGLang had, once its events are known; print that and the prediction."""
        self._settle()
        body: Json = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
        headers = {"x-keepwarm-run": run, "x-keepwarm-priority": priority}
        answer, told = self._gateway.ask("/v1/chat/completions", body, "red", headers)
        usage = answer["usage"]
        hit = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        predicted = int({name.lower(): value for name, value in told.items()}["x-keepwarm-predicted-hit"])
        print(f"{run:12} {priority:8} prompt {usage['prompt_tokens']:5}  hit {predicted:5} / {hit:5}", end="")
        print("  (foreseen / SGLang's)", flush=True)
        self.expect(hit == predicted, "the prediction was wrong")
        return hit / float(usage["prompt_tokens"])

    def end(self, run: str) -> None:
        """Tell that a run has ended, and wait until SGLang has heard it."""
        self._gateway.ask(f"/keepwarm/v1/runs/{run}/end", {}, "red")
        for _ in range(100):
            if f"release_session red/{run}" in self._server.log.read_text():
                return
            time.sleep(0.1)
        self.expect(False, "SGLang was not told")

    def expect(self, holds: bool, what: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.is_good = False
            print(f"  !! {what}")

    def _settle(self) -> None:
        for _ in range(300):
            known = self._gateway.instances()["one"]
            if known["events"] == "complete" and known["next_event_batch"] == self._server.next_batch():
                return
            time.sleep(0.1)
        raise RuntimeError("the events did not settle")


def scripted(asker: Asker) -> None:
    """Two runs and their successors, without an end and with one."""
    for ends in (False, True):
        older, newer = f"older-{ends}", f"newer-{ends}"
        texts = {run: f"{run}: " + "read the file and test it " * 100 for run in (older, newer)}
        for run, text in texts.items():
            asker.expect(asker.hit_share(run, text) < 0.2, "a new run was known")
        if ends:
            asker.end(newer)
        for number, priority in enumerate(("batch", "interactive")):
            asker.hit_share(f"other-{ends}-{number}", f"{number} {ends}: " + "open the path of it now " * 90, priority)
        lost, kept = (newer, older) if ends else (older, newer)
        asker.expect(asker.hit_share(kept, texts[kept]) > 0.9, f"{kept} was to be kept")
        asker.expect(asker.hit_share(lost, texts[lost]) < 0.5, f"{lost} was to go first")


def main() -> int:
    """Run it."""
    python = sglang_python()
    if python is None:
        return 2
    with tempfile.TemporaryDirectory(prefix="keepwarm-sglang-") as scratch:
        folder = Path(scratch)
        subprocess.run([python, str(HERE / "tiny_model.py"), str(folder / "model")], check=True)
        server = SglangServer(
            python, folder / "model", "one", page=PAGE, tokens=CACHE_TOKENS, folder=folder, more=FLAGS
        )
        gateway = GatewayProcess([server], folder)
        asker = Asker(gateway, server)
        with running(server, gateway):
            scripted(asker)
    return 0 if asker.is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
