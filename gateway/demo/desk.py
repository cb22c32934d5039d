"""The agent's world: an order desk with three small files, and the tools that really read and write them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

FILES: dict[str, list[list[str]]] = {
    "orders.csv": [
        ["order", "customer", "item", "quantity", "day"],
        ["1001", "Alder", "lamp", "4", "mon"],
        ["1002", "Birch", "chair", "12", "mon"],
        ["1003", "Cedar", "desk", "3", "tue"],
        ["1004", "Alder", "chair", "6", "wed"],
        ["1005", "Elm", "lamp", "20", "wed"],
        ["1006", "Birch", "shelf", "5", "thu"],
        ["1007", "Cedar", "lamp", "8", "fri"],
    ],
    "stock.csv": [
        ["item", "quantity", "shelf"],
        ["lamp", "25", "A1"],
        ["chair", "30", "A2"],
        ["desk", "2", "B1"],
        ["shelf", "11", "B3"],
    ],
    "prices.csv": [
        ["item", "price", "weight"],
        ["lamp", "35", "2"],
        ["chair", "80", "6"],
        ["desk", "240", "31"],
        ["shelf", "65", "9"],
    ],
}
ITEMS = ("lamp", "chair", "desk", "shelf")

HANDBOOK = (files(__package__) / "handbook.txt").read_text().strip()
TASK = "Please prepare today's note: what was ordered, what is short, and who ordered it. Start with the files."


def _tool(name: str, description: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _choice(values: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


TOOLS: list[dict[str, Any]] = [
    _tool("list_files", "List the files of the desk with their numbers of lines.", {}),
    _tool("sum_quantity", "Add up the quantity column of a file.", {"file": _choice(("orders.csv", "stock.csv"))}),
    _tool("count_item", "Add up the ordered pieces of one item.", {"item": _choice(ITEMS)}),
    _tool("stock_of", "Look up how many pieces of one item are on the shelf.", {"item": _choice(ITEMS)}),
    _tool("who_ordered", "List the customers who ordered one item.", {"item": _choice(ITEMS)}),
    _tool("write_note", "Write a note for the warehouse.", {"title": _choice(("ordered", "short", "value")),
          "number": {"type": "integer", "minimum": 0, "maximum": 999}}),
]  # fmt: skip

PLAN: tuple[str, ...] = ("list_files", "sum_quantity", "count_item", "stock_of", "who_ordered")
"""The tools that the agent forces, step by step; the model fills in their arguments."""


class Desk:
    """Three CSV files in a folder and the tools over them. A wrong argument gives an error text, as real tools do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in FILES.items():
            with (folder / name).open("w", newline="") as file:
                csv.writer(file).writerows(rows)
        self._tools: dict[str, Callable[..., object]] = {
            "list_files": self._list_files,
            "sum_quantity": self._sum_quantity,
            "count_item": self._count_item,
            "stock_of": self._stock_of,
            "who_ordered": self._who_ordered,
            "write_note": self._write_note,
        }

    def call(self, name: str, arguments: str) -> str:
        """Run one tool with JSON arguments and return its result as text."""
        try:
            return json.dumps(self._tools[name](**json.loads(arguments)))
        except (KeyError, TypeError, ValueError, OSError) as error:
            return json.dumps({"error": f"{type(error).__name__}: {error}"})

    def _rows(self, name: str) -> list[dict[str, str]]:
        with (self._folder / name).open(newline="") as file:
            return list(csv.DictReader(file))

    def _list_files(self) -> dict[str, int]:
        return {path.name: len(self._rows(path.name)) for path in sorted(self._folder.glob("*.csv"))}

    def _sum_quantity(self, file: str) -> dict[str, int]:
        return {"pieces": sum(int(row["quantity"]) for row in self._rows(file))}

    def _count_item(self, item: str) -> dict[str, int]:
        return {"ordered": sum(int(row["quantity"]) for row in self._rows("orders.csv") if row["item"] == item)}

    def _stock_of(self, item: str) -> dict[str, int]:
        return {row["item"]: int(row["quantity"]) for row in self._rows("stock.csv") if row["item"] == item}

    def _who_ordered(self, item: str) -> list[str]:
        return sorted({row["customer"] for row in self._rows("orders.csv") if row["item"] == item})

    def _write_note(self, title: str, number: int) -> dict[str, bool]:
        with (self._folder / "notes.txt").open("a") as file:
            file.write(f"{title}: {number}\n")
        return {"written": True}
