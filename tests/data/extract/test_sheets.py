from __future__ import annotations

import datetime
import io
import zipfile
from collections.abc import Callable, Iterator

from openpyxl.workbook import Workbook

from sheepop.data.extract.interface import Extracted, Refused
from sheepop.data.extract.sheets import _tables

ReadAs = Callable[..., list[Extracted | Refused]]

MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"


def saved(workbook: Workbook) -> bytes:
    buffer = io.BytesIO()
    workbook.save(buffer)
    return buffer.getvalue()


def sample() -> Workbook:
    workbook = Workbook()
    sheet = workbook.active
    sheet.title = "Sheep"
    sheet.append(["name", "born", "weight", "ram", "note"])
    sheet.append(["Dolly|1", datetime.datetime(1996, 7, 5), 45.5, False, "first\nclone"])
    sheet.append(["Molly", datetime.datetime(1997, 7, 9, 6, 30), 10**15, True, None])
    sheet.append([None, datetime.time(6, 30), 0.1 + 0.2, None, "  spaced  out "])
    sheet["H9"] = "far"
    workbook.create_sheet("Empty")
    return workbook


SAMPLE = """# Sheep

| name | born | weight | ram | note |  |
| --- | --- | --- | --- | --- | --- |
| Dolly\\|1 | 1996-07-05 | 45.5 | FALSE | first clone |  |
| Molly | 1997-07-09 06:30:00 | 1000000000000000 | TRUE |  |  |
|  | 06:30:00 | 0.3 |  | spaced out |  |
|  |  |  |  |  | far |"""


def by_hand(sheet: str, strings: str = "", state: str = "visible") -> bytes:
    """The smallest package that Excel opens, written without any library."""
    package = "http://schemas.openxmlformats.org/package/2006"
    kinds = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    files = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{kinds}.sheet.main+xml"/>'
        f'<Override PartName="/xl/worksheets/one.xml" ContentType="{kinds}.worksheet+xml"/>'
        f'<Override PartName="/xl/strings.xml" ContentType="{kinds}.sharedStrings+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1"'
        f' Type="{office}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{MAIN}" xmlns:r="{office}"><sheets><sheet name="One &amp; only"'
        f' sheetId="1" state="{state}" r:id="r1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1"'
        f' Type="{office}/worksheet" Target="worksheets/one.xml"/></Relationships>',
        "xl/worksheets/one.xml": f'<worksheet xmlns="{MAIN}">{sheet}</worksheet>',
        "xl/strings.xml": f'<sst xmlns="{MAIN}">{strings}</sst>',
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in files.items():
            file.writestr(name, text)
    return buffer.getvalue()


def tables(items: list[Extracted | Refused]) -> list[Extracted]:
    found = [item for item in items if isinstance(item, Extracted)]
    assert len(found) == len(items), items
    assert all(item.kind == "table" for item in found)
    return found


def test_a_workbook_of_openpyxl_becomes_one_table_for_each_sheet_with_anything_in_it(read_as: ReadAs) -> None:
    (item,) = tables(read_as("xlsx", saved(sample())))
    assert item.text == SAMPLE
    assert (item.place, item.marks, dict(item.metadata)) == ("sheet Sheep", ((0, "sheet Sheep"),), {})


def test_a_workbook_written_by_hand_is_read(read_as: ReadAs) -> None:
    strings = "<si><t>a</t></si><si><r><t>ri</t></r><r><t>ch</t></r></si>"
    sheet = (
        '<dimension ref="A1:XFD1048576"/><sheetData><row r="2"><c r="B2" t="s"><v>0</v></c>'
        '<c r="D2" t="inlineStr"><is><t>inline</t></is></c></row>'
        '<row r="5"><c r="B5" t="s"><v>1</v></c><c r="D5"><f>1+1</f><v>2</v></c></row>'
        '<row r="6"><c r="B6" t="e"><v>#DIV/0!</v></c><c r="D6" t="b"><v>1</v></c></row></sheetData>'
    )
    (item,) = tables(read_as("xlsx", by_hand(sheet, strings, "veryHidden")))
    assert item.text == "# One & only\n\n| a | inline |\n| --- | --- |\n| rich | 2 |\n| #DIV/0! | TRUE |"
    assert (item.place, item.metadata["hidden"]) == ("sheet One & only", "yes")


