"""Fields of NetBox's answers: python tests/data/netbox/answers.py netbox-openapi-4.6.json

Replaces `answers` in openapi-4.6.json, whose `source` says where the description comes from.
References are shown to their first level, because stand-ins and clients use no more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
DATA = Path(__file__).with_name("openapi-4.6.json")


def main() -> None:
    description = json.loads(Path(sys.argv[1]).read_text())
    schemas = description["components"]["schemas"]

    def resolved(schema: Schema) -> Schema:
        named: Schema = (schema.get("allOf") or [schema])[-1]
        reference = named.get("$ref", "").rpartition("/")[2]
        return {**(schemas[reference] if reference else schema), "nullable": _nullable(schema)}

    def simple(schema: Schema, depth: int) -> Schema:
        """Type, values and, of objects, the names of their fields."""
        schema = resolved(schema)
        kind, properties = schema.get("type"), schema.get("properties")
        result: Schema = {}
        if kind:
            result["type"] = [kind, "null"] if schema["nullable"] else kind
        if enum := schema.get("enum"):
            result["enum"] = [*enum, None] if schema["nullable"] else enum
        if kind == "array" and depth:
            result["items"] = simple(schema["items"], depth)
        if properties and depth:
            result["properties"] = {n: simple(s, depth - 1) for n, s in properties.items()}
            result["additionalProperties"] = False
        return result

    data = json.loads(DATA.read_text())
    answers = {}
    for path in data.pop("answers"):
        answer = description["paths"][path]["get"]["responses"]["200"]["content"]
        page = schemas[answer["application/json"]["schema"]["$ref"].rpartition("/")[2]]
        answers[path] = simple(page["properties"]["results"]["items"], 2)
    # A line for each field.
    kinds = [
        f"  {json.dumps(path)}: {{"
        + ",".join(f"\n   {json.dumps(n)}: {json.dumps(s)}" for n, s in row["properties"].items())
        + "\n  }"
        for path, row in answers.items()
    ]
    text = json.dumps(data, indent=1).removesuffix("\n}")
    DATA.write_text(text + ',\n "answers": {\n' + ",\n".join(kinds) + "\n }\n}\n")


def _nullable(schema: Schema) -> bool:
    return bool(schema.get("nullable"))


if __name__ == "__main__":
    main()
