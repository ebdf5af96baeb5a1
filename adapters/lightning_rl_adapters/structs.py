"""msgspec's structs made ready for threads."""

from collections.abc import Mapping
from typing import Any

import msgspec


def read_hints(names: Mapping[str, Any]) -> None:
    """Have msgspec read the annotations of the structs among a module's `names`, at the end of that module.

    msgspec (0.22) reads them when a type is first decoded into. A second thread that decodes into the type meanwhile
    crashes the process; while a module is imported no other thread has its types.
    """
    for struct in list(names.values()):
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct):
            msgspec.msgpack.Decoder(struct)
