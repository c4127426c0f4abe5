"""Any S3-compatible bucket as an object store: checked sums, multipart with abort, conditional put, named errors.

Credentials come from the environment or the AWS chain and appear in no message.
"""

import base64
import binascii
import hashlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import botocore.exceptions as failures
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from dflash_train.config import StoreConfig, require, require_choice
from dflash_train.store.base import StoreUnavailable
from dflash_train.util.errors import UserError

MIN_PART_BYTES = 5 << 20  # S3's own limit
DELETE_KEYS = 1000  # in one request, as well
_MAY_PASS = ("SlowDown", "RequestTimeout", "BadDigest", "NoSuchUpload")  # the last: aborted, or its answer was lost
_CONFLICTS = ("409", "ConditionalRequestConflict", "OperationAborted")
_REFUSED = ("403", "401", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken",
            "AllAccessDisabled", "AccountProblem", "RequestTimeTooSkewed")  # fmt: skip


@dataclass
class Options:
    """checksum_mode: when_supported = CRC32 sent and compared with what the store returns; when_required = Content-MD5,
    which every S3 server checks, compared with the ETag (for servers without S3's newer checksums)."""

    endpoint_url: str | None = None  # null = AWS
    region: str | None = None  # null = AWS chain
    checksum_mode: str = "when_supported"  # when_supported | when_required
    addressing: str = "auto"  # auto | path | virtual
    multipart_bytes: int = 64 << 20  # larger files go up in parts of this size
    part_threads: int = 4
    max_connections: int = 64  # store.upload_threads x part_threads of them are used by uploads
    max_attempts: int = 5  # of one request, with boto3's backoff
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 60.0


def open_store(config: StoreConfig, name: str) -> "S3Store":
    """Store under `<store.root>/<name>/`; the root is s3://bucket or s3://bucket/prefix. No request is made yet."""
    options = Options(**config.options)
    address = urlsplit(config.root)
    require(address.scheme == "s3" and bool(address.netloc), "store.root", got=config.root, want="s3://bucket/prefix",
            fix="quote it in a shell: 'store.root=s3://bucket/prefix', or store=local for a folder")  # fmt: skip
    require_choice(options.checksum_mode, ("when_supported", "when_required"), "store.options.checksum_mode")
    require_choice(options.addressing, ("auto", "path", "virtual"), "store.options.addressing")
    require(options.multipart_bytes >= MIN_PART_BYTES, "store.options.multipart_bytes", got=options.multipart_bytes,
            want=f">= {MIN_PART_BYTES}, S3's smallest part")  # fmt: skip
    prefix = "/".join(part for part in (address.path.strip("/"), name) if part)
    return S3Store(address.netloc, prefix, options)