def test_formulas_that_nobody_computed_are_counted(read_as: ReadAs) -> None:
    workbook = Workbook()
    workbook.active.append(["a", "=1+1", "=SUM(A1:B1)"])
    (item,) = tables(read_as("xlsx", saved(workbook)))
    assert item.text == "# Sheet\n\n| a |\n| --- |"
    assert item.metadata["formulas_without_value"] == "2"
    shared = '<row r="1"><c r="A1"><f t="shared" si="0"/></c><c r="B1"><f>1</f><v>1</v></c><c r="C1"><f>1</f><v/></c>'
    filler = f'<row r="2"><c t="inlineStr"><is><t>{"x" * 2**20}</t></is></c></row>'
    (item,) = tables(read_as("xlsx", by_hand(f"<sheetData>{shared}</row>{filler}</sheetData>")))
    assert item.metadata["formulas_without_value"] == "2"


def test_what_lies_between_cells_far_apart_is_left_out(read_as: ReadAs) -> None:
    workbook = Workbook()
    workbook.active["A1"], workbook.active["XFD200000"] = "near", "far"
    (item,) = tables(read_as("xlsx", saved(workbook)))
    assert item.text == "# Sheet\n\n| near |  |\n| --- | --- |\n|  | far |"


def test_a_long_sheet_comes_in_parts_with_the_header(read_as: ReadAs) -> None:
    workbook = Workbook()
    rows = [["number", "text"], *([number, f"row {number} of many"] for number in range(500))]
    for row in rows:
        workbook.active.append(row)
    items = tables(read_as("xlsx", saved(workbook), max_document_bytes=4096))
    assert [item.place for item in items][:2] == ["sheet Sheet", "sheet Sheet, part 2"]
    assert all(len(item.text) <= 4096 for item in items)
    header = "# Sheet\n\n| number | text |\n| --- | --- |\n"
    assert all(item.text.startswith(header) for item in items)
    found = "\n".join(item.text.removeprefix(header) for item in items)
    assert found == "\n".join(f"| {number} | {text} |" for number, text in rows[1:])


def test_rows_that_share_no_column_do_not_fill_memory() -> None:
    rows = ({at % 16384: "x"} for at in range(4000))
    sizes = [len(table) for table in _tables(rows, 2**18)]
    assert max(sizes) <= 2**18
    assert len(sizes) > 10


def test_only_what_is_needed_of_a_sheet_is_held_at_once() -> None:
    read = 0

    def rows() -> Iterator[dict[int, str]]:
        nonlocal read
        for number in range(10_000):
            read += 1
            yield {0: f"row {number}"}

    next(_tables(rows(), 2048))
    assert read < 200


def test_a_workbook_with_nothing_in_it_is_empty(read_as: ReadAs) -> None:
    (refused,) = read_as("xlsx", saved(Workbook()))
    assert isinstance(refused, Refused)
    assert refused.reason == "empty"


def test_damaged_workbooks_are_read_or_refused(read_as: ReadAs, damaged: Callable[..., Iterator[bytes]]) -> None:
    for copy in damaged(saved(sample())):
        items = read_as("xlsx", copy)
        assert items
        assert all(isinstance(item, Refused) or item.text.strip() for item in items)


def test_damaged_parts_are_read_or_refused(read_as: ReadAs, damaged_parts: Callable[..., Iterator[bytes]]) -> None:
    for copy in damaged_parts(saved(sample())):
        assert read_as("xlsx", copy)


def test_rows_before_the_damage_count(read_as: ReadAs) -> None:
    rows = "".join(f'<row r="{n}"><c r="A{n}"><v>{n}</v></c></row>' for n in range(1, 3000))
    data = by_hand(f"<dimension ref='A1'/><sheetData>{rows}<row r='3000'><c></row></sheetData>")
    *tables_before, refused = read_as("xlsx", data, max_document_bytes=4096)
    assert len(tables(tables_before)) > 3
    assert isinstance(refused, Refused)
    assert refused.reason == "damaged"
