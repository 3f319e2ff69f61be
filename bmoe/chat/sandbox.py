"""Templates from strangers, bounded.

Jinja's sandbox keeps a template from reaching the program; it keeps it neither from never ending nor from
filling the memory. Here every operation whose cost the template's own length does not bound is charged to the
meter of the render: each iteration, call, filter and operator, and the weight of every value that is built.
Operations that amplify (`*`, `**`, `replace`, `join`, `indent`, padding) are computed beforehand. Filters and
methods are those on the lists below, which published templates use; the rest of jinja's is refused.

Owns the environment. Knows no chat, no messages and no model.
"""

from __future__ import annotations

import json
import re
from functools import wraps
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import TYPE_CHECKING, Any

from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from bmoe.chat.meter import CHARS_PER_UNIT, CURRENT, TooMuch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from jinja2.parser import Parser
    from jinja2.runtime import Context

_FILTERS = """
    abs capitalize count d default dictsort e escape first float format groupby indent int items join last
    length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string
    sum title trim truncate unique upper urlencode wordcount
""".split()  # noqa: SIM905 (forty words read better without quotes)
# These look at the top of a value only; templates ask a conversation's length at each of its messages.
_SHALLOW_FILTERS = frozenset({"count", "d", "default", "first", "last", "length"})
_STR_METHODS = frozenset(
    """
    capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit islower
    isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind
    rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
    """.split()  # noqa: SIM905 (as above)
)
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STR_METHODS),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, frozenset({"copy", "count", "index"})),
    (tuple, frozenset({"count", "index"})),
    (int, frozenset()),
    (float, frozenset({"is_integer"})),
    (range, frozenset()),
)
# Where formatting pads to a number of four digits, or to one taken from elsewhere.
_PADDING = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{4})|\{[^{}]*:[^{}]*(?:\{|\d{4})")
_ARGUMENT_LIMIT = 4096
# A macro's call takes about as long as this many iterations of an empty loop.
_CALL_UNITS = 8


class GenerationTag(Extension):
    """`{% generation %}` marks what a trainer learns from; for a prompt it is nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body stands for the whole."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(ImmutableSandboxedEnvironment):
    """Jinja as published templates expect it, every costly operation metered.

    `bmoe.chat.meter.CURRENT` must hold a meter while it compiles (constants are folded then) and renders.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            extensions=[GenerationTag, LoopControlExtension],
            finalize=_finalize,
        )
        self.globals = {
            name: self.globals[name] for name in ("range", "dict", "cycler", "joiner", "namespace")
        }
        self.filters = {name: _metered_filter(name, self.filters[name]) for name in _FILTERS}
        self.filters["tojson"] = tojson
        tests: dict[str, Any] = self.tests
        self.tests = {name: _metered_test(test) for name, test in tests.items()}

    def bounded(self, source: str) -> nodes.Template:
        """The syntax tree of a source, with the meter built in."""
        tree: nodes.Template = _Metering().visit(self.parse(source))
        tree.set_environment(self)
        return tree

    # What the tree calls; no template can spell these names.

    def iterated(self, iterable: Iterable[object], data_chars: int) -> Iterator[object]:
        """The items of a loop whose body writes that much text of the template's own."""
        meter = CURRENT.get()
        for item in iterable:
            meter.charge(1)
            meter.emit(data_chars)
            yield item

    def weighed(self, value: object) -> object:
        """The value, paid for."""
        CURRENT.get().weigh(value)
        return value

    def concatenated(self, *values: object) -> str:
        """The operator `~`."""
        meter = CURRENT.get()
        for value in values:
            meter.weigh(value)
        texts = [str(value) for value in values]
        meter.check_chars(sum(map(len, texts)))
        return "".join(texts)

    # What jinja's sandbox calls.

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Of the plain types only the methods on the list."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        return next((attr in methods for kind, methods in _METHODS if isinstance(obj, kind)), True)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        """`str.format` without padding to any width."""
        formatting = super().wrap_str_format(value)
        if formatting is None:
            return None
        pattern = str(getattr(value, "__self__", ""))

        def bounded(*args: object, **kwargs: object) -> str:
            _check_padding(pattern)
            # Each field may show all of the arguments.
            for _ in range(1 + pattern.count("{")):
                CURRENT.get().weigh((args, kwargs))
            return formatting(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator, its operands and its result paid for."""
        meter = CURRENT.get()
        meter.weigh(left)
        meter.weigh(right)
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    meter.check_chars(len(many) * times)
                    meter.charge(len(many) * max(times, 0) // CHARS_PER_UNIT)
        elif operator == "%" and isinstance(left, str):
            _check_padding(left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int) and right > 0:
            meter.check_chars(left.bit_length() * right * CHARS_PER_UNIT)
        result = super().call_binop(context, operator, left, right)
        meter.weigh(result)
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063 (jinja's signature: any keyword may be a macro's)
        """A call, its arguments and its result paid for."""
        self, context, function = __self, __context, __obj
        owner = getattr(function, "__self__", None) if isinstance(function, MethodType) else None
        if owner is self:
            return function(*args)
        meter = CURRENT.get()
        meter.charge(_CALL_UNITS + len(args) + len(kwargs))
        if isinstance(function, LoopContext):
            # A recursive loop: the tree meters only its first level.
            args = (self.iterated(args[0], 0), *args[1:]) if args else args
        elif not isinstance(function, Macro | BlockReference):
            # Jinja hands local variables along under these two names.
            meter.weigh(args)
            meter.weigh({key: kwargs[key] for key in kwargs if key not in {"_loop_vars", "_block_vars"}})
            if isinstance(function, BuiltinMethodType) and isinstance(function.__self__, str):
                _check_method(function.__self__, function.__name__, args)
        result = super().call(context, function, *args, **kwargs)
        meter.weigh(result)
        return result


class _Metering(NodeTransformer):
    """Puts the meter where jinja's sandbox has no hook of its own."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """Children first; then the node itself, if it is one that costs."""
        super().generic_visit(node, *args, **kwargs)
        match node:
            case nodes.For():
                chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
                node.iter = _call("iterated", [node.iter, nodes.Const(chars)], node)
            case nodes.Concat():
                return _call("concatenated", node.nodes, node)
            case nodes.Compare():
                node.expr = _call("weighed", [node.expr], node)
                for operand in node.ops:
                    operand.expr = _call("weighed", [operand.expr], node)
            case nodes.Getitem(arg=nodes.Slice()) | nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load"):
                return _call("weighed", [node], node)
        return node


def _call(name: str, args: Sequence[nodes.Node], at: nodes.Node) -> nodes.Call:
    attribute = nodes.EnvironmentAttribute(name, lineno=at.lineno)
    return nodes.Call(attribute, list(args), [], None, None, lineno=at.lineno)


@pass_context  # which also keeps jinja from calling it while it compiles
def _finalize(_context: Context, value: object) -> object:
    """What `{{ }}` writes."""
    meter = CURRENT.get()
    meter.weigh(value)
    text = str(value)
    meter.emit(len(text))
    return text


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for its arguments and its result, and gives lists for generators."""
    passes = hasattr(function, "jinja_pass_arg")

    @wraps(function)
    def shallow(*args: Any, **kwargs: Any) -> Any:
        CURRENT.get().charge(1)
        return function(*args, **kwargs)

    @wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = CURRENT.get()
        values = args[1:] if passes else args
        meter.weigh((values, kwargs))
        _check_filter(name, values, kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, GeneratorType | map | filter | reversed):
            items = []
            for item in result:
                meter.charge(1)
                items.append(item)
            result = items
        meter.weigh(result)
        return result

    return shallow if name in _SHALLOW_FILTERS else metered


def _metered_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test that pays for what it compares; most look at one type or flag and are called with one value."""
    passes = hasattr(function, "jinja_pass_arg")

    @wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        values = args[1:] if passes else args
        meter = CURRENT.get()
        meter.charge(1)
        if len(values) > 1:
            meter.weigh(values)
        elif values and isinstance(values[0], str):
            meter.weigh(values[0])
        return function(*args, **kwargs)

    return metered


def _check_filter(name: str, values: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse what would be large before it is."""
    options = [*values[1:], *kwargs.values()]
    if name not in {"default", "d", "int", "float"} and any(
        isinstance(option, int) and abs(option) > _ARGUMENT_LIMIT for option in options
    ):
        raise TooMuch(f"gives the filter {name!r} a number that is too large")
    if not values:
        return
    value, texts = values[0], [option for option in options if isinstance(option, str)]
    meter = CURRENT.get()
    match name:
        case "replace":
            _check_method(str(value), "replace", (*values[1:], *kwargs.values()))
        case "trim":
            _check_method(str(value), "strip", texts)
        case "list" if isinstance(value, str):
            meter.charge(len(value))
        case "format":
            _check_padding(str(value))
        case "join" if texts:
            count = len(value) if hasattr(value, "__len__") else meter.text_limit_chars
            meter.check_chars(count * len(texts[0]))
        case "indent":
            widths = [len(text) for text in texts] + [option for option in options if isinstance(option, int)]
            meter.check_chars(str(value).count("\n") * max(widths, default=4))
        case "sum" if any(isinstance(option, str | list | tuple) for option in options[1:]):
            raise TooMuch("adds up texts or lists")


def _check_method(text: str, name: str, args: Sequence[Any]) -> None:
    """Refuse what a method of `str` would make too large or too slow."""
    meter = CURRENT.get()
    meter.weigh(text)
    first = args[0] if args and isinstance(args[0], str) else ""
    match name:
        case "replace":
            new = args[1] if len(args) > 1 and isinstance(args[1], str) else ""
            hits = text.count(first)
            meter.check_chars(len(text) + hits * max(0, len(new) - len(first)))
        case "join":
            meter.check_chars(len(text) * (len(args[0]) if args and hasattr(args[0], "__len__") else 0))
        case "strip" | "lstrip" | "rstrip":
            meter.charge(len(text) * len(first) // CHARS_PER_UNIT)
        case "split" | "rsplit":
            meter.charge(text.count(first) if first else len(text))
        case "splitlines":
            meter.charge(len(text))


def _check_padding(pattern: str) -> None:
    if _PADDING.search(pattern):
        raise TooMuch("pads text to a large or computed width")


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: characters as they are, nothing escaped for HTML."""
    meter = CURRENT.get()
    before_units = meter.units
    meter.weigh(value)
    if indent is not None:
        if not isinstance(indent, int) or abs(indent) > 16:
            raise TooMuch("indents JSON by more than 16 columns")
        # Each value may stand on a line of its own, indented once for each level above it.
        meter.charge((meter.units - before_units) * abs(indent))
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    meter.weigh(text)
    return text


def check_strftime(pattern: object) -> None:
    """Refuse a date format that is none, or that pads.

    Raises:
        TooMuch: It is longer than any date, or contains a width.
    """
    if not isinstance(pattern, str) or len(pattern) > 256 or re.search(r"%[^a-zA-Z%]*\d{2}", pattern):
        raise TooMuch("asks for a date in an odd format")
