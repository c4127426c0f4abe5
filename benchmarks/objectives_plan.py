"""What `objectives.py` compares, at which size, and where each thing lies: arms, learning rates, seeds, words, folders.

    ce_decay         this project's default objective and anchors
    specforge        specforge's objective and anchors as its trainer leaves them: cross-entropy without decay
    speculators      speculators' as its trainer resolves them for dflash: cross-entropy with D-PACE weights
    dpace            this project's D-PACE
    fp8              ce_decay on eight-bit states
    specforge_decay  specforge with our gamma for its decay, as its authors publish it
    speculators_kl   speculators' earlier recipe: KL with decay, gamma 4
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from hydra import compose, initialize_config_dir

from dflash_train import cli
from dflash_train.config import Run, TrainRun
from dflash_train.drafter.loss import default_gamma
from dflash_train.util.errors import UserError


@dataclass(frozen=True)
class Arm:
    """kind: whose objective (objectives_losses.KINDS). settings: its own. fp8: trained on eight-bit states."""

    kind: str = "ours"
    settings: dict = field(default_factory=dict)
    fp8: bool = False


BASE = "ce_decay"
ARMS = {
    BASE: Arm(),
    "specforge": Arm("specforge", {"decay": False}),
    "speculators": Arm("speculators", {"loss_fn": "ce", "per_position_loss_weight": "dpace"}),
    "dpace": Arm("ours", {"loss": "dpace"}),
    "fp8": Arm(fp8=True),
    "specforge_decay": Arm("specforge", {"decay": True}),
    "speculators_kl": Arm("speculators", {"loss_fn": "kl_div", "per_position_loss_weight": "fixed-exp-decay"}),
}


@dataclass(frozen=True)
class Plan:
    """words: of every stage (data, target, answers, hardware); extract, train: of that stage beside them.

    choose, walk: held-out samples on which the learning rate is chosen, and other ones on which drafters are compared.
    processes: side by side, each with `threads` threads (null: torch's own number). under: runs/, or pace/ for the few
    steps that tell how many fit.
    """

    work: Path
    words: list[str]
    extract: list[str]
    train: list[str]
    lrs: list[float]
    steps: int
    choose: int
    walk: int
    tasks: list[str]
    prompts: int
    new_tokens: int
    processes: int
    threads: int | None = None
    arms: list[str] = field(default_factory=lambda: list(ARMS)[:5])
    seeds: list[int] = field(default_factory=lambda: [0, 1])
    under: str = "runs"

    def specs(self) -> list["Spec"]:
        """Every run, the first arms first, so that a run cut short compares those."""
        return [Spec(arm, lr, seed) for arm in self.arms for lr in self.lrs for seed in self.seeds]

    def store_root(self, fp8: bool = False) -> Path:
        return self.work / ("store_fp8" if fp8 else "store")

    def folder(self, spec: "Spec") -> Path:
        return self.work / self.under / spec.name

    def short(self, steps: int) -> "Plan":
        """The same runs with so few steps that they show their pace alone."""
        return replace(self, under="pace", steps=steps, choose=1)

    def facts(self, spec: "Spec") -> dict:
        """What a finished run must agree with, or its figures are those of another experiment."""
        return {"arm": spec.arm, "lr": spec.lr, "seed": spec.seed, "steps": self.steps, "choose": self.choose,
                "words": [*self.words, *self.train]}  # fmt: skip

    def train_run(self, spec: "Spec") -> TrainRun:
        """The run whose store, drafter, rows, optimizer and schedule are used; also with another's objective."""
        arm = ARMS[spec.arm]
        run = self.build("train", [*self.train, f"train.lr={spec.lr}", f"train.seed={spec.seed}",
                                   f"train.max_steps={self.steps}", f"train.output_dir={self.folder(spec)}",
                                   f"train.loss={arm.settings.get('loss', 'ce_decay')}",
                                   f"store.root={self.store_root(arm.fp8)}"])  # fmt: skip
        return run

    def build(self, stage: str, words: list[str]) -> Run:
        cli.register_recipes()
        with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
            return cli.build_run(stage, compose(stage, cli.rewrite_argv([*self.words, *words])))


@dataclass(frozen=True)
class Spec:
    """One training run."""

    arm: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-lr{self.lr:g}-seed{self.seed}"


def gamma_of(run: TrainRun, block_size: int) -> float:
    """The decay of this project's default objective."""
    return default_gamma(block_size) if run.train.gamma is None else run.train.gamma


# ---------------------------------------------------------------- sizes

TASKS = ["humaneval", "gsm8k", "mtbench"]
ANSWERS = ["target=smollm2_135m", "data.answers.greedy_share=1"]  # greedy: what the walk simulates
STORE = ["store=local", "store.last_hidden=true", "extract.monitor.enabled=false"]
GPU_DATA = ["data=demo", "+data.sources.evals.options.per_folder=40", "data.sources.evals.take=5500",
            "data.sources.stdlib.take=2500", "data.heldout_fraction=0.09", "data.allow_short=true"]  # fmt: skip
CPU_DATA = ["data=demo", "limit=280", "data.max_prompt_chars=240", "data.allow_short=true",
            "data.heldout_fraction=0.1"]  # fmt: skip


def gpu_plan(work: Path, data: list[str]) -> Plan:
    """One H200: five layers, blocks of 8, four rows of 2,048 tokens a step, several runs side by side."""
    words = [*(data or GPU_DATA), *ANSWERS, f"work_dir={work}", "target.dtype=bfloat16",
             "data.answers.max_new_tokens=128", "data.answers.batch_size=1024"]  # fmt: skip
    return Plan(
        work, words, [*STORE, "extract.max_tokens=1024", "extract.batch_tokens=65536"],
        ["train=gpu_small", "drafter=small_b8", "train.prefetch_rows=16"],
        lrs=[6e-4, 1.2e-3], steps=1500, choose=100, walk=220, tasks=TASKS, prompts=32, new_tokens=128, processes=10,
        threads=2,
    )  # fmt: skip


def cpu_plan(work: Path, data: list[str]) -> Plan:
    """Two cores: the demo's drafter of one layer, blocks of 4, one row of 512 tokens a step."""
    words = [*(data or CPU_DATA), *ANSWERS, f"work_dir={work}", "target.dtype=float32",
             "data.answers.max_new_tokens=48", "data.answers.batch_size=64", "hardware=cpu",
             "hardware.num_threads=1"]  # fmt: skip
    return Plan(
        work, words, [*STORE, "extract=small"],
        ["train=demo", "drafter=small", "train.num_anchors=48"],
        lrs=[1e-3, 2e-3], steps=120, choose=64, walk=200, tasks=TASKS, prompts=32, new_tokens=32, processes=2,
        threads=1,
    )  # fmt: skip


def tiny_plan(work: Path, data: list[str]) -> Plan:
    """A random model in seconds: no result. On the CPU, unless data names other hardware; in bfloat16 then."""
    if not data:
        raise UserError("--data", got="nothing, with --size tiny", want="data=mine data.sources.mine.path=... task=...")
    tasks = [word.removeprefix("task=") for word in data if word.startswith("task=")]
    words = [*(word for word in data if not word.startswith("task=")), "target=tiny", f"work_dir={work}",
             "data.answers.greedy_share=1", "data.answers.max_new_tokens=24", "data.answers.max_repetition=1",
             "data.answers.probe=false", "data.heldout_fraction=0.5", "data.allow_short=true", "data.decontaminate=[]",
             "data.num_processes=1"]  # fmt: skip
    dtype = "bfloat16"
    if not any(word.startswith("hardware=") for word in words):
        words, dtype = [*words, "hardware=cpu", "hardware.num_threads=1"], "float32"
    words += [f"target.dtype={dtype}"]
    return Plan(
        work, words, [*STORE, "extract.max_tokens=256", "extract.layer_ids=[0,1]"],
        ["drafter=tiny", "train.row_tokens=256", "train.global_batch=2", "train.micro_batch=2", "train.num_anchors=8",
         f"train.dtype={dtype}", "train.head_chunk_blocks=4", "train.epochs=50"],
        lrs=[1e-3, 4e-3], steps=4, choose=3, walk=4, tasks=tasks, prompts=2, new_tokens=12, processes=1, threads=1,
    )  # fmt: skip


SIZES = {"gpu": gpu_plan, "cpu": cpu_plan, "tiny": tiny_plan}
