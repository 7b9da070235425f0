"""Built-in rows."""

from __future__ import annotations

import pytest

from hf_gnmr.evaluation.smoke import smoke_text
from hf_gnmr.evaluation.tasks import TASKS


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_built_in_rows_are_the_same_each_time_and_pass_the_checks_of_their_task(task):
    splits = task.builtin()
    assert splits == task.builtin()
    assert splits.keys() == task.files.keys()
    assert [task.row_error(row) for rows in splits.values() for row in rows] == [None] * sum(map(len, splits.values()))


def test_the_text_is_the_articles_in_order():
    titles = [smoke_text().index(f" = {title} = \n") for title in ("The Mill", "The Harbour", "The Orchard")]
    assert titles == sorted(titles) and titles[0] == 0
