"""``keepwarm demo``: a real agent run on this machine, served warm, billed and traced."""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from engine_adapter.embedded.launch import free_port
from gateway.demo.stage import Stage, StageError
from gateway.demo.summary import broken_promises
from kvstore.page import Tier

HELP = "run a real agent through a gateway with two embedded engines and show what happened"
PAGE_TOKENS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--keep", action="store_true", help="stay up afterwards, for the console and for your own agent"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary to FILE too")
    parser.add_argument("--port", type=int, default=0, help="port of the gateway (default: a free one)")
    parser.add_argument("--model", default="default", help="'default' or the folder of a Llama-family model")
    parser.add_argument("--folder", type=Path, default=Path(".keepwarm/demo"), help="scratch folder, emptied first")


def run(args: argparse.Namespace) -> int:
    """Run the demonstration; 0 when everything that it promises was seen. Its last lines are the summary as JSON."""
    try:
        import openai
    except ImportError:
        print("keepwarm demo drives its agent with the OpenAI client: pip install 'keepwarm[demo]'", file=sys.stderr)
        return 2
    from gateway.demo.show import perform

    folder = args.folder.resolve()
    signal.signal(signal.SIGTERM, _end)
    try:
        with _scratch(folder):
            stage = Stage(folder, port=args.port or free_port(), model=args.model)
            try:
                _say("Starting a gateway and two embedded engines (the first time the model is fetched: minutes) ...")
                stage.start()
                with openai.OpenAI(base_url=f"{stage.url}/v1", api_key="not-needed", max_retries=0) as client:
                    summary = perform(stage, client, _say)
                _say("\n" + table(summary))
                problems = broken_promises(summary, PAGE_TOKENS)
                for problem in problems:
                    _say(f"PROBLEM: {problem}")
                _say(f"\nconsole:  {stage.url}/console/runs/{summary['run']}\nbase URL: {stage.url}/v1")
                _say("(stays up until Ctrl-C)" if args.keep else "(./demo --keep leaves both up)")
                text = json.dumps(summary, indent=2)
                if args.json is not None:
                    args.json.write_text(text + "\n")
                _say(text)
                if args.keep:
                    stage.wait()
                return 1 if problems else 0
            finally:
                stage.stop()
    except (StageError, openai.OpenAIError) as error:
        print(f"keepwarm demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def table(summary: dict[str, Any]) -> str:
    """Return the summary's steps as a table for people."""
    form = "{:>6} {:<12} {:>6} {:>6} {:>5} {:>5} {:>5} {:>4} {:>8} {:>8} {:>9} {:>9}  {}"
    heads = (
        "step",
        "instance",
        "prompt",
        *(tier.label for tier in Tier),
        "out",
        "TTFT ms",
        "cold ms",
        "cost n",
        "saved n",
    )
    lines = [form.format(*heads, "tools")]
    for name in ("steps", "restart_step", "new_instance_step"):
        entry = summary[name]
        for step in entry if isinstance(entry, list) else [entry]:
            cells = (
                step["step"],
                step["instance"],
                step["prompt_tokens"],
                *step["hit_tokens"].values(),
                step["output_tokens"],
                step["ttft_ms"],
                step["cold_ttft_ms"],
                step["cost_nano"],
                step["saved_nano"],
            )
            lines.append(form.format(*("-" if cell is None else cell for cell in cells), ", ".join(step["tool_calls"])))
    return "\n".join(lines)


def _end(number: int, _: object) -> NoReturn:
    """End in order, with everything that was started."""
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def _scratch(folder: Path) -> Iterator[None]:
    """Hold the folder for one demonstration at a time and begin with it empty; only a folder of ours is emptied."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StageError(f"another demonstration runs in {folder}; choose another --folder") from None
        if folder.exists():
            if any(folder.iterdir()) and not (folder / "keepwarm.toml").exists():
                raise StageError(f"{folder} is not empty and not a demonstration's folder")
            shutil.rmtree(folder)
        yield
