"""What training must remember, as files that know neither ZeRO stages nor ranks: safetensors, whole tensors by name.

    <parameter>.master       float32        <parameter>.exp_avg, .exp_avg_sq     Adam's moments
    <parameter>.average      the moving average of the master, where there is one

Rank 0 writes them, one gathered tensor after the other, a new file whenever PART_BYTES are together: its memory holds
one part and no more. Reading, each rank maps the files and takes what its own fragments need.
"""

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_train.engine.agree import together, writing
from dflash_train.engine.masters import Masters
from dflash_train.util import dist
from dflash_train.util.errors import UserError

PART_BYTES = 2_000_000_000


class _Parts:
    """Tensors collected into files of about PART_BYTES. Raises UserError naming rank and file."""

    def __init__(self, folder: Path):
        self.folder, self.count, self.tensors, self.size = folder, 0, {}, 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self.tensors and self.size + tensor.nbytes > PART_BYTES:
            self.write()
        self.tensors[name] = tensor.to("cpu", copy=True).contiguous()
        self.size += tensor.nbytes

    def write(self) -> None:
        self.count += 1
        path = self.folder / f"part-{self.count:05d}.safetensors"
        with writing(path):
            self.folder.mkdir(exist_ok=True)
            save_file(self.tensors, str(path))
        self.tensors, self.size = {}, 0


def write_state(folder: Path, masters: Masters, kinds: dict[str, list[Tensor]]) -> None:
    """kinds: suffix -> flat tensors in the masters' layout. A collective: where rank 0 cannot write, all raise."""
    parts = _Parts(folder) if dist.is_main() else None
    error = None
    for name in masters.shapes:
        for kind, flats in kinds.items():
            whole = masters.gathered(name, flats)
            if parts is None or error is not None:
                continue  # the others are gathering, too
            try:
                parts.add(f"{name}.{kind}", whole)
            except UserError as failure:
                error = failure
    with together(masters.device):
        if error is not None:
            raise error
        if parts is not None:
            parts.write()


def read_state(folder: Path, masters: Masters, kinds: dict[str, list[Tensor]]) -> None:
    """Fill the flat tensors with what `write_state` wrote, on any stage and number of ranks. A collective: where one
    rank finds a tensor missing or of another shape, all raise UserError naming it."""
    with together(masters.device):
        left = {f"{name}.{kind}": (name, flats) for name in masters.shapes for kind, flats in kinds.items()}
        for key, whole in _tensors(folder):
            if key not in left:
                continue
            name, flats = left.pop(key)
            if tuple(whole.shape) != masters.shapes[name]:
                raise UserError(f"{folder}: {key}", got=f"shape {tuple(whole.shape)}", want=masters.shapes[name])
            masters.put(name, flats, whole)
        if left:
            raise UserError(str(folder), got=f"{len(left)} tensor(s) are not there, among them {next(iter(left))}",
                            want="every parameter's master and moments")  # fmt: skip


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of every part, mapped from disk."""
    for path in sorted(folder.glob("part-*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise UserError(str(path), got=f"not a safetensors file ({error})", want="a part of a checkpoint") from None
