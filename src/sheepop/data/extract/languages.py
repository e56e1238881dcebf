"""Tells the language of a text file, and whether a program generated it, from its name and first lines."""

from __future__ import annotations

import re
from pathlib import PurePosixPath


def words(text: str) -> frozenset[str]:
    """Returns the set of words of a text."""
    return frozenset(text.split())


def by_word(table: str) -> dict[str, str]:
    """Inverts a table such as ``python: py pyw, go``; returns word -> name, where ``go`` maps to itself."""
    entries = [entry.partition(":") for entry in table.split(",")]
    return {word: name.strip() for name, _, words in entries for word in (words or name).split()}


# Languages and the suffixes of their files. The names are those of most tools and data sets, in lower case.
_SUFFIXES = by_word(
    "ada: adb ads ada, agda, applescript, arduino: ino pde, assembly: asm s nasm, autohotkey: ahk, awk: awk gawk, "
    "batch: bat cmd, bazel: bzl bazel star, bibtex: bib, bison: y yy bison, c: c h idc, c#: cs csx, "
    "c++: cpp cc cxx c++ hpp hh hxx h++ ipp inl tpp tcc, clojure: clj cljs cljc edn, cmake, cobol: cob cbl cpy cobol, "
    "coffeescript: coffee, common lisp: lisp lsp cl asd, coq, crystal: cr, css, cuda: cu cuh, cython: pyx pxd pxi, "
    "d: d di, dart, diff: diff patch, elixir: ex exs, elm, emacs lisp: el, erlang: erl hrl, f#: fs fsi fsx, fish, "
    "forth: fth 4th, fortran: f for ftn f77 f90 f95 f03 f08, gdscript: gd, gettext: po pot, "
    "glsl: glsl vert frag geom comp, go, gradle, graphql: graphql gql, groovy: groovy gvy, "
    "handlebars: hbs handlebars mustache, haskell: hs lhs hsc, haxe: hx, hcl: hcl tf tfvars, hlsl: hlsl fx, idl, "
    "ini: ini cfg conf cnf desktop properties inf editorconfig, java, javascript: js mjs cjs jsx es6, "
    "jinja: j2 jinja jinja2, json: jsonc json5, julia: jl, kotlin: kt kts, lean, less, lex: l lex flex, "
    "linker script: ld lds, llvm: ll llvm, lua, m4: m4 ac, makefile: mk mak make am, matlab: m, meson, metal, mlir, "
    "nim: nim nims, nix, objective-c: mm, ocaml: ml mli mll mly, opencl: clc opencl, pascal: pas dpr lpr, "
    "perl: pl pm t, php: php php3 php4 php5 phtml, postscript: ps eps, powershell: ps1 psm1 psd1, prolog, "
    "protobuf: proto, puppet: pp, purescript: purs, python: py pyw pyi pyt gyp wsgi, qml, r, racket: rkt, "
    "reason: re rei, ruby: rb rake gemspec ru, rust: rs, sas, sass: sass scss, scala: scala sc sbt, "
    "scheme: scm ss sld, shell: sh bash zsh ksh csh tcsh ebuild bats, smalltalk: st, solidity: sol, "
    "sparql: sparql rq, sql: sql ddl psql pgsql, standard ml: sml sig fun, starlark, stylus: styl, svelte, svg, "
    "swift, swig: swg i, systemverilog: sv svh, tcl: tcl tk itcl, "
    "template: erb tmpl tpl mako ejs jsp asp aspx cshtml, tex: sty cls ins, thrift, toml, typescript: ts tsx mts cts, "
    "typst: typ, vala: vala vapi, verilog: v vh, vhdl: vhd vhdl, vim, visual basic: vb vbs bas frm vba, vue, "
    "webassembly: wat wast, "
    "xml: xsd xsl xslt dtd plist xaml csproj vcxproj vbproj props targets resx glade ui qrc storyboard xib, "
    "yaml: yaml yml, yara: yar yara, zig"
)
LANGUAGES = frozenset(_SUFFIXES.values())
"""The names of all languages of code, and of hand-written configuration and markup."""

