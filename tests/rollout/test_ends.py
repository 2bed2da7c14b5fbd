import torch

from lit_rl.rollout.ends import StopStrings

WORDS = ["", "a", "b", "ab", "é", "xyz"]


def words(ids: list[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def complete(stop: StopStrings, rows: list[list[int]], is_open: list[bool] | None = None) -> list[bool]:
    return stop.are_complete(torch.tensor(rows), torch.tensor(is_open or [True] * len(rows))).tolist()


def test_a_string_may_span_tokens_and_begin_or_end_inside_one() -> None:
    stop = StopStrings(["ba"], words)
    assert complete(stop, [[2, 1], [3, 3], [1, 2], [5, 3]]) == [True, True, False, False]


def test_any_of_several_strings_counts() -> None:
    assert complete(StopStrings(["zz", "y"], words), [[5], [3]]) == [True, False]


def test_closed_rows_are_not_looked_at() -> None:
    assert complete(StopStrings(["a"], words), [[1], [1]], [False, True]) == [False, True]


def test_tokens_without_text_do_not_hide_a_string() -> None:
    assert complete(StopStrings(["ba"], words), [[2] + [0] * 30 + [1]]) == [True]


def test_only_the_tail_is_decoded() -> None:
    seen: list[int] = []

    def decode(ids: list[int]) -> str:
        seen.append(len(ids))
        return words(ids)

    complete(StopStrings(["aa"], decode), [[2] * 500])
    assert seen == [6]
