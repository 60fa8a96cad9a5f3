"""The page of a report: what it says, that it is whole and small, and that a browser shows it without the network."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import zoo
from kernels import UserError
from zoo.files.sealed_json import read_sealed, write_sealed

pytest.importorskip("bokeh")
pytest_plugins = "tests.desk"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154"
    "78da63f8cfc000000301010018dd8db00000000049454e44ae426082"
)


def write_run(done: Path, folder: Path, loss: float, config: dict[str, Any] | None = None) -> Path:
    """A run like the finished one, with another loss and other settings of the model."""
    shutil.copytree(done, folder, ignore=shutil.ignore_patterns("checkpoints", ".lock"))
    write_sealed(
        folder / "results.json", {**read_sealed(folder / "results.json"), "run": folder.name, "val_loss": loss}
    )
    content = yaml.safe_load((folder / "config.yaml").read_text())
    content["model"].update(config or {})
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1000):
            row = {"step": step, "tokens": 64.0 * (step + 1), "train_loss": loss + 5 / (step + 1)}
            file.write(json.dumps(row | ({"val_loss": loss + 1 / (step + 1)} if step % 100 == 99 else {})) + "\n")
    return folder


def write_evaluation(folder: Path, models: list[str]) -> Path:
    folder.mkdir(parents=True)
    with (folder / "rows.jsonl").open("w") as file:
        for model in models:
            for length in (256, 512):
                rows = [
                    {"length": length, "depth": depth, "metric": "accuracy", "value": depth * 256 / length, "count": 4}
                    for depth in (0.0, 0.5, 1.0)
                ]
                what = {"task": "passkey", "cell": {"length": length}, "options": {"samples": 4, "seed": 0}}
                record = {"what": what, "rows": rows, "checkpoint": f"runs/{model}", "torch": "2.11.0"}
                file.write(json.dumps(record) + "\n")
    return folder


@pytest.fixture
def folders(finished: Path, desk: Path) -> list[str]:
    """Two runs, a sweep of eight, and an evaluation."""
    done = finished / "runs" / "done"
    runs = [
        write_run(done, desk / "runs" / "first", 3.5),
        write_run(done, desk / "runs" / "second", 3.25, {"num_heads": 1, "inputs": ["many words in one cell"] * 20}),
    ]
    sweep = desk / "sweeps" / "heads"
    for seed in range(8):
        write_run(done, sweep / f"seed={seed}", 3 + seed / 8)
    lines = [f"seed={seed},{seed},complete,9000,{3 + seed / 8}" for seed in range(8)]
    (sweep / "sweep.csv").write_text("\n".join(["name,seed,status,parameters,val_loss", *lines]))
    (sweep / "sweep.png").write_bytes(PIXEL)
    evaluation = write_evaluation(desk / "evaluations" / "both", ["first", "second"])
    return [str(path.relative_to(desk)) for path in (*runs, sweep, evaluation)]


def shown(page: str) -> str:
    """The words of a page, without those of its scripts and styles."""
    bare = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", bare)).split())


@pytest.mark.slow
def test_a_page_for_a_colleague(command, folders: list[str]):
    done = command("report", *folders, "--output", "report.html", "--title=Heads")
    assert done.code == 0, done.err
    assert "report.html" in done.out
    page = Path("report.html").read_text()
    assert len(page.encode()) < 2_000_000
    assert not re.search(
        r"(?:src|href|action)\s*=\s*[\"'](?!data:)|@import|url\((?!data:)",
        re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL),
    )
    assert "default-src 'none'" in page
    words = shown(page)
    for said in (
        "Heads",
        "first",
        "seed=7",
        "model.num_heads 2 1 2",
        "3.25",
        "status loss",  # beside the name, where a narrow screen shows it
        "FLOPs per token",
        "sample after 4 steps",
        "python cli.py fit --config runs/first/config.yaml --run first-again",
        "python cli.py evaluate --checkpoint=runs/first --checkpoint=runs/second --tasks=passkey --samples=4 --seed=0 "
        "'--lengths=[256, 512]' --output=evaluations/both-again",
        "torch 2.11.0",
        "hidden_size: 32",
        "length 256 length 512",
        "50.0 % 25.0 %",
    ):
        assert said in words, said
    assert "What is missing" not in words
    assert page.count('class="picture"') == 2 + 1 + 3  # losses; the sweep's own; heatmaps, and accuracy over length


@pytest.mark.slow
def test_what_is_missing_is_one_sentence(command, folders: list[str], desk: Path):
    for name in ("results.json", "samples.txt"):
        (desk / "runs" / "first" / name).unlink()
    (desk / "runs" / "second" / "samples.txt").unlink()
    (desk / "runs" / "second" / "results.json").write_text("{")
    (desk / "sweeps" / "heads" / "sweep.png").unlink()
    (desk / "sweeps" / "heads" / "seed=3" / "metrics.jsonl").write_text("")
    (desk / "sweeps" / "heads" / "seed=3" / "config.yaml").unlink()
    with (desk / "evaluations" / "both" / "rows.jsonl").open("a") as file:
        file.write('{"what": \n')
    done = command("report", *folders)
    assert done.code == 0, done.err
    said = " ".join(done.out.split())
    words = shown(Path("report.html").read_text())
    for sentence in (
        "runs/first: no results.json, so no sizes and losses in the table; the run has not ended",
        "runs/second: results.json is damaged",
        "runs/first, runs/second: no samples.txt with a sample.",
        "sweeps/heads/seed=3: no metrics.jsonl with a logged step, so no curve.",
        "sweeps/heads/seed=3: no config.yaml that can be read",
        "sweeps/heads: no sweep.png.",
        "evaluations/both: rows.jsonl has damaged lines, which are left out: 5.",
    ):
        assert sentence in said, sentence
        assert sentence in words, sentence


def test_rows_of_an_earlier_version_of_a_task_are_left_out(command, desk: Path):
    folder = write_evaluation(desk / "evaluations" / "e", ["first"])
    file = folder / "rows.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    newer = {**records[0], "what": {**records[0]["what"], "version": 2}}
    newer["rows"] = [{**row, "value": 0.125} for row in records[0]["rows"]]
    file.write_text("".join(json.dumps(record) + "\n" for record in [*records, newer]))
    done = command("report", str(folder))
    assert done.code == 0, done.err
    assert "rows.jsonl has rows of an earlier version of passkey, which are left out" in " ".join(done.out.split())
    words = shown(Path("report.html").read_text())
    assert "12.5 %" in words
    assert "length 512" not in words


def test_a_run_that_was_to_show_no_samples_lacks_none(
    folders: list[str], desk: Path, capsys: pytest.CaptureFixture[str]
):
    for name, file in (("first", "tokenizer.json"), ("second", "config.yaml")):
        run = desk / "runs" / name
        (run / "samples.txt").unlink()
        if file == "tokenizer.json":  # recall: tokens without text
            (run / file).unlink()
        else:
            config = yaml.safe_load((run / file).read_text())
            config["samples"]["prompts"] = []
            (run / file).write_text(yaml.safe_dump(config))
    zoo.report(folders[:2])
    assert "samples" not in capsys.readouterr().out


def test_an_evaluation_alone(folders: list[str]):
    page = zoo.report(folders[-1], "alone.html", verbose=False).read_text()
    assert "What was trained" not in page
    assert page.count('class="picture"') == 3


def test_text_is_not_markup(folders: list[str], desk: Path):
    (desk / "runs" / "first" / "samples.txt").write_text("── sample after 4 steps ──\n<script>alert(1)</script>\n")
    page = zoo.report(folders[0], verbose=False).read_text()
    assert "<script>alert(1)" not in page
    assert "<script>alert(1)</script>" in html.unescape(page)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["runs/firs"], "folders: runs/firs is not a folder"),
        (["runs"], None),
        (["."], "folders: . holds no run (config.yaml), evaluation (rows.jsonl) or sweep (runs)"),
        ([], "folders: missing; name at least one: python cli.py report FOLDERS …"),
        (["runs/first", "--output=runs"], "output: runs is a folder"),
        (["runs/first", "--output=tiny.yaml/page.html"], "output: tiny.yaml/page.html cannot be written"),
        (["runs/first", "--output=r.pdf"], "output: r.pdf is not named as a page; end it in .html"),
        (["runs/first", "--ouput=a.html"], "did you mean 'output'"),
    ],
)
def test_mistakes(command, folders: list[str], arguments: list[str], expected: str | None):
    done = command("report", *arguments)
    assert done.code == (0 if expected is None else 2)
    assert (expected or "") in done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_it_names_no_place_of_this_machine(folders: list[str], desk: Path, tmp_path: Path):
    config = desk / "runs" / "first" / "config.yaml"
    config.write_text(config.read_text() + f"note: {tmp_path}/corpus/a.txt\n")
    metrics = desk / "runs" / "second" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    page = zoo.report([str(desk / folder) for folder in folders], verbose=False).read_text()
    repeated = page.partition("To repeat it")[2].partition("<script")[0]
    assert str(desk) not in repeated
    assert str(tmp_path) not in repeated
    assert "--config runs/first/config.yaml" in repeated
    assert "No curve of second: a line needs two logged steps." in page


def test_without_bokeh(folders: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"report: needs bokeh; pip install 'token-mixer-zoo\[report\]'"):
        zoo.report(folders)


LOOKS = """<script>
setTimeout(async () => {
  const inside = root =>
    [...root.querySelectorAll("*")].flatMap(e => [e, ...(e.shadowRoot ? inside(e.shadowRoot) : [])]);
  const painted = e => inside(e).some(c => c.tagName == "CANVAS" && c.width > 0 && c.height > 0 &&
    c.getContext("2d").getImageData(0, 0, c.width, c.height).data.some(x => x));
  const pictures = [...document.querySelectorAll(".picture")];
  const table = [...document.querySelectorAll("table")].find(t => t.caption.textContent == "What was trained");
  const column = [...table.tHead.rows[0].cells].findIndex(c => c.textContent == "loss");
  const names = () => [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
  table.tHead.rows[0].cells[column].click();
  const rising = names();
  table.tHead.rows[0].cells[column].click();
  const seen = pictures.map(p => p.tagName == "IMG" ? p.naturalWidth > 0 : painted(p));
  const tall = pictures.map(p => p.getBoundingClientRect().height);
  const layer = inside(pictures[0]).find(e => /bk-events/.test(String(e.className)));
  const box = layer.getBoundingClientRect();
  const point = (kind, y) => layer.dispatchEvent(new PointerEvent(kind, {
    bubbles: true, composed: true, isPrimary: true, pointerType: "mouse",
    clientX: box.left + 200, clientY: box.top + y}));
  let tip;
  point("pointerover", 0);
  for (let y = 20; y < box.height && !tip; y += 2) {
    point("pointermove", y);
    await new Promise(done => setTimeout(done, 30));
    tip = inside(document).find(e => /bk-Tooltip/.test(String(e.className)) && e.getBoundingClientRect().height > 0);
  }
  const hovered = tip ? (tip.shadowRoot || tip).textContent.slice(-90) : "";
  const widest = Math.max(...[...document.querySelectorAll("td")].map(cell => cell.getBoundingClientRect().width));
  const scrolled = table.parentElement.scrollWidth - table.parentElement.clientWidth;
  document.title = JSON.stringify({scrolled, seen, tall, widest, hovered, rising, falling: names()});
}, 4000);
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome")
def test_a_browser_shows_it(folders: list[str], tmp_path: Path):
    assert BROWSER is not None
    page = zoo.report(folders, verbose=False)
    looked_at = tmp_path / "looked_at.html"
    looked_at.write_text(page.read_text().replace("</body>", LOOKS))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=30000"]
    options += ["--window-size=1200,900"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    browser = subprocess.run(
        [BROWSER, *options, "--dump-dom", looked_at.as_uri()], capture_output=True, text=True, timeout=120
    )
    said = [line for line in browser.stderr.splitlines() if "CONSOLE" in line]
    assert not [line for line in said if not re.search(r"\[bokeh [\d.]+\] (setting log level|document idle)", line)]
    actual = re.search(r"<title>(\{.*?\})</title>", browser.stdout)
    assert actual, browser.stdout[-500:]
    looks = json.loads(html.unescape(actual.group(1)))
    assert len(looks["seen"]) == 6
    assert all(looks["seen"]), looks
    assert min(looks["tall"][:2] + looks["tall"][3:]) > 100
    assert re.search(r"(first|second|seed=\d) *tokens: [\d,]+ *nats per token: \d\.\d{4}", looks["hovered"]), looks[
        "hovered"
    ]
    assert looks["scrolled"] == 0  # no horizontal scrollbar
    assert looks["widest"] < 600  # of the page's 1100, so that the next column is seen
    assert looks["rising"][:2] == ["seed=0", "seed=1"]
    assert looks["falling"][0] == "seed=7"
