"""Tools of Anthropic's API that the client runs: they come without a schema, so the model gets one as for any function.

Models of others were not trained on these tools; names and arguments are those that the client's own code expects.
Tools that run at Anthropic are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]
_STRING, _COUNT = {"type": "string"}, {"type": "integer"}
_POINT = {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}
_LINES = {**_POINT, "description": "First and last line to show; -1 as the last one is the end of the file."}


def _object(required: tuple[str, ...] = (), **properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _commands(*names: str) -> Schema:
    return {"type": "string", "enum": list(names)}


_BASH = _object(
    command={**_STRING, "description": "The command to run."},
    restart={"type": "boolean", "description": "Restart the shell in place of running a command."},
)
_FILE = {
    "path": {**_STRING, "description": "Absolute path of the file or folder."},
    "view_range": _LINES,
    "old_str": {**_STRING, "description": "For str_replace: the text to replace, which the file has exactly once."},
    "new_str": {**_STRING, "description": "For str_replace: the text to put there."},
    "file_text": {**_STRING, "description": "For create: the content of the new file."},
    "insert_line": {**_COUNT, "description": "For insert: the line after which the text goes."},
    "insert_text": {**_STRING, "description": "For insert: the text."},
}
_EDITOR = ("view", "create", "str_replace", "insert")
_OLD_EDITORS = ("text_editor_20241022", "text_editor_20250124")
"""Versions that can take back the last edit, and insert `new_str`."""
_MEMORY = _object(
    ("command",),
    command=_commands(*_EDITOR, "delete", "rename"),
    **_FILE,
    old_path={**_STRING, "description": "For rename: the path of the file."},
    new_path={**_STRING, "description": "For rename: its new path."},
)
_ACTIONS = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click"),
    *("screenshot", "cursor_position"),
)
_LATER_ACTIONS = (*("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click"),)
"""Of versions since 2025."""


def function_of(kind: str, tool: Mapping[str, Any]) -> tuple[str, Schema] | None:
    """Return the description and the schema of a tool that the client runs; None for other types."""
    family, _, version = kind.rpartition("_")
    match family:
        case "bash":
            return "Run a command in a shell that keeps its state between calls.", _BASH
        case "text_editor":
            return _editor(kind, tool)
        case "memory":
            return "Read and write files below /memories, which are kept between conversations.", _MEMORY
        case "computer":
            return _computer(version, tool)
    return None


def _editor(kind: str, tool: Mapping[str, Any]) -> tuple[str, Schema]:
    is_old = kind in _OLD_EDITORS
    fields = {name: schema for name, schema in _FILE.items() if not (is_old and name == "insert_text")}
    most = tool.get("max_characters")
    limit = f" A view shows at most {most} characters." if isinstance(most, int) else ""
    command = _commands(*_EDITOR, *(("undo_edit",) if is_old else ()))
    return f"View, create and edit text files.{limit}", _object(("command", "path"), command=command, **fields)


def _computer(version: str, tool: Mapping[str, Any]) -> tuple[str, Schema]:
    zooms = {"zoom"} if tool.get("enable_zoom") is True else set()
    later = (*_LATER_ACTIONS, *zooms) if version > "20241022" else ()
    size = f"{tool.get('display_width_px')} by {tool.get('display_height_px')} pixels"
    schema = _object(
        ("action",),
        action=_commands(*_ACTIONS, *later),
        coordinate={**_POINT, "description": "Pixels from the left and from the top."},
        text={**_STRING, "description": "For type: the text. For key and hold_key: the keys, such as ctrl+s."},
    )
    if later:
        schema["properties"] |= {
            "start_coordinate": {**_POINT, "description": "For left_click_drag: where it begins."},
            "scroll_direction": _commands("up", "down", "left", "right"),
            "scroll_amount": {**_COUNT, "description": "For scroll: the number of clicks of the wheel."},
            "duration": {"type": "number", "description": "For hold_key and wait: seconds."},
        }
    if zooms:
        region = {"type": "array", "items": _COUNT, "minItems": 4, "maxItems": 4}
        schema["properties"]["region"] = {**region, "description": "For zoom: left, top, right and bottom."}
    return f"Control a computer with a screen of {size} by mouse and keyboard.", schema