# Languages and names of files, in lower case.
_NAMES = by_word(
    "bazel: build workspace module.bazel, cmake: cmakelists.txt, dockerfile: dockerfile containerfile, "
    "go: go.mod go.work, groovy: jenkinsfile, "
    "ini: pipfile setup.cfg .editorconfig .npmrc .pylintrc .flake8 .coveragerc entry_points.txt, "
    "javascript: jakefile, makefile: makefile gnumakefile makefile.in makefile.am bsdmakefile makefile.pre.in, "
    "meson: meson.build meson_options.txt, m4: configure.ac configure.in, "
    "python: sconstruct sconscript wscript snakefile, "
    "ruby: rakefile gemfile guardfile podfile vagrantfile fastfile brewfile capfile, "
    "shell: configure .bashrc .bash_profile .profile .zshrc pkgbuild, starlark: tiltfile, "
    "toml: cargo.lock poetry.lock uv.lock, vim: .vimrc, yaml: .clang-format .clang-tidy"
)

# Programs that a first line "#!/usr/bin/env NAME" names, without version numbers.
_INTERPRETERS = by_word(
    "shell: sh bash zsh dash ksh csh tcsh ash bats, javascript: node nodejs bun, "
    "typescript: deno ts-node tsx node-ts, python: python pypy ipython, awk: gawk mawk awk, tcl: tclsh wish expect, "
    "scheme: guile csi, haskell: runhaskell runghc stack, makefile: make gmake, erlang: escript, r: rscript, "
    "powershell: pwsh, common lisp: sbcl, lua: lua luajit, perl, ruby, php, groovy, elixir, julia, swift, racket, "
    "fish, ocaml, scala, clojure, kotlin"
)

# Markup formats of running text, and the suffixes of their files.
_PROSE = by_word(
    "markdown: md markdown mdown mkd mdx qmd rmd, rst: rst rest, latex: tex ltx latex dtx, "
    "text: txt text log org adoc asciidoc asc textile wiki mediawiki creole pod man eml mbox"
)
# First words of file names that mean running text, unless the suffix is known: LICENSE, COPYING.LIB, README-first.
_PROSE_NAMES = words(
    "readme license licence copying copyright notice authors contributors contributing credits changelog changes news "
    "history todo install thanks acknowledgements acknowledgments maintainers bugs faq version manifest metadata "
    "owners unlicense patents record wheel installer requested codeowners py pkg"
)
# Suffixes after the one that counts: setup.py.in, settings.ini.example.
_OUTER_SUFFIXES = (".in", ".example", ".sample", ".dist", ".default", ".orig", ".bak", ".template")

_LOCK_FILES = words(
    "package-lock.json npm-shrinkwrap.json yarn.lock pnpm-lock.yaml bun.lockb bun.lock poetry.lock pipfile.lock "
    "uv.lock pdm.lock conda-lock.yml cargo.lock go.sum composer.lock gemfile.lock podfile.lock mix.lock flake.lock "
    "pubspec.lock packages.lock.json gradle.lockfile package.resolved deno.lock"
)
_GENERATED_NAME = re.compile(
    r"\.(?:min|bundle)\.(?:m?js|css)$|\.(?:js|css)\.map$|_pb2(?:_grpc)?\.pyi?$|\.pb\.(?:go|cc|h|swift)$"
    r"|\.(?:g|freezed)\.dart$|\.designer\.(?:cs|vb)$|\.generated\.[a-z]+$|\.snap$",
    re.IGNORECASE,
)
# Go's rule (https://go.dev/s/generatedcode), the mark @generated, and the usual sentences.
_GENERATED_HEADER = re.compile(
    r"code generated .{0,80}do not edit|(?<![\w@])@generated\b|\bdo not (?:edit|modify)\b"
    r"|\b(?:auto-?|automatically |machine[- ])generated (?:by|from|file|code|with|using)\b"
    r"|\bthis (?:file|code|module) (?:is|was|has been) (?:auto-?|automatically |machine[- ])?generated\b"
    r"|^\W{1,8}generated (?:by|from)\b",
    re.IGNORECASE | re.MULTILINE,
)
_HEADER_LINES = 20
_HEADER_CHARACTERS = 2000

