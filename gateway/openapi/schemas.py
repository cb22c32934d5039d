"""What goes in and out, as JSON schemas.

Of bodies that engines judge only the members are described that the gateway itself reads; whatever else stands there
passes. Answers of engines are described as far as the gateway needs them, answers of its own entirely.
"""

from __future__ import annotations

from collections.abc import Mapping

Schema = dict[str, object]

STRING: Schema = {"type": "string"}
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
LIMIT: Schema = {"type": ["integer", "null"], "minimum": 1}
NUMBER: Schema = {"type": ["number", "null"]}
FLAG: Schema = {"type": ["boolean", "null"]}
OBJECT: Schema = {"type": "object"}
ANYTHING: Schema = {}

MODEL: Schema = {
    "type": "string",
    "minLength": 1,
    "maxLength": 256,
    "description": "A model's name, or an alias of it.",
}


def ref(name: str) -> Schema:
    """Return a reference to one of ``SCHEMAS``."""
    return {"$ref": f"#/components/schemas/{name}"}


def members(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **more: object) -> Schema:
    """Return an object with these members, and any others."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required), **more}


def listed(item: Schema, **more: object) -> Schema:
    """Return a list."""
    return {"type": "array", "items": item, **more}


def maybe(schema: Schema) -> Schema:
    """Return a schema that also takes null."""
    return {"anyOf": [schema, {"type": "null"}]}


def constant(value: str) -> Schema:
    """Return a schema of one string."""
    return {"type": "string", "const": value}


EVENT: Schema = members({"data": STRING}, {"event": STRING}, description="A server-sent event of the protocol.")

_STREAMED: Mapping[str, Schema] = {"stream": FLAG, "cache_salt": {"type": ["string", "null"]}}
_OPENAI_STREAMED: Mapping[str, Schema] = {**_STREAMED, "stream_options": {"type": ["object", "null"]}}
_ENGINE_JUDGES = "Everything that is not described passes to the engine as it is, and the engine judges it."

_MESSAGES_REQUEST: Mapping[str, Schema] = {
    "max_tokens": LIMIT,
    "system": {"anyOf": [STRING, listed(ref("TextBlock")), {"type": "null"}]},
    "tools": {"anyOf": [listed(ref("AnthropicTool")), {"type": "null"}]},
    "tool_choice": maybe(members({"type": {"enum": ["auto", "any", "none"]}}, {"disable_parallel_tool_use": FLAG})),
    "stop_sequences": {"anyOf": [listed(STRING), {"type": "null"}]},
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": LIMIT,
    "output_config": maybe(members({}, {"effort": {"type": ["string", "null"]}, "format": {"type": "null"}})),
    "metadata": maybe(members({}, {"user_id": {"type": ["string", "null"]}})),
    "thinking": ANYTHING,
}
_MESSAGES_NEEDS: Mapping[str, Schema] = {"model": MODEL, "messages": listed(ref("AnthropicMessage"), minItems=1)}
_IMAGE = members({"type": constant("image"), "source": members({"type": constant("url"), "url": STRING})})
_RESULT = members({"type": constant("tool_result"), "tool_use_id": STRING}, {"content": maybe(STRING)})
_THOUGHT = members({"type": constant("thinking"), "thinking": STRING})
_USE = members({"type": constant("tool_use"), "id": STRING, "name": STRING, "input": OBJECT})
_MODES: Schema = {"enum": ["auto", "none", "required", None]}

_RESPONSES_NEEDS: Mapping[str, Schema] = {"model": MODEL, "input": {"anyOf": [STRING, listed(ref("Item"))]}}
_RESPONSES_REQUEST: Mapping[str, Schema] = {
    "instructions": {"type": ["string", "null"]},
    "tools": {"anyOf": [listed({"oneOf": [ref("FunctionTool"), ref("CustomTool")]}), {"type": "null"}]},
    "tool_choice": {"anyOf": [_MODES, members({"type": {"enum": ["function", "custom"]}, "name": STRING})]},
    "parallel_tool_calls": FLAG,
    "max_output_tokens": LIMIT,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "text": maybe(members({}, {"format": maybe(ref("TextFormat")), "verbosity": {"type": ["string", "null"]}})),
    "reasoning": maybe(members({}, {"effort": {"type": ["string", "null"]}})),
    "include": {"anyOf": [listed(STRING), {"type": "null"}]},
    "previous_response_id": {"type": ["string", "null"]},
    "store": FLAG,
    "user": {"type": ["string", "null"]},
}

SCHEMAS: Mapping[str, Schema] = {
    "ChatRequest": members({"model": MODEL}, {"messages": ANYTHING, **_OPENAI_STREAMED}, description=_ENGINE_JUDGES),
    "CompletionRequest": members(
        {"model": MODEL}, {"prompt": ANYTHING, **_OPENAI_STREAMED}, description=_ENGINE_JUDGES
    ),
    "EmbeddingsRequest": members(
        {"model": MODEL, "input": {"type": ["string", "array"]}},
        {"stream": {"type": ["boolean", "null"], "enum": [False, None]}, "cache_salt": {"type": ["string", "null"]}},
        description=_ENGINE_JUDGES,
    ),
    "MessagesRequest": members(
        {**_MESSAGES_NEEDS, "max_tokens": {"type": "integer", "minimum": 1}},
        {**{name: schema for name, schema in _MESSAGES_REQUEST.items() if name != "max_tokens"}, **_STREAMED},
        description="Anthropic's Messages. What cannot be translated for an engine is refused by name.",
    ),
    "CountTokensRequest": members(_MESSAGES_NEEDS, _MESSAGES_REQUEST),
    "ResponsesRequest": members(
        _RESPONSES_NEEDS,
        {**_RESPONSES_REQUEST, **_STREAMED},
        description="OpenAI's Responses. What cannot be translated for an engine is refused by name.",
    ),
    "CountInputRequest": members(_RESPONSES_NEEDS, _RESPONSES_REQUEST),
    "TokenizeRequest": members(
        {"model": MODEL},
        {
            "prompt": {"type": "string"},
            "messages": listed(OBJECT, minItems=1),
            "tools": {"anyOf": [listed(OBJECT), {"type": "null"}]},
            "add_special_tokens": FLAG,
            "add_generation_prompt": FLAG,
            "return_token_strs": FLAG,
        },
        oneOf=[{"required": ["prompt"]}, {"required": ["messages"]}],
    ),
    "DetokenizeRequest": members(
        {"model": MODEL, "tokens": listed({"type": "integer", "minimum": 0, "maximum": 2**31 - 1})},
        {"skip_special_tokens": FLAG},
    ),
    "TextBlock": members({"type": constant("text"), "text": STRING}),
    "UserBlock": {
        "oneOf": [ref("TextBlock"), _IMAGE, _RESULT],
        "description": "Also documents, search results, and images in base64.",
    },
    "AssistantBlock": {"oneOf": [ref("TextBlock"), _THOUGHT, _USE]},
    "AnthropicMessage": {
        "oneOf": [
            members({"role": constant("user"), "content": {"anyOf": [STRING, listed(ref("UserBlock"))]}}),
            members({"role": constant("assistant"), "content": {"anyOf": [STRING, listed(ref("AssistantBlock"))]}}),
            members({"role": constant("system"), "content": {"anyOf": [STRING, listed(ref("TextBlock"))]}}),
        ]
    },
    "AnthropicTool": members(
        {"name": STRING},
        {
            "input_schema": maybe(OBJECT),
            "type": {"enum": ["custom", None]},
            "description": {"type": ["string", "null"]},
            "strict": FLAG,
        },
    ),
    "InputPart": {
        "oneOf": [
            members({"type": constant("input_text"), "text": STRING}),
            members({"type": constant("input_image"), "image_url": STRING}, {"detail": {"type": ["string", "null"]}}),
            members({"type": constant("input_file"), "file_data": STRING}, {"filename": {"type": ["string", "null"]}}),
        ]
    },
    "Item": {
        "oneOf": [
            members(
                {
                    "role": {"enum": ["user", "system", "developer"]},
                    "content": {"anyOf": [STRING, listed(ref("InputPart"))]},
                },
                {"type": {"enum": ["message", None]}},
            ),
            members({"role": constant("assistant"), "content": STRING}, {"type": {"enum": ["message", None]}}),
            members({"type": constant("function_call"), "call_id": STRING, "name": STRING, "arguments": STRING}),
            members({"type": constant("function_call_output"), "call_id": STRING, "output": STRING}),
            members({"type": constant("custom_tool_call"), "call_id": STRING, "name": STRING, "input": STRING}),
            members({"type": constant("custom_tool_call_output"), "call_id": STRING, "output": STRING}),
        ],
        "description": "Also reasoning items, item references, and an assistant's message in parts.",
    },
    "FunctionTool": members(
        {"type": constant("function"), "name": STRING},
        {"parameters": maybe(OBJECT), "description": {"type": ["string", "null"]}, "strict": FLAG},
    ),
    "CustomTool": members(
        {"type": constant("custom"), "name": STRING},
        {
            "description": {"type": ["string", "null"]},
            "format": {
                "oneOf": [
                    members({"type": constant("text")}),
                    members({"type": constant("grammar"), "syntax": STRING, "definition": STRING}),
                ]
            },
        },
    ),
    "TextFormat": {
        "oneOf": [
            members({"type": {"enum": ["text", "json_object"]}}),
            members(
                {"type": constant("json_schema"), "name": STRING, "schema": OBJECT},
                {"strict": FLAG, "description": {"type": ["string", "null"]}},
            ),
        ]
    },
    "ChatCompletion": members({"choices": listed(OBJECT)}, {"id": STRING, "model": STRING, "usage": maybe(OBJECT)}),
    "Embeddings": members({"data": listed(OBJECT)}, {"model": STRING, "usage": OBJECT}),
    "Message": members(
        {
            "id": TEXT,
            "type": constant("message"),
            "role": constant("assistant"),
            "model": STRING,
            "content": listed(members({"type": STRING})),
            "stop_reason": {"type": ["string", "null"]},
            "stop_sequence": {"type": ["string", "null"]},
            "usage": members(
                {"input_tokens": COUNT, "output_tokens": COUNT},
                {"cache_read_input_tokens": COUNT, "cache_creation_input_tokens": COUNT, "cache_creation": OBJECT},
            ),
        }
    ),
    "TokenCount": members({"input_tokens": COUNT}),
    "InputTokens": members({"object": constant("response.input_tokens"), "input_tokens": COUNT}),
    "Response": members(
        {
            "id": TEXT,
            "object": constant("response"),
            "created_at": {"type": "number"},
            "status": {"enum": ["completed", "incomplete", "failed", "in_progress"]},
            "model": STRING,
            "output": listed(members({"type": STRING})),
        },
        {"usage": maybe(OBJECT), "error": maybe(OBJECT), "incomplete_details": maybe(OBJECT)},
    ),
    "DeletedResponse": members({"id": TEXT, "object": constant("response"), "deleted": {"const": True}}),
    "ItemList": members({"object": constant("list"), "data": listed(OBJECT), "has_more": {"type": "boolean"}}),
    "Tokens": members({"tokens": listed(COUNT), "count": COUNT}, {"max_model_len": {"type": ["integer", "null"]}}),
    "Detokenized": members({"text": STRING}),
    "Model": members({"id": TEXT}, {"object": STRING, "created": COUNT, "owned_by": STRING, "type": STRING}),
    "ModelList": members({"data": listed(ref("Model"))}, {"object": STRING, "has_more": {"type": "boolean"}}),
    "Error": members(
        {"error": members({"message": STRING, "type": STRING}, {"param": {}, "code": {}})},
        {"type": constant("error"), "request_id": {"type": ["string", "null"]}},
        description="OpenAI's shape; on Anthropic's endpoints Anthropic's, with type and request_id around it.",
    ),
}
