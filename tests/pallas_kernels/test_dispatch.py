"""The implementation contract: names never fall back, None walks the platform's list, the choice is logged once."""

import logging

import pytest

from pallas_kernels import dispatch as dispatch_module
from pallas_kernels.dispatch import dispatch


def refuse(*args, **kwargs):
    raise NotImplementedError("needs an accelerator")


def answer(name):
    return lambda *args, **kwargs: (name, args, kwargs)


@pytest.fixture(autouse=True)
def forget_what_was_logged():
    dispatch_module._log_choice.cache_clear()


@pytest.fixture
def platform(monkeypatch):
    return lambda name: monkeypatch.setattr(dispatch_module.jax, "default_backend", lambda: name)


def test_none_takes_the_first_offered_of_the_platform(platform):
    offered = {name: answer(name) for name in ("reference", "xla", "pallas_tpu", "pallas_gpu")}
    for name, expected in (("cpu", "xla"), ("gpu", "pallas_gpu"), ("tpu", "pallas_tpu"), ("metal", "xla")):
        platform(name)
        assert dispatch("op", offered, None, 1, key=2) == (expected, (1,), {"key": 2})


def test_none_passes_over_what_refuses_and_what_is_not_offered(platform):
    platform("gpu")
    assert dispatch("op", {"pallas_gpu": refuse, "xla": answer("xla")}, None)[0] == "xla"
    assert dispatch("op", {"xla": answer("xla")}, None)[0] == "xla"


def test_none_fails_when_all_refuse(platform):
    platform("tpu")
    with pytest.raises(NotImplementedError, match="op: no implementation .* tpu .*xla: needs an accelerator"):
        dispatch("op", {"reference": answer("reference"), "xla": refuse}, None)


def test_a_name_never_falls_back():
    with pytest.raises(NotImplementedError, match="needs an accelerator"):
        dispatch("op", {"pallas_gpu": refuse, "xla": answer("xla")}, "pallas_gpu")
    assert dispatch("op", {"reference": answer("reference"), "xla": refuse}, "reference")[0] == "reference"


def test_an_unknown_name_lists_the_offered_ones():
    with pytest.raises(ValueError, match="op: implementation='xlaa' .*: pallas_gpu, xla$"):
        dispatch("op", {"xla": answer("xla"), "pallas_gpu": refuse}, "xlaa")


def test_the_choice_is_logged_once_per_op(platform, caplog):
    platform("gpu")
    offered = {"pallas_gpu": refuse, "xla": answer("xla")}
    with caplog.at_level(logging.INFO, logger="pallas_kernels.dispatch"):
        for op in ("first", "first", "second"):
            dispatch(op, offered, None)
    assert [record.getMessage() for record in caplog.records] == [
        "first: implementation 'xla' on gpu (pallas_gpu: needs an accelerator)",
        "second: implementation 'xla' on gpu (pallas_gpu: needs an accelerator)",
    ]
