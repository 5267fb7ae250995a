"""Files that may come from strangers: sizes before memory is taken, one message for what is wrong.

What a file declares of itself is compared with its size before anything is allocated. Whatever is
broken in it, its reader raises one InputError that names it.
"""

import json
import math
import re
import reprlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.lib import format as npy
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from indpriv._facts import damaged, refused
from indpriv._folders import refuse_links
from indpriv.errors import EvidenceError, InputError

Schema = type[BaseModel]
Model = TypeVar("Model", bound=BaseModel)
Whole = Annotated[int, Field(strict=True, ge=0, le=1 << 53)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
AtLeastZero = Annotated[Number, Field(ge=0)]
Text = Annotated[str, Field(strict=True)]
YesNo = Annotated[bool, Field(strict=True)]

# Memory that a file may ask for: at least so many bytes, and then so many times its size.
_ROOM, _TIMES = 1 << 27, 16
_DEEPEST, _DIGITS = 64, 300  # of JSON
_OBJECT = re.compile(r"(valid )?dictionary( or (an )?instance of \w+)?")  # as pydantic calls it
_LONGEST = 300  # characters of another library's message

# What libraries raise at broken content, besides their own InputError.
_BROKEN = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError),
    *(MemoryError, EOFError, OSError, zipfile.BadZipFile, zlib.error, pa.ArrowException),
)


@contextmanager
def named(
    path: Path | str,
    remedy: str = "restore it or write it again",
    broken: tuple[type[Exception], ...] = _BROKEN,
) -> Iterator[None]:
    """Whatever is wrong with a file becomes one InputError that names it; broken: errors meant."""
    try:
        yield
    except InputError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except broken as error:
        if isinstance(error, FileNotFoundError):
            raise InputError(f"{path} does not exist") from error
        reason = " ".join(str(error).split())[:_LONGEST] or "not as indpriv writes it"
        said = {"path": path, "kind": type(error).__name__, "reason": reason, "remedy": remedy}
        raise damaged("refusal.storage", "damaged", **said) from error


def check_size(path: Path, needed: int, size: int, remedy: str = "write it again") -> None:
    """Raise InputError if a file of `size` bytes would need too many bytes of memory."""
    if needed > max(_ROOM, _TIMES * size):
        said = {"path": path, "size": size, "needed": needed, "times": _TIMES, "remedy": remedy}
        raise refused("refusal.storage", "unpacks", **said)


def table(keys: Mapping[Any, str]) -> Schema:
    """The schema of a JSON object: type -> its keys; one that ends in "?" may be absent or null."""
    fields: dict[str, Any] = {
        key.removesuffix("?"): (kind | None, None) if key.endswith("?") else (kind, ...)
        for kind, names in keys.items()
        for key in names.split()
    }
    return create_model("Table", __config__=ConfigDict(extra="allow"), **fields)


