"""Errors cross from one process to another as a code and a text, and are the same there."""

from __future__ import annotations

import pytest

from kvstream.errors import ConfigError, KVStreamError, Refused, UnknownStream, UnknownWorker, from_code


@pytest.mark.parametrize(
    "error",
    [ConfigError("budget", "must be a number"), UnknownWorker("to", "nobody"), UnknownStream("stream", "'r' is not")],
)
def test_errors_that_name_a_field_come_back_with_it(error: ConfigError) -> None:
    again = from_code(error.code, str(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert isinstance(again, ConfigError)
    assert again.field == error.field


def test_other_codes() -> None:
    refused = from_code("refused", "full", retry_after=0.5)
    assert isinstance(refused, Refused)
    assert refused.retry_after == 0.5
    assert type(from_code("of-the-future", "what")) is KVStreamError
