"""What a data card says of origins: who wrote the prompts, and all that it takes to make the same rows again."""

from dflash_train.data.answers.identity import flat
from dflash_train.data.card.parts import Section, Table

SILENCE = "Of the other sources the recipe names no model; their own cards may say more."


def makers(mix: dict) -> Section:
    """Which sources' prompts a model wrote."""
    sources = mix["config"]["data"]["sources"]
    rows = [[name, sources[name]["prompts_by"]] for name in mix["sources"] if sources[name]["prompts_by"]]
    if not rows:
        return Section("Who wrote the prompts", ["The recipe names no model for any source."])
    notes = ["The target writes every answer anew, but these prompts carry the models that made them.", SILENCE]
    return Section("Who wrote the prompts", notes, [Table("", ["source", "prompts made with"], rows)])


def provenance(mix: dict, answers: dict | None) -> Section:
    """Everything that it takes to make the same rows again."""
    sources = mix["config"]["data"]["sources"]
    rows = []
    for name, entry in mix["sources"].items():
        where = _origin(entry, sources[name])
        rows.append([name, entry["kind"], where, entry["revision"] or "", entry["license"], entry["bucket"]])
    made = [
        ["recipe", mix["recipe"]],
        ["recipe hash", mix["recipe_hash"]],
        ["seed", str(mix["seed"])],
        ["code", mix["code_version"]],
        *[[f"sha256 of {name}", fact["sha256"]] for name, fact in mix["files"].items()],
        *[[f"commit of {name}", commit] for name, commit in mix["evaluation_commits"].items()],
    ]
    tables = [Table("The mix", ["", ""], made)]
    if answers:
        served = {f"server {name}": facts for name, facts in answers["servers"].items()}
        facts = flat({"code": answers["provenance"]["code_version"], **answers["identity"], **served})
        tables.append(Table("The answers", ["", ""], [[key, str(value)] for key, value in facts.items()]))
    columns = ["source", "kind", "from", "revision", "licence of the set", "bucket"]
    return Section("Provenance", [], [*tables, Table("Sources", columns, rows)])


def _origin(entry: dict, config: dict) -> str:
    if entry["kind"] == "hub":
        return " ".join(filter(None, (config["path"], config["subset"], config["split"])))
    if config["path"]:
        return config["path"]
    options = config["options"]
    return f"{options['package']} {options['version']}" if "package" in options else "Python's standard library"
