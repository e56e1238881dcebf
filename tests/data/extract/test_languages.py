from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pygments.lexers import get_all_lexers

from sheepop.data.extract.languages import is_generated_name, is_generated_text, script_language, text_type

# Where pygments has another name for the language, or counts a dialect as one of its own.
SYNONYMS = {
    "assembly": {"nasm", "gas"},
    "clojure": {"clojurescript"},
    "cobol": {"cobolfree"},
    "common lisp": {"newlisp"},
    "emacs lisp": {"emacs-lisp"},
    "fortran": {"fortranfixed"},
    "gettext": {"gettext catalog"},
    "gradle": {"groovy"},
    "handlebars": {"html+handlebars"},
    "haskell": {"literate haskell"},
    "idl": {"omg-idl"},
    "ini": {"desktop", "properties"},
    "javascript": {"jsx"},
    "json": {"json5"},
    "latex": {"tex"},
    "objective-c": {"objective-c++"},
    "php": {"html+php"},
    "rst": {"restructuredtext"},
    "sass": {"scss"},
    "shell": {"tcsh"},
    "svg": {"xml"},
    "template": {"cheetah", "smarty", "jsp", "aspx-cs", "erb", "mako"},
    "typescript": {"tsx"},
    "visual basic": {"vb.net", "vbscript", "basic"},
    "xml": {"dtd"},
}
# Suffixes that pygments gives to something rarer.
RARE = {".sc", ".cls"}


def patterns_of_pygments() -> dict[str, set[str]]:
    patterns: dict[str, set[str]] = {}
    for name, aliases, globs, _ in get_all_lexers():
        for glob in globs:
            patterns.setdefault(glob.lower(), set()).update({name.lower(), *aliases})
    return patterns


def test_languages_of_suffixes_agree_with_pygments():
    checked = set()
    for glob, names in sorted(patterns_of_pygments().items()):
        suffix = glob.removeprefix("*")
        if not (glob.startswith("*.") and suffix[1:].isalnum()) or suffix in RARE:
            continue
        known = text_type(f"file{suffix}", "")
        if known is None or known == ("text", ""):
            continue
        language = known[1] or known[0]
        assert names & {language, *SYNONYMS.get(language, ())}, (suffix, language, sorted(names))
        checked.add(language)
    assert len(checked) >= 80


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Makefile", ("code", "makefile")),
        ("GNUmakefile", ("code", "makefile")),
        ("Dockerfile", ("code", "dockerfile")),
        ("Dockerfile.gpu", ("code", "dockerfile")),
        ("CMakeLists.txt", ("code", "cmake")),
        ("src/CMakeLists.txt", ("code", "cmake")),
        ("Jenkinsfile", ("code", "groovy")),
        ("Rakefile", ("code", "ruby")),
        ("go.mod", ("code", "go")),
        ("setup.cfg", ("code", "ini")),
        ("settings.YAML", ("code", "yaml")),
        ("main.PY", ("code", "python")),
        ("setup.py.in", ("code", "python")),
        ("config.ini.example", ("code", "ini")),
        ("Makefile.in", ("code", "makefile")),
        ("README", ("text", "")),
        ("README.md", ("markdown", "")),
        ("readme.rst", ("rst", "")),
        ("paper.tex", ("latex", "")),
        ("paper.cls", ("code", "tex")),
        ("notes.org", ("text", "")),
        ("manual.adoc", ("text", "")),
        ("server.log", ("text", "")),
        ("LICENSE", ("text", "")),
        ("LICENSE-MIT", ("text", "")),
        ("COPYING.LESSER", ("text", "")),
        ("LICENSE.txt", ("text", "")),
        ("license.py", ("code", "python")),
        ("data", None),
        ("", None),
        (".in", None),
        ("a.xyz", None),
    ],
)
def test_names_and_suffixes_name_the_type(name: str, expected: tuple[str, str] | None):
    assert text_type(name, "") == expected


