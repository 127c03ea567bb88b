"""Tools of a chat request and which of them are to be called. Owns the fields, the deprecated ones among them."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from headrace.core.errors import InvalidInput
from headrace.gateway.schemas.bounds import MAX_DEPTH, MAX_TOOLS, ToolName, check_depth
from headrace.serving.ask import NO_ARGUMENTS, TOOL_CHOICES


class FunctionDefinition(Struct, frozen=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Struct, frozen=True, tag_field="type", tag="function"):
    function: FunctionDefinition


class CustomTool(Struct, frozen=True, tag_field="type", tag="custom"):
    custom: Any = None


class FunctionName(Struct, frozen=True):
    name: ToolName


class NamedChoice(Struct, frozen=True, tag_field="type", tag="function"):
    function: FunctionName


class NamedCustom(Struct, frozen=True, tag_field="type", tag="custom"):
    custom: Any = None


class AllowedTool(Struct, frozen=True):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


Tools = Annotated[list[FunctionTool | CustomTool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice | NamedCustom | AllowedChoice
Functions = Annotated[list[FunctionDefinition], Meta(max_length=MAX_TOOLS)]
FunctionChoice = Literal["none", "auto"] | FunctionName


class ToolRules(Struct, frozen=True):
    """`tools` as templates read them; `choice` is auto, none, required or a tool's name."""

    tools: list[dict[str, Any]] = []
    choice: str = "auto"
    is_parallel: bool = True


def tool_rules(tools: Tools | None, choice: ToolChoice | None, *, is_parallel: bool) -> ToolRules:
    if tools is None and choice is None:
        return ToolRules(is_parallel=is_parallel)
    definitions: list[FunctionDefinition] = []
    for place, tool in enumerate(tools or ()):
        if isinstance(tool, CustomTool):
            raise InvalidInput(f"tools[{place}].type must be function", param=f"tools[{place}].type")
        definitions.append(tool.function)
    _check_definitions(definitions, "tools[{}].function")
    wanted = "auto"
    match choice:
        case NamedCustom():
            raise InvalidInput("tool_choice.type must be function or allowed_tools", param="tool_choice.type")
        case NamedChoice():
            wanted = choice.function.name
        case AllowedChoice():
            names = [tool.function.name for tool in choice.allowed_tools.tools]
            _check_known(names, definitions, "tool_choice.allowed_tools.tools")
            definitions = [definition for definition in definitions if definition.name in names]
            wanted = choice.allowed_tools.mode
        case str():
            wanted = choice
    return _rules(definitions, wanted, is_parallel=is_parallel, field="tool_choice")


def function_rules(functions: Functions | None, choice: FunctionChoice | None) -> ToolRules:
    """The deprecated fields: one call at most."""
    definitions = list(functions or ())
    _check_definitions(definitions, "functions[{}]")
    wanted = choice.name if isinstance(choice, FunctionName) else choice or "auto"
    return _rules(definitions, wanted, is_parallel=False, field="function_call")


def _rules(definitions: list[FunctionDefinition], wanted: str, *, is_parallel: bool, field: str) -> ToolRules:
    if wanted == "required" and not definitions:
        raise InvalidInput(f"{field} needs tools to choose from", param=field)
    if wanted not in TOOL_CHOICES:
        _check_known([wanted], definitions, field)
    return ToolRules([_rendered(definition) for definition in definitions], wanted, is_parallel)


def _check_known(names: list[str], definitions: list[FunctionDefinition], param: str) -> None:
    known = {definition.name for definition in definitions}
    if not known.issuperset(names):
        raise InvalidInput(f"{param} names a tool that is not among the tools", param=param)


def _check_definitions(definitions: list[FunctionDefinition], where: str) -> None:
    seen: set[str] = set()
    for place, definition in enumerate(definitions):
        param = where.format(place)
        if definition.name in seen or definition.name in TOOL_CHOICES:
            raise InvalidInput(
                f"{param}.name must be its own: neither another's nor {', '.join(TOOL_CHOICES)}", param=f"{param}.name"
            )
        seen.add(definition.name)
        if definition.parameters is not None:
            check_depth(definition.parameters, MAX_DEPTH, f"{param}.parameters")


def _rendered(definition: FunctionDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": definition.name}
    if definition.description is not None:
        function["description"] = definition.description
    function["parameters"] = definition.parameters or NO_ARGUMENTS
    if definition.strict is not None:
        function["strict"] = definition.strict
    return {"type": "function", "function": function}