class S3Store:
    """See `base.ObjectStore`. Safe to use from many threads."""

    def __init__(self, bucket: str, prefix: str, options: Options):
        self.bucket, self.prefix, self.options = bucket, prefix, options
        self.url = f"s3://{bucket}/{prefix}"
        self._crc32 = options.checksum_mode == "when_supported"
        self._unfinished: dict[str, str] = {}  # multipart uploads of this object: id -> key
        try:
            self._client = boto3.client("s3", endpoint_url=options.endpoint_url, region_name=options.region,
                                        config=_client_config(options))  # fmt: skip
        except ValueError as error:  # botocore: "Invalid endpoint: ..."
            raise UserError("store.options.endpoint_url", got=self._endpoint, want="http(s)://host:port") from error

    def check(self) -> None:
        probe = f"check-{uuid.uuid4().hex[:12]}"
        with self._named_errors(probe):
            self._client.list_objects_v2(Bucket=self.bucket, Prefix=self._key(""), MaxKeys=1)
        first = self.put_bytes(probe, b"probe", if_absent=True)
        second = self.put_bytes(probe, b"probe", if_absent=True)
        self.delete(probe)
        if not first or second:
            raise UserError(self.url, got="a conditional PUT (If-None-Match: *) that overwrote an object",
                            want="a server with conditional writes, or two workers overwrite each other")  # fmt: skip

    def put_file(self, key: str, path: Path) -> None:
        size = os.path.getsize(path)
        with self._named_errors(key):
            if size > self.options.multipart_bytes:
                self._put_parts(key, path, size)
            else:
                self._put(key, Path(path).read_bytes())
            stored = self._client.head_object(Bucket=self.bucket, Key=self._key(key))["ContentLength"]
        if stored != size:
            raise StoreUnavailable(f"{self.url}/{key}", got=f"{stored} bytes after the upload", want=f"{size} bytes")

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        with self._named_errors(key):
            if not if_absent:
                self._put(key, data)
                return True
            for attempt in range(self.options.max_attempts):
                try:
                    self._put(key, data, IfNoneMatch="*")
                    return True
                except failures.ClientError as error:
                    code = _code(error)
                    if code in ("412", "PreconditionFailed"):
                        return False
                    if code not in _CONFLICTS or attempt + 1 == self.options.max_attempts:
                        raise
                    time.sleep(0.1 * 2**attempt)  # two writers at the very same moment: S3 asks for another try

    def get_bytes(self, key: str) -> bytes:
        with self._named_errors(key):
            return self._client.get_object(Bucket=self.bucket, Key=self._key(key))["Body"].read()

    def get_file(self, key: str, path: Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
        try:
            with self._named_errors(key):
                self._download(key, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def size(self, key: str) -> int | None:
        try:
            with self._named_errors(key):
                return self._client.head_object(Bucket=self.bucket, Key=self._key(key))["ContentLength"]
        except KeyError:
            return None

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        return sorted((row["Key"][len(self.prefix) + 1 :], row["Size"]) for row in self._objects(prefix))

    def older(self, prefix: str, older_than_s: float) -> Sequence[str]:
        latest = datetime.now(UTC) - timedelta(seconds=older_than_s)
        return sorted(
            row["Key"][len(self.prefix) + 1 :] for row in self._objects(prefix) if row["LastModified"] <= latest
        )

    def _objects(self, prefix: str) -> Iterator[dict]:
        """The entries of a listing, a page of a thousand at a time."""
        with self._named_errors(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self._key(prefix))
            for page in pages:
                yield from page.get("Contents", [])

    def delete(self, key: str) -> None:
        with self._named_errors(key):
            self._client.delete_object(Bucket=self.bucket, Key=self._key(key))

    def delete_many(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), DELETE_KEYS):
            some = keys[start : start + DELETE_KEYS]
            with self._named_errors(f"{some[0]} and {len(some) - 1} more"):
                answer = self._client.delete_objects(Bucket=self.bucket, Delete={
                    "Objects": [{"Key": self._key(key)} for key in some], "Quiet": True})  # fmt: skip
            for error in answer.get("Errors", []):
                raise UserError(f"{self.url}/{error.get('Key')}", got=f"{error.get('Code')} in DeleteObjects",
                                want="the object deleted", fix="credentials that may delete there")  # fmt: skip

    def free_bytes(self) -> int | None:
        return None

    def drop_unfinished(self, older_than_s: float) -> int:
        count = 0
        with self._named_errors(""):
            pages = self._client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self.bucket, Prefix=self._key("")):
                for upload in page.get("Uploads", []):
                    if (datetime.now(UTC) - upload["Initiated"]).total_seconds() >= older_than_s:
                        self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"],
                                                            UploadId=upload["UploadId"])  # fmt: skip
                        count += 1
        return count

    def abort_unfinished(self) -> int:
        count = 0
        for upload_id, key in list(self._unfinished.items()):
            with self._named_errors(key), suppress(self._client.exceptions.NoSuchUpload):
                self._client.abort_multipart_upload(Bucket=self.bucket, Key=self._key(key), UploadId=upload_id)
            self._unfinished.pop(upload_id, None)
            count += 1
        return count

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _download(self, key: str, path: Path) -> None:
        """One request for what is no larger than a part; else parts in parallel."""
        part = self.options.multipart_bytes
        answer = self._client.get_object(Bucket=self.bucket, Key=self._key(key))
        with closing(answer["Body"]) as body:
            if answer["ContentLength"] <= part:
                path.write_bytes(body.read())
                return
        transfer = TransferConfig(multipart_threshold=part, multipart_chunksize=part,
                                  max_concurrency=self.options.part_threads)  # fmt: skip
        self._client.download_file(self.bucket, self._key(key), str(path), Config=transfer)

    def _put(self, key: str, data: bytes, **condition: str) -> None:
        where = {"Bucket": self.bucket, "Key": self._key(key)}
        answer = self._client.put_object(**where, Body=data, **self._sums(data), **condition)
        self._confirm(key, data, answer)

    def _put_parts(self, key: str, path: Path, size: int) -> None:
        """Multipart upload, every part's checksum confirmed; aborted on any failure, so no part is left to pay for."""
        where = {"Bucket": self.bucket, "Key": self._key(key)}
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._crc32 else {}
        where["UploadId"] = self._client.create_multipart_upload(**where, **algorithm)["UploadId"]
        self._unfinished[where["UploadId"]] = key
        part_bytes = max(self.options.multipart_bytes, -(-size // 10_000))  # at most 10,000 parts

        def put_part(number: int) -> dict:
            with open(path, "rb") as f:
                f.seek((number - 1) * part_bytes)
                data = f.read(part_bytes)
            answer = self._client.upload_part(**where, PartNumber=number, Body=data, **self._sums(data))
            self._confirm(key, data, answer)
            part = {"PartNumber": number, "ETag": answer["ETag"]}
            return part | ({"ChecksumCRC32": answer["ChecksumCRC32"]} if self._crc32 else {})

        try:
            with ThreadPoolExecutor(self.options.part_threads) as pool:
                parts = list(pool.map(put_part, range(1, -(-size // part_bytes) + 1)))
            self._client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts})
        except BaseException:
            # An abort that fails is made again at the end of the run; what outlives a killed one, verify=true drops.
            with suppress(failures.ClientError, failures.BotoCoreError):
                self._client.abort_multipart_upload(**where)
                self._unfinished.pop(where["UploadId"], None)
            raise
        self._unfinished.pop(where["UploadId"], None)

    def _sums(self, data: bytes) -> dict[str, str]:
        if self._crc32:
            return {"ChecksumAlgorithm": "CRC32", "ChecksumCRC32": _crc32(data)}
        return {"ContentMD5": base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()}

    def _confirm(self, key: str, data: bytes, answer: dict) -> None:
        """Compare what the store says it has with what we sent."""
        name = f"{self.url}/{key}"
        if self._crc32:
            if "ChecksumCRC32" not in answer:
                raise UserError(name, got="no checksum in the store's answer", want="its CRC32",
                                fix="store.options.checksum_mode=when_required")  # fmt: skip
            got, want = answer["ChecksumCRC32"], _crc32(data)
        else:
            etag = answer["ETag"].strip('"')
            want = hashlib.md5(data, usedforsecurity=False).hexdigest()
            # With KMS encryption the ETag is no MD5; the server has still checked Content-MD5.
            got = want if answer.get("ServerSideEncryption", "AES256") != "AES256" else etag
        if got != want:
            raise StoreUnavailable(name, got=f"checksum {got} from the store", want=f"{want}, of what was sent")

    @property
    def _endpoint(self) -> str:
        address = urlsplit(self.options.endpoint_url or "")
        return f"{address.scheme}://{address.hostname}:{address.port}" if address.hostname else "AWS"

    @contextmanager
    def _named_errors(self, key: str) -> Iterator[None]:
        """Turn boto3's exceptions into KeyError (absent), UserError (final) or StoreUnavailable (may pass)."""
        name = f"{self.url}/{key}"
        try:
            yield
        except failures.ClientError as error:
            raise _client_failure(error, name, self.bucket) from error
        except (failures.NoCredentialsError, failures.PartialCredentialsError, failures.CredentialRetrievalError,
                failures.ProfileNotFound) as error:  # fmt: skip
            raise UserError(
                f"credentials for {self.url}", got="none that can be used", want="an access key and its secret",
                fix="export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=..., or AWS_PROFILE=...",
            ) from error  # fmt: skip
        except failures.ParamValidationError as error:
            raise UserError("store.root", got=self.url, want="a valid bucket name and prefix") from error
        except (failures.BotoCoreError, Boto3Error, ConnectionError) as error:  # not OSError: that is our own disk
            raise StoreUnavailable(name, got=f"{type(error).__name__} from {self._endpoint}", want="an answer",
                                   fix="check the network and store.options.endpoint_url") from error  # fmt: skip


def _client_config(options: Options) -> Config:
    return Config(
        request_checksum_calculation=options.checksum_mode,
        response_checksum_validation=options.checksum_mode,
        retries={"max_attempts": options.max_attempts, "mode": "standard"},
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        max_pool_connections=options.max_connections,
        s3={"addressing_style": options.addressing},
    )


def _code(error: failures.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _client_failure(error: failures.ClientError, name: str, bucket: str) -> Exception:
    code = _code(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code == "NoSuchBucket":
        return UserError(
            f"bucket {bucket}", got="it does not exist", want="an existing bucket",
            fix=f"aws s3 mb s3://{bucket} (with --endpoint-url for your own server), or another store.root",
        )  # fmt: skip
    if code in ("NoSuchKey", "404", "NotFound"):
        return KeyError(name)
    if code in _REFUSED or status in (401, 403):
        return UserError(
            name, got=f"refused by the store: {code} in {error.operation_name}",
            want="credentials that may list, read, write and delete there",
            fix="check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) and the bucket's policy",
        )  # fmt: skip
    may_pass = status >= 500 or status == 429 or code in _MAY_PASS
    kind = StoreUnavailable if may_pass else UserError
    return kind(name, got=f"{code} (HTTP {status}) in {error.operation_name}", want="success")


def _crc32(data: bytes) -> str:
    return base64.b64encode(binascii.crc32(data).to_bytes(4, "big")).decode()