_FIRST_LINE = re.compile(r"#![ \t]*(\S+)(?:[ \t]+([^\r\n]*))?")
_OBJECTIVE_C = re.compile(r"(?m)^[ \t]*(?:@(?:interface|implementation|protocol|import|class|end)\b|#\s*import\b)")
_CPP = re.compile(r"(?m)^[ \t]*(?:template\s*<|class\s+\w+|namespace\b|using\s+\w+|(?:public|private|protected)\s*:)")
_PROLOG = re.compile(r"^[ \t]*:-|^[a-z]\w*\([^\n]*\)\s*:-", re.MULTILINE)
_COQ = re.compile(r"^[ \t]*(?:Require|Theorem|Lemma|Proof|Inductive|Fixpoint|Definition)\b", re.MULTILINE)
_FIRST_WORD = re.compile(r"[-._ ]")
_ANY = re.compile("")
_PERL_OR_PROLOG = ((_PROLOG, "prolog"), (_ANY, "perl"))
# Suffixes that several languages share: the first pattern that matches the text decides.
_SHARED = {
    "h": ((_OBJECTIVE_C, "objective-c"), (_CPP, "c++"), (_ANY, "c")),
    "m": ((_OBJECTIVE_C, "objective-c"), (_ANY, "matlab")),
    "pl": _PERL_OR_PROLOG,
    "t": _PERL_OR_PROLOG,
    "v": ((_COQ, "coq"), (_ANY, "verilog")),
}


def text_type(name: str, beginning: str) -> tuple[str, str] | None:
    """Returns (type, language) of a text file with this name and beginning, or None if neither tells.

    The type is ``code`` with a language, which includes hand-written configuration and markup (``yaml``, ``css``); or
    ``markdown``, ``rst``, ``latex`` or ``text`` without one. The text decides for suffixes that languages share.
    """
    name = name.rpartition("/")[2].lower()
    if name not in _NAMES and name.endswith(_OUTER_SUFFIXES):
        name = name.rpartition(".")[0]
    named = _NAMES.get("dockerfile" if name.startswith("dockerfile.") else name)
    if named:
        return "code", named
    stem, _, last = name.rpartition(".")
    suffix = last if stem else ""
    if suffix in _PROSE:
        return _PROSE[suffix], ""
    if suffix in _SHARED:
        script = script_language(beginning) if _SHARED[suffix] is _PERL_OR_PROLOG else ""
        return "code", script or next(language for pattern, language in _SHARED[suffix] if pattern.search(beginning))
    language = _SUFFIXES.get(suffix) or script_language(beginning)
    if language:
        return "code", language
    return ("text", "") if _FIRST_WORD.split(name, maxsplit=1)[0] in _PROSE_NAMES else None


def script_language(beginning: str) -> str:
    """Returns the language of the interpreter in the ``#!`` line of a text, or an empty string."""
    match = _FIRST_LINE.match(beginning.lstrip("\ufeff"))
    if match is None:
        return ""
    program, arguments = PurePosixPath(match[1]).name, (match[2] or "").split()
    if program == "env":
        word = next((word for word in arguments if not word.startswith("-") and "=" not in word), "")
        program = PurePosixPath(word).name
    return _INTERPRETERS.get(program.lower().rstrip("-.0123456789"), "")


def is_generated_name(name: str) -> bool:
    """Returns whether programs write files of this name."""
    return name.lower() in _LOCK_FILES or _GENERATED_NAME.search(name) is not None


def is_generated_text(beginning: str) -> bool:
    """Returns whether the first lines of source code say that a program wrote it."""
    header = "\n".join(beginning[:_HEADER_CHARACTERS].splitlines()[:_HEADER_LINES])
    return _GENERATED_HEADER.search(header) is not None
