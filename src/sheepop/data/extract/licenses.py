"""Which licence a text is, by phrases that only it has."""

from __future__ import annotations

import re

# SPDX identifier, then phrases in lower case that must all be there; where the first of them stands decides between
# licences, since one often mentions another further down. Among equals the first in the table wins.
_PHRASES = (
    ("AGPL-3.0", "gnu affero general public license", "version 3"),
    ("LGPL-3.0", "gnu lesser general public license", "version 3, 29 june 2007"),
    ("LGPL-2.1", "gnu lesser general public license", "version 2.1"),
    ("LGPL-2.0", "gnu library general public license", "version 2"),
    ("GPL-3.0", "gnu general public license", "version 3"),
    ("GPL-2.0", "gnu general public license", "version 2"),
    ("MPL-2.0", "mozilla public license version 2.0"),
    ("MPL-2.0", "mozilla public license, version 2.0"),
    ("MPL-2.0", "mozilla public license, v. 2.0"),
    ("MPL-1.1", "mozilla public license version 1.1"),
    ("Apache-2.0", "apache license", "version 2.0"),
    ("EPL-2.0", "eclipse public license - v 2.0"),
    ("BSL-1.0", "boost software license - version 1.0"),
    ("CC0-1.0", "cc0 1.0 universal"),
    ("CC-BY-SA-4.0", "attribution-sharealike 4.0 international"),
    ("CC-BY-4.0", "attribution 4.0 international"),
    ("Unlicense", "this is free and unencumbered software released into the public domain"),
    ("PSF-2.0", "python software foundation license version 2"),
    ("BSD-4-Clause", "redistribution and use in source and binary forms", "all advertising materials"),
    ("BSD-3-Clause", "redistribution and use in source and binary forms", "endorse or promote products"),
    ("BSD-2-Clause", "redistribution and use in source and binary forms", "in binary form must reproduce"),
    (
        "MIT",
        "permission is hereby granted, free of charge, to any person obtaining a copy",
        "this permission notice shall be included",
    ),
    ("MIT-0", "permission is hereby granted, free of charge, to any person obtaining a copy"),
    ("ISC", "permission to use, copy, modify, and/or distribute this software for any purpose"),
    ("ISC", "permission to use, copy, modify, and distribute this software for any purpose"),
    ("Zlib", "this software is provided 'as-is', without any express or implied", "altered source versions"),
)
_SPACE = re.compile(r"\s+")
_MOST_CHARACTERS = 200_000


def guess_license(text: str) -> str:
    """The SPDX identifier of the licence that `text` is or begins with, empty when it is none of the known."""
    plain = _SPACE.sub(" ", text[:_MOST_CHARACTERS]).lower().replace("\u2019", "'").replace("``as is''", "'as is'")
    best, position = "", len(plain)
    for identifier, first, *others in _PHRASES:
        found = plain.find(first)
        if 0 <= found < position and all(phrase in plain for phrase in others):
            best, position = identifier, found
    return best
