from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from sheepop.data.extract.git import guess_license

SYSTEM = Path("/usr/share/common-licenses")


@pytest.mark.skipif(not SYSTEM.is_dir(), reason="the licence texts that Debian installs are not here")
@pytest.mark.parametrize(
    ("name", "identifier"),
    [
        ("Apache-2.0", "Apache-2.0"),
        ("BSD", "BSD-3-Clause"),
        ("CC0-1.0", "CC0-1.0"),
        ("GPL-2", "GPL-2.0"),
        ("GPL-3", "GPL-3.0"),
        ("LGPL-2", "LGPL-2.0"),
        ("LGPL-2.1", "LGPL-2.1"),
        ("LGPL-3", "LGPL-3.0"),
        ("MPL-1.1", "MPL-1.1"),
        ("MPL-2.0", "MPL-2.0"),
        ("GFDL-1.3", ""),
        ("Artistic", ""),
    ],
)
def test_the_licences_of_the_system_are_told_apart(name: str, identifier: str):
    assert guess_license((SYSTEM / name).read_text(encoding="utf-8", errors="replace")) == identifier


KNOWN = {"MIT", "Apache-2.0", "BSD-3-Clause", "BSD-2-Clause", "MPL-2.0", "ISC", "PSF-2.0", "Unlicense"}


def licensed() -> dict[str, tuple[str, str]]:
    """Installed packages that declare one licence and ship one licence file: the declaration and the text."""
    found = {}
    for package in metadata.distributions():
        name, declared = package.metadata["Name"], package.metadata.get("License-Expression")
        if declared in KNOWN:
            files = [file for file in package.files or () if "dist-info" in str(file) and "LICEN" in file.name.upper()]
            if len(files) == 1:
                found[name] = (declared, files[0].read_text())
    return found


def test_the_licence_that_packages_declare_is_the_one_that_is_found():
    packages = licensed()
    wrong = {
        name: (declared, guess_license(text))
        for name, (declared, text) in sorted(packages.items())
        # The one package's file holds two licences, and the declaration names the second.
        if guess_license(text) != declared and name != "python-dateutil"
    }
    assert len(packages) >= 10
    assert wrong == {}


@pytest.mark.parametrize(
    ("text", "identifier"),
    [
        (
            "Permission is hereby granted, free of charge, to any person obtaining a copy of this software. The above "
            "copyright notice and this permission notice shall be included in all copies.",
            "MIT",
        ),
        ("Permission is hereby granted, free of charge, to any person obtaining a copy of this software.", "MIT-0"),
        (
            "Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee is "
            "hereby granted",
            "ISC",
        ),
        ("This is free and unencumbered software released into the public\n   domain.", "Unlicense"),
        ("GNU AFFERO GENERAL PUBLIC LICENSE\nVersion 3, 19 November 2007 ... GNU General Public License", "AGPL-3.0"),
        ("Boost Software License - Version 1.0 - August 17th, 2003", "BSL-1.0"),
        ("Attribution-ShareAlike 4.0 International", "CC-BY-SA-4.0"),
        ("All rights reserved.", ""),
        ("", ""),
    ],
)
def test_phrases_name_the_licence(text: str, identifier: str):
    assert guess_license(text) == identifier