@pytest.mark.parametrize(
    ("name", "beginning", "language"),
    [
        ("a.h", "#ifndef A_H\nint f(void);\n", "c"),
        ("a.h", "#pragma once\nnamespace a {\n", "c++"),
        ("a.h", "template <typename T>\nT f();\n", "c++"),
        ("a.h", "#import <Foundation/Foundation.h>\n@interface A\n", "objective-c"),
        ("a.m", "function y = f(x)\n% doubles\ny = 2 * x;\n", "matlab"),
        ("a.m", "#import <Foundation/Foundation.h>\n", "objective-c"),
        ("a.pl", "use strict;\nmy $x = 1;\n", "perl"),
        ("a.pl", ":- module(lists, []).\n", "prolog"),
        ("a.pl", "parent(X, Y) :- father(X, Y).\n", "prolog"),
        ("a.v", "module adder(input a);\nendmodule\n", "verilog"),
        ("a.v", "Theorem plus_comm : forall n m, n + m = m + n.\n", "coq"),
    ],
)
def test_a_suffix_that_languages_share_is_settled_by_the_text(name: str, beginning: str, language: str):
    assert text_type(name, beginning) == ("code", language)


@pytest.mark.parametrize(
    ("line", "language"),
    [
        ("#!/bin/sh", "shell"),
        ("#!/bin/bash -e", "shell"),
        ("#! /usr/bin/env python3.11", "python"),
        ("#!/usr/bin/env -S node --no-warnings", "javascript"),
        ("#!/usr/bin/env -S LANG=C perl -w", "perl"),
        ("#!/usr/bin/python", "python"),
        ("#!/usr/bin/Rscript", "r"),
        ("\ufeff#!/usr/bin/env ruby", "ruby"),
        ("#!/opt/unknown/thing", ""),
        ("#!", ""),
        ("#!/usr/bin/env", ""),
        ("# not one", ""),
        ("", ""),
    ],
)
def test_the_first_line_of_a_script_names_its_language(line: str, language: str):
    assert script_language(f"{line}\necho\n") == language
    assert text_type("tool", f"{line}\necho\n") == (("code", language) if language else None)


def test_a_script_is_no_prose_whatever_it_is_called():
    assert text_type("install", "#!/bin/sh\n") == ("code", "shell")
    assert text_type("install", "Unpack it, then\n") == ("text", "")


@given(st.text(max_size=30), st.text(max_size=200))
def test_any_name_and_text_is_taken(name: str, beginning: str):
    known = text_type(name, beginning)
    assert known is None or known[0] in {"code", "text", "markdown", "rst", "latex"}


@pytest.mark.parametrize(
    "name",
    [
        *("jquery.min.js", "style.min.css", "app.bundle.js", "app.js.map", "package-lock.json", "Cargo.lock", "go.sum"),
        *("a_pb2.py", "a_pb2_grpc.py", "a_pb2.pyi", "a.pb.go", "a.g.dart", "Form.Designer.cs", "a.generated.ts"),
    ],
)
def test_names_of_files_that_programs_write(name: str):
    assert is_generated_name(name)


@pytest.mark.parametrize("name", ["main.js", "min.js", "lock.py", "package.json", "pb2.py", "design.cs", "map.js"])
def test_names_of_files_that_people_write(name: str):
    assert not is_generated_name(name)


@pytest.mark.parametrize(
    "header",
    [
        "// Code generated by protoc-gen-go. DO NOT EDIT.\npackage a\n",
        "# Generated by the protocol buffer compiler.  DO NOT EDIT!\n",
        "/**\n * @generated SignedSource<<abc>>\n */\n",
        "# This file is automatically generated by setup.py\n",
        "/* This file was autogenerated by cython */\n",
        "# auto-generated file\n",
        "/* Generated by Cython 3.0.10 */\n",
        "# -*- coding: utf-8 -*-\n# Generated by Django 4.2 on 2024-01-01\n",
        "\n" * 5 + "<!-- Do not edit: it is made from a.md -->\n",
    ],
)
def test_headers_of_files_that_programs_write(header: str):
    assert is_generated_text(header + "x = 1\n" * 10)


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    # the values are generated by a loop\n    return 1\n",
        '"""Tools for code generation."""\n',
        "import os\n" * 30 + "# DO NOT EDIT\n",
        "me@generated.example\n",
        "",
    ],
)
def test_text_that_people_write(text: str):
    assert not is_generated_text(text)


def test_almost_all_of_the_standard_library_was_written_by_people():
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.glob("*.py")) + sorted((root / "asyncio").glob("*.py"))
    generated = [path.name for path in paths if is_generated_text(path.read_text(encoding="utf-8", errors="replace"))]
    assert len(paths) > 150
    # These were: they say so themselves.
    others = [name for name in generated if not name.startswith("_sysconfigdata")]
    assert set(others) <= {"_opcode_metadata.py", "keyword.py", "token.py", "stringprep.py"}
