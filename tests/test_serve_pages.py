"""Pages that the server shows to browsers: which request gets one, and that nothing in it acts."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urljoin, urlsplit

import live_browser
import numpy as np
import pytest
import report_stores
from browser import needed
from checkpoints import write_safetensors
from http_server import Answer, Served, served, taken
from live_browser import Browser

from mstore import MergeRequest, Store
from mstore.terms.errors import Corrupt
from mstore_pages import report, site
from mstore_pages.card import MAX_CHARS, card
from mstore_pages.document import served_policy
from mstore_pages.gather import comparison_summary, snapshot_summary
from mstore_serve import documents, pages, reports

PAGE = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "\u202egnp.exe",
    "' autofocus onfocus='alert(1)",
    "a/../../../b",
    "c//d",
    "x" * 4000,
)
CARD = """---
license: mit
tags: ["</pre><script>alert(1)</script>"]
---
# A <script>alert(1)</script> card

<img src="https://evil.example/a.png" onerror="alert(1)"> ![logo](https://evil.example/b.png)
[paper](https://example.org/paper) [evil](javascript:alert(1)) [data](data:text/html,x)
[quote](https://example.org/"onmouseover="alert(1)) <javascript:alert(1)>

| a | b |
|---|---|
| **1** | `</td><script>alert(1)</script>` |

- one
- two

```html
</code></pre><script>alert(1)</script>
```
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a family, hostile models, a candidate, notes."""
    root = tmp_path_factory.mktemp("pages")
    with report_stores.family(root, 3, ("code", "math"), title="llama", method="ties") as store:
        store.tag("v1", "llama/merged")
        store.note("llama/merged", {HOSTILE[1]: HOSTILE[0]}, kind="evaluation")
        again = store.plan(
            MergeRequest(base="llama/base", experts={"llama/code": 0.5}, method="task_arithmetic")
        )
        store.merge(again, name="llama/merged", candidate="run")
        hostile = root / "hostile"
        write_safetensors(
            hostile / "model.safetensors",
            [(name, "F32", (2,), np.ones(2, "f4").tobytes()) for name in HOSTILE],
        )
        (hostile / "README.md").write_text(CARD)
        for name in HOSTILE[:4]:
            path = hostile / name.replace("/", "")
            path.write_text("x")
        store.add(hostile, name="hostile/a", message="".join(HOSTILE))
        store.add(hostile, name="hostile/b_c.d", message="again")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    """A server of that store.  Tests that use it only read."""
    with served(root / "store") as found:
        yield found


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Served]:
    """A server of a small store that a test may change."""
    report_stores.family(tmp_path, 2, ("code",), title="m").close()
    with served(tmp_path / "store") as found:
        yield found


def text(answer: Answer) -> str:
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer.body.decode()


def is_page(answer: Answer) -> bool:
    return answer.headers["content-type"].startswith("text/html")


class Tags(html.parser.HTMLParser):
    """The elements of a page, and its text without those of script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.said.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.said)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]

    def links(self) -> list[str]:
        return [to for one in self.all("a") if (to := one.get("href")) is not None]


def addresses(server: Served) -> list[str]:
    """An address of each kind that has a page and a document."""
    id = f"/snapshots/{server.store['llama/merged'].id}"
    return [
        *("/", "/refs", "/refs/llama/merged/-", "/snapshots", id, f"{id}/tensors/"),
        *(f"{id}/files/", f"{id}/plan", f"{id}/report", "/reflog", "/refs/llama/merged/-/plan"),
        "/compare?a=llama/base&b=llama/merged",
    ]


# -- who gets a page ---------------------------------------------------------------------------


def test_a_browser_gets_pages_and_programs_get_json(server: Served) -> None:
    """Each address has a page for a browser and JSON for others; caches can tell them apart."""
    for path in addresses(server):
        page, plain = server.ask(path, PAGE), server.ask(path, {"Accept": "application/json"})
        assert (page.status, plain.status) == (200, 200), path
        assert is_page(page), path
        assert plain.headers["content-type"] == "application/json"
        json.loads(plain.body)
        assert page.headers["vary"] == plain.headers["vary"] == "Accept"
        assert page.headers["etag"] != plain.headers["etag"]
        assert page.headers["cache-control"] == "no-cache"
        for headers, answer in ((PAGE, page), ({"Accept": "application/json"}, plain)):
            again = server.ask(path, {**headers, "If-None-Match": answer.headers["etag"]})
            assert (again.status, again.headers["vary"]) == (304, "Accept"), path
            assert again.headers["etag"] == answer.headers["etag"]
        mixed = server.ask(path, {**PAGE, "If-None-Match": plain.headers["etag"]})
        assert mixed.status == 200


@pytest.mark.parametrize(
    ("accept", "wants_page"),
    [
        (None, False),
        ("*/*", False),
        ("application/json", False),
        ("text/*", False),
        ("text/html;q=0", False),
        ("application/json, text/html;q=0.9", False),
        ("text/html", True),
        ("TEXT/HTML; charset=utf-8, */*;q=0.1", True),
        ("text/html, application/json", True),
        ("text/html;q=0.8, application/json;q=0.7", True),
        ("text/html;q=nonsense", True),
        ("image/avif,image/webp,*/*;q=0.8", False),
    ],
)
def test_accept_decides(server: Served, accept: str | None, wants_page: bool) -> None:
    """A page goes to who names text/html and does not want JSON more."""
    headers = {} if accept is None else {"Accept": accept}
    assert is_page(server.ask("/", headers)) == wants_page
    assert is_page(server.ask("/refs/nobody", headers)) == wants_page


def test_bytes_stay_bytes(server: Served) -> None:
    """A browser gets the bytes of files and tensors as programs do; a page is never one of them."""
    id = f"/snapshots/{server.store['hostile/a'].id}"
    for path in (
        *(f"{id}/files/README.md", f"{id}/files/{quote(HOSTILE[2])}"),
        f"{id}/tensors/{quote(HOSTILE[0], safe='')}",
    ):
        page, plain = server.ask(path, PAGE), server.ask(path)
        assert (page.status, page.body) == (200, plain.body)
        assert not is_page(page)
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["content-security-policy"] == "default-src 'none'"


# -- what is in a page -------------------------------------------------------------------------


def policy_of(answer: Answer) -> dict[str, str]:
    parts = answer.headers["content-security-policy"].split("; ")
    return dict(part.split(" ", 1) for part in parts)


def test_only_the_own_style_and_script_run(server: Served) -> None:
    """The policy of each page, errors too, names the hashes of its style and script alone."""
    for path in [*addresses(server), "/refs/nobody", "/compare"]:
        answer = server.ask(path, PAGE)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        policy = policy_of(answer)
        assert policy["default-src"] == policy["base-uri"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["form-action"] == "'self'"
        page = text(answer)
        for kind, rule in (("<style>", "style-src"), ("<script>", "script-src")):
            [inside] = [part.split("</", 1)[0] for part in page.split(kind)[1:]]
            digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
            assert policy[rule] == f"'sha256-{digest}'"
        with server.connect(1 << 20) as client:
            ask = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n"
            client.sendall(f"{ask}Connection: close\r\n\r\n".encode())
            head = taken(client).partition(b"\r\n\r\n")[0].lower()
        for name in (b"content-security-policy:", b"x-content-type-options:", b"vary:"):
            assert head.count(name) == 1, (path, name)
        # The page itself says the same, for who saves it.
        meta = next(one["content"] for one in Tags(page).all("meta") if "http-equiv" in one)
        assert answer.headers["content-security-policy"].startswith(f"{meta};")


@pytest.fixture(scope="module")
def crawled(server: Served) -> dict[str, Answer]:
    """Every page that links lead to from `/`, and every address that they name."""
    found: dict[str, Answer] = {}
    waiting = ["/"]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = server.ask(path, PAGE)
        if not is_page(found[path]):
            continue
        for link in Tags(text(found[path])).links():
            # A proxy may show the server below a path of its own.
            to = urlsplit(urljoin(f"http://here/models{path}", link))
            if to.netloc == "here":
                assert to.path.startswith("/models/"), (path, link)
                below = to.path.removeprefix("/models")
                waiting.append(below + (f"?{to.query}" if to.query else ""))
    return found


def test_every_link_leads_somewhere(crawled: dict[str, Answer]) -> None:
    """From `/`, links lead to everything, and to nothing that is not there."""
    found = crawled
    assert {path: one.status for path, one in found.items() if one.status != 200} == {}
    bytes_of = {path for path, one in found.items() if not is_page(one)}
    tensors = [path for path in bytes_of if "/tensors/" in path]
    assert {path.rpartition("/")[2] for path in tensors} >= {
        quote(f":{one}" if one.startswith("javascript:") else one, safe="") for one in HOSTILE
    }
    for wanted in ("report", "plan", "tensors/", "files/", "reflog", "compare"):
        assert any(path.partition("?")[0].endswith(wanted) for path in found), wanted


def test_hostile_names_stay_text(crawled: dict[str, Answer]) -> None:
    """No page has an element, attribute or address that came from a name, a message or a card."""
    for path, answer in crawled.items():
        if not is_page(answer):
            continue
        tags = Tags(text(answer))
        kinds = {name for name, _ in tags.found}
        assert all(one["src"].startswith("data:image/png") for one in tags.all("img")), path
        assert not kinds & {"iframe", "object", "embed", "base", "audio", "video"}, path
        scripts = [one for one in tags.all("script") if one.get("type") != "application/json"]
        assert scripts == [{}], path
        for name, attributes in tags.found:
            assert not [key for key in attributes if key.startswith("on")], (path, attributes)
            active = {"style", "autofocus", "formaction"} | ({"src"} if name != "img" else set())
            assert not active & attributes.keys(), (path, name)
        for link in tags.links():
            to = urlsplit(link)
            assert to.scheme in ("", "https"), (path, link)
            if to.scheme:
                assert link.startswith("https://example.org/"), (path, link)
        assert "\u202e" not in answer.body.decode(), path


def test_a_card_is_text(server: Served) -> None:
    """Of a card, headings, lists, tables, code and links to the web are shown; the rest is text."""
    page = Tags(text(server.ask("/refs/hostile/a/-", PAGE)))
    out = [one for one in page.all("a") if (one["href"] or "").startswith("https:")]
    assert [one["href"] for one in out] == [
        "https://example.org/paper",
        'https://example.org/"onmouseover="alert(1',
    ][: len(out)]
    assert all(one["rel"] == "noopener noreferrer nofollow" for one in out)
    assert '<img src="https://evil.example/a.png" onerror="alert(1)"> [image: logo]' in page.text
    assert "[evil](javascript:alert(1))" in page.text
    assert "</code></pre><script>alert(1)</script>" in page.text
    assert "\\u202egnp.exe" in page.text


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "piece",
    ["[", "*a", "[a](b", "_a ", "> \n", "- a\n", "a|b\n-|-\n", "`a", "![a", "# ", "#", "\\"],
)
def test_no_card_takes_long(piece: str) -> None:
    """A card is drawn in time that grows with its length, up to a limit.

    The limit of the test's time is that of the whole run: one that takes the square is minutes.
    """
    assert card(piece * MAX_CHARS)


def test_what_a_card_says() -> None:
    """Markdown that cards have becomes what it says."""
    said = (
        "# T\n\none **two** *three* `four`\nfive\n\n1. a\n2. b\n   c\n> q\n\n~~~\nx\n\ny\n~~~\nend"
    )
    assert card(said) == (
        '<div class="card"><h3>T</h3><p>one <strong>two</strong> <em>three</em> '
        "<code>four</code> five</p><ol><li>a</li><li>b c</li></ol><blockquote>q</blockquote>"
        '<pre tabindex="0" aria-label="Code"><code>x\n\ny</code></pre><p>end</p></div>'
    )
    assert "goes on" in card("a\n" * MAX_CHARS)
    assert "<details>" in card("---\na: b\n---\ntext")
    assert "<details>" not in card("---\na: b\n")


# -- lists -------------------------------------------------------------------------------------


def named(page: str, kind: str) -> list[str]:
    """What heads the rows of a list."""
    inside = page.partition(f'<table class="list {kind}"')[2].partition("</table>")[0]
    rows = inside.partition("<tbody>")[2].split("<tr")[1:]
    return [Tags(row.partition("</th>")[0]).said[1] for row in rows]


def test_refs_are_found(server: Served) -> None:
    """The first page has branches, tags, candidates; a search finds them by name, kind and id."""
    every = named(text(server.ask("/", PAGE)), "refs")
    assert every == [
        *("hostile/a", "hostile/b_c.d", "llama/base", "llama/code", "llama/math"),
        *("llama/merged", "v1", "candidates/run/llama/merged"),
    ]
    merged = str(server.store["llama/merged"].id)
    for query, found in (
        ("MERGED llama", ["llama/merged", "candidates/run/llama/merged"]),
        ("tag", ["v1"]),
        (merged[:9], ["llama/merged", "v1"]),
        ("b_c.d", ["hostile/b_c.d"]),
        ("<nothing>", []),
    ):
        page = text(server.ask(f"/?q={quote(query)}", PAGE))
        assert named(page, "refs") == found, query
        [field] = [one for one in Tags(page).all("input") if one["name"] == "q"]
        assert field["value"] == query


def test_a_row_says_what_a_ref_is(server: Served) -> None:
    """A ref has its kind, snapshot, method, size, time and message beside it."""
    shown = server.store.show("llama/merged")
    page = text(server.ask("/?q=llama/merged", PAGE))
    row = Tags(page.partition("<tbody>")[2].partition("</tr>")[0]).text
    for part in (
        "branch",
        shown.snapshot.short,
        "merge by ties",
        "KiB",
        "all of them",
        "UTC",
        "20",
    ):
        assert part in (row if part != "UTC" else page), part


def test_long_lists_have_pages(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of many is shown a page at a time, in order, with links to its neighbours."""
    monkeypatch.setattr(site, "PER_PAGE", 3)
    path, seen, kinds = "/refs/llama/merged/-/tensors/", [], set()
    while True:
        page = text(server.ask(path, PAGE))
        seen += named(page, "tensors")
        following = [one for one in Tags(page).all("a") if one.get("rel") == "next"]
        kinds |= {one.get("rel") for one in Tags(page).all("a")}
        if not following:
            break
        path = (
            urlsplit(urljoin(f"http://here{path}", following[0]["href"] or "")).path
            + "?"
            + (urlsplit(following[0]["href"] or "").query)
        )
    assert sorted(seen) == sorted(server.store["llama/merged"].tensor_names())
    assert len(seen) > 3 * 3
    assert kinds >= {"next", "prev"}
    for wild in ("0", "-1", "999999", "x", "99999999999999999999", "%00", "1.5"):
        assert server.ask(f"/refs/llama/merged/-/tensors/?page={wild}", PAGE).status == 200
    assert len(named(text(server.ask("/?page=2&q=llama", PAGE)), "refs")) == 2
    assert server.ask("/snapshots?page=2", PAGE).status == 200


def test_the_reflog_names_authors(tmp_path: Path) -> None:
    """The reflog has each move with the author of the snapshot to which the ref moved."""
    write_safetensors(tmp_path / "one" / "m.safetensors", [("t", "F32", (1,), b"\0" * 4)])
    with Store.init(tmp_path / "store", author="Ada <ada@example>") as store:
        store.add(tmp_path / "one", name="one")
        store.tag("two", "one")
    with served(tmp_path / "store") as server:
        page = Tags(text(server.ask("/reflog", PAGE)))
        assert page.text.count("Ada <ada@example>") == 2
        only = Tags(text(server.ask("/reflog?ref=two", PAGE)))
        assert "two@{0}" in only.text
        assert "one@{0}" not in only.text
        told = json.loads(server.ask("/reflog?ref=two").body)
        assert list(told) == list(documents.ReflogDocument.__struct_fields__)
        assert [one["name"] for one in told["entries"]] == ["two"]
        assert server.ask("/reflog?ref=three", PAGE).status == 404


def test_the_plan_says_what_was_read(server: Served) -> None:
    """The plan's page has, by tensor, how much of each expert the merge uses and leaves out."""
    merge = server.store.explain("llama/merged")
    page = text(server.ask("/refs/llama/merged/-/plan", PAGE))
    assert named(page, "tensors") == [
        one.name for one in sorted(merge.tensors, key=lambda one: site.in_order(one.name))
    ]
    for one in merge.tensors:
        row = page.partition(f"{one.name}</th>")[2].partition("</tr>")[0]
        for share in one.experts:
            out = share.chunks_over_budget
            if out:
                assert f"{out} left out" in row, one.name
            if share.chunks_read:
                assert f"{share.chunks_read} of" in row, one.name
    assert json.loads(server.ask("/refs/llama/merged/-/plan").body) == json.loads(
        documents.encoded(merge)
    )
    for headers in (PAGE, {}):
        found = server.ask("/refs/llama/base/-/plan", headers)
        assert found.status == 404
        assert b"no merge" in found.body


def test_a_pruned_snapshot_has_a_page(tmp_path: Path) -> None:
    """What was pruned is shown, with what its records say; its bytes are not offered."""
    with Store.init(tmp_path / "store") as store:
        store.configure("reflog_days", 0)
        for number in range(2):
            one = tmp_path / str(number)
            write_safetensors(one / "m.safetensors", [("t", "F32", (1,), bytes([number] * 4))])
            store.add(one, name="m", message=f"number {number}")
        old = store.log("m")[1].snapshot
        store.prune(keep_last=1)
        store.gc()
    with served(tmp_path / "store") as server:
        page = text(server.ask(f"/snapshots/{old}", PAGE))
        assert "pruned" in page
        assert "number 0" in page
        assert not {"#files", "#card"} & set(Tags(page).links())
        assert not [link for link in Tags(page).links() if "tensors" in link or "report" in link]
        assert server.ask(f"/snapshots/{old}/files/m.safetensors", PAGE).status == 404
        assert server.ask("/snapshots", PAGE).status == 200


def test_the_beginning_of_an_id_leads_to_the_whole(server: Served) -> None:
    """A page at the beginning of an id is at the whole id, as its document is."""
    id = str(server.store["llama/merged"].id)
    for tail in ("", "/tensors/", "/plan", "/report", "/files/"):
        found = server.ask(f"/snapshots/{id[:10]}{tail}", PAGE)
        assert found.status == 307
        to = urljoin(f"/snapshots/{id[:10]}{tail}", found.headers["location"])
        assert to == f"/snapshots/{id}{tail}"
    for nothing in ("0" * 64, "00ff", "xyz", "llama"):
        assert server.ask(f"/snapshots/{nothing}", PAGE).status == 404


# -- reports -----------------------------------------------------------------------------------


def test_a_report_is_that_of_the_command(server: Served) -> None:
    """A report, or a comparison, has the sections and numbers of `mstore report`."""
    for path, page, facts in (
        (
            "/refs/llama/merged/-/report",
            report.snapshot_page(snapshot_summary(server.store, "llama/merged")),
            snapshot_summary(server.store, "llama/merged"),
        ),
        (
            "/compare?a=llama/base&b=llama/merged",
            report.comparison_page(comparison_summary(server.store, "llama/base", "llama/merged")),
            comparison_summary(server.store, "llama/base", "llama/merged"),
        ),
    ):
        inside = page.partition("<main")[2].partition("<script>")[0]
        assert inside in text(server.ask(path, PAGE))
        assert json.loads(server.ask(path).body) == json.loads(documents.encoded(facts))
    quick = text(server.ask("/refs/llama/merged/-/report?quick=yes", PAGE))
    assert "weights were not read" in quick


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reports that are computed from now on."""
    made: list[str] = []
    real = snapshot_summary

    def counted(store: Store, *given: object, **more: object) -> object:
        made.append(str(more["name"]))
        return real(store, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(reports, "snapshot_summary", counted)
    return made


@pytest.mark.rest
def test_a_second_look_computes_nothing(
    own: Served, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report is kept while what it tells of is the same; a note, or a ref, makes a new one."""
    path = "/refs/m/merged/-/report"
    first = own.ask(path, PAGE)
    assert own.ask(f"{path}?page=3&q=x", PAGE).body == first.body
    assert computed == ["m/merged"]
    with Store.open(own.store.path) as store:
        directory = store.path.parent / "else"
        write_safetensors(directory / "m.safetensors", [("t", "F32", (1,), b"\0" * 4)])
        store.add(directory, name="else")
        assert own.ask(path, PAGE).body == first.body
        assert len(computed) == 1
        store.note("m/merged", {"mmlu": 0.5}, kind="evaluation")
        second = own.ask(path, PAGE)
        assert b"mmlu" in second.body
        assert len(computed) == 2
        store.tag("v1", "m/base")
        assert b"v1" in own.ask(path, PAGE).body
        assert len(computed) == 3
    monkeypatch.setattr(reports, "_KEPT_BYTES", len(second.body) // 2)
    for _ in range(2):
        assert own.ask(f"{path}?quick=yes", PAGE).status == 200
    assert len(computed) == 5


@pytest.mark.rest
def test_kept_reports_have_a_limit(
    own: Served, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were not asked for longest are forgotten where kept reports are too many bytes."""
    paths = [f"/refs/m/{name}/-/report" for name in ("base", "code", "merged")]
    sizes = [len(own.ask(path, PAGE).body) for path in paths]
    assert len(computed) == 3
    monkeypatch.setattr(reports, "_KEPT_BYTES", sum(sizes) + 10)
    for path in (paths[0], paths[0] + "?quick=yes", paths[0]):
        own.ask(path, PAGE)
    assert len(computed) == 4
    own.ask(paths[1], PAGE)
    assert len(computed) == 5


def test_a_report_delays_nothing_else(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a report is computed, and others wait for it, every other page is answered."""
    go, began = threading.Event(), threading.Event()
    real = snapshot_summary

    def slow(store: Store, *given: object, **more: object) -> object:
        began.set()
        assert go.wait(120)
        return real(store, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(reports, "snapshot_summary", slow)
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(own.ask, f"/refs/m/{name}/-/report", PAGE)
            for name in ("base", "code", "merged", "merged")
        ]
        assert began.wait(120)
        for path in ("/", "/refs/m/merged/-", "/refs/m/merged/-/plan", "/reflog", "/snapshots"):
            assert own.ask(path, PAGE).status == 200
        assert own.ask("/refs/m/merged/-/files/model.safetensors").status == 200
        go.set()
        assert [one.result().status for one in asked] == [200] * 4


def test_the_end_of_the_server_ends_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report that is computed when the server ends is given up at its next step."""
    report_stores.family(tmp_path, 2, ("code",), title="m").close()
    began, steps = threading.Event(), []

    def endless(store: Store, *given: object, **more: object) -> object:
        began.set()
        while True:
            steps.append(1)
            more["progress"](None)  # type: ignore[operator]
            threading.Event().wait(0.01)

    monkeypatch.setattr(reports, "snapshot_summary", endless)
    with ThreadPoolExecutor(1) as pool:
        with served(tmp_path / "store", timeout=1.0) as server:
            asked = pool.submit(server.ask, "/refs/m/base/-/report", PAGE)
            assert began.wait(120)
        # The server has ended, with all of its threads: else this line is not reached.
        assert steps
        asked.exception()


def test_comparing(server: Served) -> None:
    """Two fields ask for a comparison; what cannot be compared is said above them."""
    form = Tags(text(server.ask("/compare", PAGE)))
    assert [one["name"] for one in form.all("input") if one["name"] != "q"] == ["a", "b"]
    assert {"llama/base", "v1"} <= {one["value"] for one in form.all("option")}
    half = Tags(text(server.ask("/compare?a=v1", PAGE)))
    assert [one["value"] for one in half.all("input") if one["name"] == "a"] == ["v1"]
    for a, b, status in (("v1", "nobody", 404), ("v1", "a b", 404), ("v1~9", "v1", 404)):
        found = server.ask(f"/compare?a={quote(a)}&b={quote(b)}", PAGE)
        assert found.status == status
        fields = [one["value"] for one in Tags(text(found)).all("input") if one["name"] in "ab"]
        assert fields == [a, b]
    assert json.loads(server.ask("/compare").body)["error"]["code"] == "bad-request"
    assert server.ask("/compare?a=v1").status == 400
    apart = server.ask("/compare?a=hostile/a&b=llama/base", PAGE)
    assert apart.status == 200


# -- errors, tokens ----------------------------------------------------------------------------


def test_errors_are_pages_for_browsers(server: Served) -> None:
    """What is not there is a page with a search field for a browser, and JSON for programs."""
    for path in (
        *("/nothing", "/refs/nobody", "/refs/<b>/-/files/x", "/snapshots/00ff", "/refs/%ff"),
        *("/refs/llama/base/-/files/none", "/refs/llama/base/-/tensors/none"),
        f"/{'x' * 9000}",
    ):
        found = server.ask(path, PAGE)
        assert found.status == 404
        assert found.headers["cache-control"] == "no-store"
        assert found.headers["vary"] == "Accept"
        tags = Tags(text(found))
        assert any(one.get("name") == "q" for one in tags.all("input")), path
        home = urljoin(f"http://here{path}", next(one for one in tags.links() if "." in one))
        assert home == "http://here/", path
        assert json.loads(server.ask(path).body)["error"]["code"] == "not-found"
    refused = server.ask("/", PAGE, method="POST")
    assert (refused.status, is_page(refused)) == (405, True)
    assert "<" not in Tags(text(server.ask("/refs/<b>", PAGE))).all("b")


def test_damage_is_told_without_the_servers_paths(
    own: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that cannot be made is a page of status 500, which names nothing of the server."""

    def fail(*given: object, **more: object) -> None:
        raise Corrupt("damaged", where=str(own.store.path))

    monkeypatch.setattr(pages, "lineage_of", fail)
    found = own.ask("/refs/m/base/-", PAGE)
    assert found.status == 500
    assert str(own.store.path) not in text(found)


def basic(password: str, user: str = "anybody") -> Mapping[str, str]:
    given = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {**PAGE, "Authorization": f"Basic {given}"}


def test_a_browser_brings_the_token_as_a_password(root: Path) -> None:
    """With a token, a browser is asked for a password, and programs for the token as before."""
    token = "s3cret-token-of-this-server"
    with served(root / "store", token=token) as server:
        asked = server.ask("/", PAGE)
        assert (asked.status, is_page(asked)) == (401, True)
        assert asked.headers["www-authenticate"] == 'Basic realm="mstore", charset="UTF-8"'
        assert server.ask("/").headers["www-authenticate"] == "Bearer"
        for headers in (basic(token), basic(token, ""), {"Authorization": f"Bearer {token}"}):
            assert server.ask("/", headers).status == 200
        for wrong in (
            *(basic(f"{token}x"), basic(""), basic("", token), {"Authorization": "Basic \xff"}),
            *({"Authorization": f"Basic {token}"}, {"Authorization": f"Digest {token}"}),
            {"Authorization": "Basic"},
        ):
            assert server.ask("/", wrong).status == 401
        assert server.ask(f"/?token={token}", PAGE).status == 401
        for path in ("/", "/refs/llama/merged/-", "/refs/nobody"):
            assert token.encode() not in server.ask(path, basic(token)).body


# -- in a browser ------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with live_browser.browser(tmp_path / "browser") as found:
        yield found


@pytest.mark.rest
@needed
def test_a_browser_shows_the_pages(server: Served, browser: Browser) -> None:
    """In a browser no page has an error, asks anybody else, runs a name, or is wider than it."""
    for path in (
        *addresses(server),
        *("/refs/hostile/a/-", "/refs/hostile/a/-/tensors/", "/refs/hostile/a/-/files/"),
        *("/refs/hostile/a/-/report", "/compare", "/?q=%3Cscript%3E"),
    ):
        for width in (320, 1280):
            browser.look(width, dark=width == 320)
            browser.open(urljoin(server.info.url or "", path.removeprefix("/")))
            here = browser.tell("document.documentElement.scrollWidth")
            assert here <= width, (path, width)
            drawn = browser.tell("[...document.images].map(one => one.src.slice(0, 15))")
            assert set(drawn) <= {"data:image/png;"}, path
            assert browser.tell("document.styleSheets.length") == 1, path
    assert browser.console == []
    outside = [one for one in browser.asked if not one.startswith((server.info.url or "", "data:"))]
    assert outside == []


@pytest.mark.rest
@needed
def test_rows_go_while_one_types(server: Served, browser: Browser) -> None:
    """While one types into the search field, rows that do not match are hidden, and come back."""
    shown = (
        "[...document.querySelectorAll('table.refs tbody tr')].filter(one => !one.hidden)"
        ".map(one => one.querySelector('a').textContent)"
    )
    browser.open(server.info.url or "")
    every = browser.tell(shown)
    assert len(every) == 8
    browser.tell("document.getElementById('q').focus()")
    browser.type("Merged LLAMA")
    assert browser.tell(shown) == ["llama/merged", "candidates/run/llama/merged"]
    assert "2 of the 8" in browser.tell("document.getElementById('found').textContent")
    browser.tell("document.getElementById('q').select()")
    browser.type("v1")
    assert browser.tell(shown) == ["v1"]
    assert browser.console == []


@needed
def test_a_search_works_without_script(server: Served, browser: Browser) -> None:
    """The form asks the server, which the page's policy allows."""
    browser.stop_scripts()
    browser.open(urljoin(server.info.url or "", "refs/nobody"))
    browser.console.clear()
    browser.tell("document.getElementById('q').value = 'code'")
    browser.tell("document.getElementById('q').focus()")
    browser.press_enter()
    assert browser.tell("location.search") == "?q=code"
    assert browser.tell("document.querySelectorAll('table.refs tbody tr').length") == 1
    assert browser.console == []


def test_the_policy_of_a_page_of_a_file_allows_no_form(server: Served) -> None:
    """Only pages that a server shows may send a form."""
    page = report.snapshot_page(snapshot_summary(server.store, "llama/base", measure=False))
    assert "form-action &#x27;none&#x27;" in page
    assert "form-action 'self'" in served_policy()
