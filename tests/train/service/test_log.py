"""The training log: calls are logged once, keep their first answer, and survive the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.errors import ConfigError, StorageError
from chairlift_train.service.compute.calls import AdapterConfig
from chairlift_train.service.log.records import CallAnswer, CheckpointRecord, ModelRecord, SamplerRecord, SessionRecord
from chairlift_train.service.log.store import ReusedSeqError, TrainingLog

MODEL = ModelRecord("s:train:0", "s", "ann", "org/tiny", AdapterConfig(8, 7, True, False, True), "{}", 12.5)


def opened(path: Path, max_bytes: int = 1 << 40) -> TrainingLog:
    return TrainingLog(path / "runs", max_bytes)


def test_everything_is_there_after_the_log_is_opened_again(tmp_path: Path) -> None:
    log = opened(tmp_path)
    session = SessionRecord("s", "ann", 1.0, '{"a": "b"}', "mine")
    checkpoint = CheckpointRecord("s:train:0", "weights", "one", "ann", 3.0, 100, None, "{}", True)
    sampler = SamplerRecord("s:sample:0", "s", "ann", checkpoint.path, "/d")
    log.add_session(session)
    log.add_model(MODEL)
    log.finish([], checkpoint=checkpoint, sampler=sampler)
    assert log.append("s:train:0", 2, "optim_step", b"two")
    assert log.append("s:train:0", 1, "pass", b"one")
    log.finish([("s:train:0", 1, CallAnswer("proto", b"\x01"))])
    log.close()
    log = opened(tmp_path)
    assert log.session("s") == session and log.sessions(ended=False) == [session]
    assert log.model("s:train:0") == MODEL and log.models(owner="ann") == [MODEL] and log.models(owner="bob") == []
    assert log.checkpoint("s:train:0", "weights", "one") == checkpoint
    assert checkpoint.path == "tinker://s:train:0/weights/one"
    assert log.sampler("s:sample:0") == sampler and log.samplers("s") == [sampler]
    calls = log.calls_after("s:train:0", -1)
    assert [(call.seq_id, call.kind, call.body) for call in calls] == [(1, "pass", b"one"), (2, "optim_step", b"two")]
    assert [call.answer for call in calls] == [CallAnswer("proto", b"\x01"), None]
    log.close()


def test_a_repeated_call_is_known_and_another_with_its_id_is_refused(tmp_path: Path) -> None:
    log = opened(tmp_path)
    assert log.append("m", 1, "pass", b"body")
    assert not log.append("m", 1, "pass", b"body")
    with pytest.raises(ReusedSeqError, match="call 1 of m was another call before"):
        log.append("m", 1, "pass", b"other")
    with pytest.raises(ReusedSeqError):
        log.append("m", 1, "optim_step", b"body")
    assert log.append("m", 2, "pass", b"body")
    log.close()


def test_a_call_keeps_its_first_answer(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.append("m", 1, "pass", b"body")
    log.finish([("m", 1, CallAnswer("json", b"1"))])
    log.finish([("m", 1, CallAnswer("error", b"2"))])
    call = log.call("m", 1)
    assert call is not None and call.answer == CallAnswer("json", b"1")
    log.close()


def test_a_saved_state_forgets_requests_and_keeps_results(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.add_model(MODEL)
    for seq_id in (1, 2, 3):
        log.append(MODEL.model_id, seq_id, "pass", b"body")
        log.finish([(MODEL.model_id, seq_id, CallAnswer("json", b"{}"))])
    log.state_saved(MODEL.model_id, 2)
    calls = log.calls_after(MODEL.model_id, 0)
    assert [call.body for call in calls] == [None, None, b"body"]
    assert all(call.answer is not None for call in calls)
    assert not log.append(MODEL.model_id, 1, "pass", b"body"), "a retry of an old call is still known"
    model = log.model(MODEL.model_id)
    assert model is not None and model.state_seq == 2
    log.close()


def test_requests_that_need_not_be_computed_again_are_forgotten(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.add_model(MODEL)
    for seq_id, (kind, form) in enumerate((("pass", "proto"), ("forward", "proto"), ("pass", "error"), ("pass", ""))):
        log.append(MODEL.model_id, seq_id, kind, b"body")
        if form:
            log.finish([(MODEL.model_id, seq_id, CallAnswer(form, b"x"))])  # type: ignore[arg-type]
    assert [call.body for call in log.calls_after(MODEL.model_id, -1)] == [b"body", None, None, b"body"]
    log.end_model(MODEL.model_id)
    assert [call.body for call in log.calls_after(MODEL.model_id, -1)] == [None] * 4
    log.close()


def test_dropped_results_keep_their_calls(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for seq_id, at in enumerate((1.0, 5.0, 9.0)):
        log.append("m", seq_id, "pass", bytes(50_000))
        log.finish([("m", seq_id, CallAnswer("proto", bytes(100_000)))], now=at)
    before = log.num_bytes()
    log.drop_results([("m", 2)], before=5.0)
    calls = log.calls_after("m", -1)
    assert [(call.is_dropped, call.body is not None) for call in calls] == [(True, True), (False, True), (True, True)]
    assert [call.answer for call in calls] == [CallAnswer("proto", each) for each in (b"", bytes(100_000), b"")]
    assert before - log.num_bytes() > 190_000
    log.close()


def test_what_would_exceed_the_quota_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    log = opened(tmp_path, max_bytes=190_000)
    with pytest.raises(StorageError, match="at most 190,000 are kept; a call has 150,000 more"):
        log.append("m", 1, "pass", bytes(150_000))
    assert log.call("m", 1) is None
    assert log.append("m", 1, "pass", bytes(1_000))
    log.close()


def test_two_servers_never_share_a_log(tmp_path: Path) -> None:
    log = opened(tmp_path)
    with pytest.raises(ConfigError, match="another server uses the training runs in"):
        opened(tmp_path)
    log.close()
    opened(tmp_path).close()


def test_a_place_that_cannot_be_a_directory_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match="give another --training-dir"):
        opened(tmp_path)


def test_an_ended_session_ends_its_models(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.add_session(SessionRecord("s", "ann", 1.0, "{}", ""))
    log.add_model(MODEL)
    log.end_session("s")
    assert log.sessions(ended=False) == [] and log.models(ended=False) == []
    assert [model.model_id for model in log.models(ended=True)] == [MODEL.model_id]
    log.close()
