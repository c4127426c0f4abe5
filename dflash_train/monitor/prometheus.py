"""A snapshot in the Prometheus text format 0.0.4: families with HELP and TYPE, labels escaped, unknowns left out."""

from collections.abc import Iterator

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "dflash_"

Series = tuple[dict[str, object], float | int | bool | None]

# name, type, help, path in the snapshot
_PLAIN = (
    ("elapsed_seconds", "gauge", "Seconds since the run began.", "elapsed_s"),
    ("eta_seconds", "gauge", "Seconds left at the present rate.", "eta_s"),
    ("samples", "gauge", "Samples captured that count.", "samples.done"),
    ("samples_expected", "gauge", "Samples this run has to capture.", "samples.total"),
    ("samples_per_second", "gauge", "Samples a second over the last minute.", "samples.per_s"),
    ("tokens", "gauge", "Tokens captured that count.", "tokens.done"),
    ("tokens_expected", "gauge", "Tokens this run has to capture.", "tokens.total"),
    ("captured_tokens_total", "counter", "Tokens captured, those done twice counted twice.", "tokens.captured"),
    ("tokens_per_second", "gauge", "Tokens a second over the last minute.", "tokens.per_s"),
    ("flop_utilisation_ratio", "gauge", "Model FLOPs a second over the peak of the live workers.", "flops.utilisation"),
    ("staging_own_bytes", "gauge", "Bytes of this run in the staging folder.", "staging.own_bytes"),
    ("staging_used_bytes", "gauge", "Bytes of everybody there.", "staging.used_bytes"),
    ("staging_size_bytes", "gauge", "Size of the staging folder's file system.", "staging.total_bytes"),
    ("staging_high_water_ratio", "gauge", "Above this fill capture waits.", "staging.high_water"),
    ("staging_paused", "gauge", "1 while capture waits for the staging folder.", "staging.paused"),
    ("staging_paused_seconds_total", "counter", "Seconds it has waited.", "staging.paused_s"),
    ("uploads_total", "counter", "Shards uploaded by this run.", "uploads.count"),
    ("uploaded_bytes_total", "counter", "Bytes uploaded by this run.", "uploads.bytes"),
    ("upload_bytes_per_second", "gauge", "Bytes a second over the last minute.", "uploads.per_s"),
    ("upload_backlog_shards", "gauge", "Shards staged and not yet uploaded.", "uploads.backlog_shards"),
    ("upload_backlog_bytes", "gauge", "Bytes staged and not yet uploaded.", "uploads.backlog_bytes"),
    ("errors_total", "counter", "Error lines.", "errors.total"),
)
# name, type, help, label, path of a {label value: number}
_BY_KEY = (
    ("shards", "gauge", "Shards of the store by status.", "status", "shards.counts"),
    ("retries_total", "counter", "Tries after the first, by reason.", "reason", "retries.by_reason"),
    ("dropped_rows_total", "counter", "Rows left out, by reason.", "reason", "dropped.by_reason"),
    ("source_samples", "gauge", "Samples captured, by data source.", "source", "sources"),
)
# name, type, help, key in a worker's row
_WORKERS = (
    ("worker_tokens_total", "counter", "Tokens captured by a worker.", "tokens"),
    ("worker_tokens_per_second", "gauge", "Its tokens a second over the last minute.", "tokens_per_s"),
    ("worker_seen_seconds", "gauge", "Seconds since it last reported.", "seen_s"),
    ("worker_paused_ratio", "gauge", "Part of its working time it waited for room.", "paused_share"),
)
_GPUS = (
    ("gpu_utilisation_ratio", "gauge", "Share of time with a kernel running.", "utilisation"),
    ("gpu_memory_used_bytes", "gauge", "GPU memory in use.", "memory_used_bytes"),
    ("gpu_memory_size_bytes", "gauge", "GPU memory.", "memory_total_bytes"),
    ("gpu_power_watts", "gauge", "Power draw.", "power_w"),
    ("gpu_temperature_celsius", "gauge", "Temperature.", "temperature_c"),
)


def exposition(snapshot: dict) -> str:
    """The whole text, one family after the other."""
    lines = []
    for name, kind, text, series in _families(snapshot):
        rows = [f"{PREFIX}{name}{_labels(labels)} {_number(value)}" for labels, value in series if value is not None]
        if rows:
            lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}", *rows]
    return "\n".join(lines) + "\n"


def _families(snapshot: dict) -> Iterator[tuple[str, str, str, list[Series]]]:
    about = {key: snapshot[key] for key in ("stage", "run", "host", "status")}
    yield "run_info", "gauge", "The run, and whether it is running, done or failed.", [(about, 1)]
    for name, kind, text, path in _PLAIN:
        yield name, kind, text, [({}, _at(snapshot, path))]
    for name, kind, text, label, path in _BY_KEY:
        yield name, kind, text, [({label: key}, count) for key, count in _at(snapshot, path).items()]
    workers, gpus = snapshot["workers"], snapshot["gpus"]["devices"]
    statuses = [({"worker": row["name"], "device": row["device"], "status": row["status"]}, 1) for row in workers]
    yield "worker_status", "gauge", "1 for the status a worker is in.", statuses
    for name, kind, text, key in _WORKERS:
        yield name, kind, text, [({"worker": row["name"]}, row[key]) for row in workers]
    for name, kind, text, key in _GPUS:
        yield name, kind, text, [({"gpu": row["index"], "name": row["name"]}, row[key]) for row in gpus]


def _at(snapshot: dict, path: str):
    """The value at 'a.b'; None where 'a' is not known yet."""
    value = snapshot
    for key in path.split("."):
        value = None if value is None else value[key]
    return value


def _labels(labels: dict[str, object]) -> str:
    if not labels:
        return ""
    escaped = {
        name: str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def _number(value: float | int | bool) -> str:
    return repr(float(value)) if isinstance(value, float) else str(int(value))
