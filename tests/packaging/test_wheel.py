"""What is installed from a wheel or an sdist works without the source tree."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import infinity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # pip builds in an environment of its own
ROOT = Path(infinity.__file__).parent.parent


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, timeout=500)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the files that git knows, in a copy: building leaves folders behind."""
    folder = tmp_path_factory.mktemp("sdist")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    tree = folder / "tree"
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    builder = "import sys, setuptools.build_meta as build; print(build.build_sdist(sys.argv[1]))"
    pip("install", "--target", folder / "tools", "setuptools>=77")
    environment = os.environ | {"PYTHONPATH": str(folder / "tools")}
    subprocess.run([sys.executable, "-c", builder, str(folder)], cwd=tree, env=environment, check=True, timeout=200)
    (made,) = folder.glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", folder, sdist)
    (made,) = folder.glob("*.whl")
    return made


def test_the_sdist_holds_what_building_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "infinity/py.typed", "storage/py.typed"} <= names


def test_the_wheel_holds_every_module_and_no_test(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {str(path.relative_to(ROOT)) for part in ("infinity", "storage") for path in (ROOT / part).rglob("*.py")}
    assert ours <= names
    assert {"infinity/py.typed", "storage/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs"))]


def test_the_installed_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip("install", "--no-deps", "--target", site, wheel)
    environment = os.environ | {"PYTHONPATH": str(site)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run("-c", "import infinity, storage; print(infinity.__file__); print(storage.__file__)").splitlines()
    assert [Path(line).parent.parent for line in where] == [site, site]
    assert run("-m", "infinity", "--version") == f"infinity {infinity.__version__}\n"
    output = run("-m", "infinity", "train", "--preset", "tiny", "--layers", "2", "--steps", "2", "--device", "cpu")
    assert "read ahead" in output
    assert (site / "bin" / "infinity").exists()


# As if the package were installed nowhere else.
_MINE = """
import os, site, sys
sys.path = [place for place in sys.path if not os.path.exists(os.path.join(place, "infinity", "__init__.py"))]
site.addsitedir(sys.argv[1])
import infinity
infinity.Config()
print(infinity.__file__)
"""


def test_a_checkout_does_not_hide_the_package_from_a_script_beside_it(sdist: Path, tmp_path: Path) -> None:
    """An editable install of a checkout whose folder is called `infinity`, as cloning makes it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (checkout,) = tmp_path.glob("infinity_offload-*")
    checkout.rename(tmp_path / "infinity")
    site = tmp_path / "site"
    pip("install", "--no-deps", "--target", site, "--editable", tmp_path / "infinity")
    (tmp_path / "mine.py").write_text(_MINE)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "mine.py", str(site)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/infinity/infinity/__init__.py\n"), done.stderr
