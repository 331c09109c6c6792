"""What the trainer's side makes of answers that no vLLM server of ours would give."""

import pytest

pytest.importorskip("trl")
requests = pytest.importorskip("requests")

from polopt.ext.vllm.client import _answer
from polopt.ext.vllm.errors import ServerError


@pytest.mark.parametrize("page", [b"", b"<html>", b"{"])
def test_a_page_that_is_no_json_is_an_error_that_all_ranks_hear_of(page):
    """Only a `ServerError` is told to the ranks that wait for the main one."""
    answer = requests.Response()
    answer.status_code, answer._content = 200, page
    with pytest.raises(ServerError, match="the vLLM server did not answer: "):
        _answer(lambda: answer)