def check(
    kind: type[Model],
    content: object,
    where: str,
    remedy: str = "restore the file or make it again",
) -> Model:
    """JSON values as a schema has them; EvidenceError names the first that is wrong."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise EvidenceError(first_wrong(error, where, remedy)) from error


def first_wrong(error: ValidationError, where: str, remedy: str) -> str:
    """What to say of the first value in a document that pydantic refused: key, value, remedy."""
    wrong = error.errors(include_url=False)[0]
    place = ".".join(map(str, wrong["loc"])) or "the content"
    if wrong["type"] == "missing":
        return f"{where} lacks {place}; {remedy}"
    expected = wrong["msg"].lower().removeprefix("value error, ")
    expected = _OBJECT.sub("JSON object", expected).replace("input should", "it should")
    return f"{where}: {place}={reprlib.repr(wrong['input'])} is not right: {expected}; {remedy}"


def parse_json(content: bytes) -> Any:
    """JSON values of UTF-8: finite numbers of sensible length, no deep nesting; else ValueError."""
    try:
        value = _DECODER.decode(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if content.count(b"[") + content.count(b"{") > _DEEPEST:
        _check_depth(value, _DEEPEST)
    return value


def _check_depth(value: Any, left: int) -> None:
    if left == 0:
        raise ValueError("it is nested too deeply")
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            _check_depth(part, left - 1)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    return value


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


_DECODER = json.JSONDecoder(parse_float=_float, parse_int=_int, parse_constant=_float)


def read_npz(path: Path, remedy: str = "write it again, with np.savez") -> dict[str, NDArray[Any]]:
    """All arrays of an npz file of numbers and texts, none unpickled; EvidenceError if broken."""
    refuse_links(path)
    with named(path, remedy):
        with zipfile.ZipFile(path) as archive:
            items = archive.infolist()
            check_size(path, sum(one.file_size for one in items), path.stat().st_size, remedy)
            for one in items:
                with archive.open(one) as file:
                    _check_header(file, one)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}


def _check_header(file: IO[bytes], item: zipfile.ZipInfo) -> None:
    """Raise ValueError unless an array of numbers or texts has the length that its header says."""
    version = npy.read_magic(file)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
    shape, _, dtype = read(file)
    found = item.file_size - file.tell()
    if dtype.hasobject:
        raise ValueError(f"{item.filename} holds Python objects; save it without pickles")
    if math.prod(shape) * dtype.itemsize != found:
        raise ValueError(f"{item.filename} declares {shape} of {dtype} in {found:,} bytes")


class ParquetFile(pq.ParquetFile):  # type: ignore[misc]
    """A Parquet file that is read only as far as memory has room for what it declares."""

    def __init__(self, path: Path, source: Any) -> None:
        """Open it; source: of pyarrow, seekable. InputError where a column occurs twice."""
        super().__init__(source, page_checksum_verification=True)
        self._path, self._source = path, source
        names = self.schema_arrow.names
        if len(set(names)) < len(names):
            raise InputError(f"{path} has a column twice among {', '.join(names[:20])}")
        if nested := [one.name for one in self.schema_arrow if pa.types.is_nested(one.type)]:
            raise InputError(f"{path}: {nested[0]} holds lists or tables, and not one value a row")

    def read(self, columns: Sequence[str] | None = None) -> Any:
        """The whole table, or some columns."""
        return self.read_row_groups(range(self.num_row_groups), columns)

    def read_row_groups(
        self, groups: Sequence[int], columns: Sequence[str] | None = None, **options: Any
    ) -> Any:
        """Row groups as a table; EvidenceError where they need far more memory than the file."""
        # What the end of a file says of its pages is not believed: their own heads are read.
        place = {name: number for number, name in enumerate(self.schema_arrow.names)}
        wanted, doubtful = list(place if columns is None else columns), set[str]()
        size, needed, packed = self._source.size(), 0, 0
        if missing := [name for name in wanted if name not in place]:
            raise EvidenceError(f"{self._path} lacks {', '.join(missing)}; write it again")
        for group in map(self.metadata.row_group, groups):
            for name in wanted:
                chunk = group.column(place[name])
                if (packed := packed + abs(chunk.total_compressed_size)) > size:
                    raise EvidenceError("its columns claim to be longer than the file")
                content, encoded = _pages(self._source, chunk)
                n, texts = max(chunk.num_values, group.num_rows), "BYTE" in chunk.physical_type
                needed += 8 * n + content if texts else max(8 * n, content)
                if texts and encoded & _REPEATING:
                    raise EvidenceError(f"{name} holds texts as differences; write them plainly")
                if texts and encoded & _BY_DICTIONARY and n * content > _ROOM:
                    doubtful.add(name)
                check_size(self._path, needed, size)
        for name in doubtful:
            needed += self._expanded(groups, name, max(_ROOM, _TIMES * size))
        check_size(self._path, needed, size)
        return super().read_row_groups(list(groups), columns=wanted, **options)

    def _expanded(self, groups: Sequence[int], name: str, enough: int) -> int:
        """Bytes of the texts of a column, each as often as it occurs; counting ends at enough."""
        total = 0
        with pq.ParquetFile(self._source, read_dictionary=[name]) as file:
            for batch in file.iter_batches(row_groups=list(groups), columns=[name]):
                found = batch.column(0)
                lengths = pc.binary_length(found.dictionary)
                total += pc.sum(pc.take(lengths, found.indices)).as_py() or 0
                if total > enough:
                    break
        return total


# Encodings of pages: 2 and 8 refer to a dictionary, 7 to the text before.
_BY_DICTIONARY, _REPEATING = {2, 8}, {7}


def _pages(source: Any, chunk: Any) -> tuple[int, set[int]]:
    """Bytes that the pages of a column in a row group unpack to, and their encodings."""
    starts = [chunk.data_page_offset, chunk.dictionary_page_offset]  # 0 or None: has none
    source.seek(min(filter(None, starts), default=0))
    content = source.read(chunk.total_compressed_size)
    total, encodings, at = 0, set[int](), 0
    while at < len(content):
        page, at = _thrift(content, at)
        if min(page[2], page[3]) < 0:
            raise ValueError("a page of less than no bytes")
        total, at = total + page[2], at + page[3]
        encodings |= {page.get(5, {}).get(2), page.get(8, {}).get(4)} - {None}
    return total, encodings


def _thrift(content: bytes, at: int) -> tuple[dict[int, Any], int]:
    """A struct of Thrift's compact protocol, whole numbers and structs only; and its end."""

    def whole() -> int:
        nonlocal at
        value = shift = 0
        while (byte := content[at]) & 128 and shift < 63:
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        at += 1
        return value | byte << shift

    found, number = dict[int, Any](), 0
    while head := content[at]:
        at, kind = at + 1, head & 15
        if head < 16:
            raise ValueError("a page without the short head that all have")
        number += head >> 4
        if kind in (4, 5, 6):
            value = whole()
            found[number] = value >> 1 ^ -(value & 1)
        elif kind == 8:
            length = whole()
            at += length
        elif kind == 12:
            found[number], at = _thrift(content, at)
        elif kind > 2:
            raise ValueError("a page with a head of another kind")
    return found, at + 1


_KINDS = {  # letter -> what a column holds, and its types of pyarrow
    "i": ("whole numbers", r"u?int\d+"),
    "f": ("numbers", "(half)?float|double"),
    "b": ("true or false", "bool"),
    "t": ("texts", "(large_)?string"),
    "n": ("nothing", "null"),
}


def check_columns(path: Path, schema: Any, kinds: Mapping[str, str]) -> None:
    """Raise EvidenceError unless a Parquet file has the columns that it should."""
    # kinds: name, "?" after it if it may be absent -> letters of `_KINDS`, "" for anything.
    for name, letters in kinds.items():
        column = name.removesuffix("?")
        if column not in schema.names:
            if column == name:
                raise EvidenceError(f"{path} lacks the column {column}; write it again")
            continue
        kind, allowed = schema.field(column).type, [_KINDS[letter] for letter in letters]
        values = str(kind.value_type if pa.types.is_dictionary(kind) else kind)
        if letters and not any(re.fullmatch(types, values) for _, types in allowed):
            said = {"path": path, "column": column, "kind": kind}
            said |= {"words": " or ".join(words for words, _ in allowed)}
            raise damaged("refusal.storage", "column", **said)
