"""SGLangServer and what all server engines share, against stand-ins that answer with a transformers model."""

from collections.abc import Iterator

import pytest
import torch

from lit_rl.errors import ConfigError
from lit_rl.models.roles import named_base_tensors
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.sglang import SGLangServer

from .sglang_stand_in import StandInSGLang
from .tiny import (
    END,
    PAD,
    RAGGED,
    bound,
    completions,
    generate,
    llama,
    numbers_as_text,
    plain_logps,
    prompts_of,
)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def server(request: pytest.FixtureRequest) -> Iterator[StandInSGLang]:
    server = StandInSGLang(tie_word_embeddings=request.param)
    yield server
    server.stop()


@pytest.fixture
def pair() -> Iterator[list[StandInSGLang]]:
    servers = [StandInSGLang(), StandInSGLang()]
    yield servers
    for server in servers:
        server.stop()


def bound_to(servers: list[StandInSGLang], model, **settings) -> SGLangServer:
    engine = SGLangServer(base_url=[server.url for server in servers], **settings)
    engine.bind(model, end_token_ids=[END], pad_token_id=PAD, decode=numbers_as_text)
    return engine


def test_after_every_sync_it_writes_with_the_new_weights(server: StandInSGLang) -> None:
    model = llama(seed=5, **server.shape)
    engine = bound_to([server], model)
    for version in range(1, 4):
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        engine.sync_weights(named_base_tensors(model), version)
        greedy = generate(engine, temperature=0.0, ignore_eos=True)
        assert completions(greedy) == completions(generate(bound(model), temperature=0.0, ignore_eos=True))
        drawn = generate(engine, G=4, temperature=0.7)
        assert drawn.policy_version.unique().tolist() == [version]
        expected = plain_logps(model, drawn, temperature=0.7)
        torch.testing.assert_close(drawn.rollout_logps, expected, atol=1e-4, rtol=0)
        again = generate(engine, G=4, temperature=0.7)
        assert completions(again) == completions(drawn), "the seed is the request's own"
    assert len({tuple(row) for row in completions(drawn)[:4]}) > 1
    engine.close()


def test_given_tokens_are_scored_under_another_prompt(server: StandInSGLang) -> None:
    model = llama(seed=6, **server.shape)
    engine = bound_to([server], model)
    engine.sync_weights(named_base_tensors(model), 1)
    rows = generate(engine, G=2)
    other = prompts_of([[4, 4, 8], [9], [3, 17, 5, 6, 2]]).repeat(2)
    rows.prompt_ids, rows.prompt_len = other.prompt_ids, other.prompt_len
    expected = bound(model).score(rows, topk=3)
    for found, right in zip(engine.score(rows, topk=3), expected, strict=True):
        torch.testing.assert_close(found, right, atol=1e-5, rtol=0)
    torch.testing.assert_close(engine.score(rows).logps, plain_logps(model, rows), atol=1e-4, rtol=0)
    engine.close()


def test_groups_are_spread_over_the_servers(pair: list[StandInSGLang]) -> None:
    model = llama(seed=7)
    engine = bound_to(pair, model)
    engine.sync_weights(named_base_tensors(model), 1)
    generate(engine, RAGGED[:2], G=3)
    served = [{tuple(ids) for ids in server.served} for server in pair]
    assert served == [{tuple(RAGGED[0])}, {tuple(RAGGED[1])}], "a group is of one server"
    engine.close()


def test_a_lost_server_is_replaced_and_comes_back_with_the_current_weights(pair: list[StandInSGLang]) -> None:
    model = llama(seed=8)
    engine = bound_to(pair, model)
    engine.sync_weights(named_base_tensors(model), 4)
    expected = completions(generate(bound(model), temperature=0.0))
    pair[1].stop()
    with pytest.warns(UserWarning, match=rf"{pair[1].url} is lost"):
        assert completions(generate(engine, temperature=0.0)) == expected
    pair[1].start()  # with other weights
    pair[0].stop()
    with pytest.warns(UserWarning, match=rf"{pair[0].url} is lost"):
        back = generate(engine, temperature=0.0)
    assert completions(back) == expected and back.policy_version.unique().tolist() == [4]
    assert pair[1].version.endswith("-4")
    pair[0].start()
    engine.close()


def test_a_lost_server_does_not_stop_a_sync(pair: list[StandInSGLang]) -> None:
    model = llama(seed=9)
    engine = bound_to(pair, model)
    pair[0].stop()
    with pytest.warns(UserWarning, match="is lost"):
        engine.sync_weights(named_base_tensors(model), 1)
    pair[0].start()
    expected = completions(generate(bound(model), temperature=0.0))
    assert completions(generate(engine, temperature=0.0)) == expected
    engine.close()


def test_weights_of_another_run_do_not_count(pair: list[StandInSGLang]) -> None:
    """Versions are numbers, and every run counts from 0."""
    first, second = llama(seed=10), llama(seed=11)
    one, two = bound_to(pair[:1], first), bound_to(pair[:1], second)
    one.sync_weights(named_base_tensors(first), 1)
    two.sync_weights(named_base_tensors(second), 1)
    expected = completions(generate(bound(first), temperature=0.0))
    assert completions(generate(one, temperature=0.0)) == expected
    one.close()
    two.close()


def test_an_answer_that_says_not_ready_is_asked_for_again(pair: list[StandInSGLang]) -> None:
    model = llama(seed=12)
    engine = bound_to(pair[:1], model)
    engine.sync_weights(named_base_tensors(model), 1)
    pair[0].status = [503]
    with pytest.warns(UserWarning, match="is lost"):
        rows = generate(engine, RAGGED[:1], temperature=0.0)
    assert completions(rows) == completions(generate(bound(model), RAGGED[:1], temperature=0.0))
    pair[0].status = [400]
    with pytest.raises(RuntimeError, match="answered 400"):
        generate(engine, RAGGED[:1])
    engine.close()


def test_no_server_for_too_long_is_a_connection_error(pair: list[StandInSGLang]) -> None:
    model = llama(seed=13)
    engine = bound_to(pair[:1], model, server_timeout=0.3)
    engine.sync_weights(named_base_tensors(model), 1)
    pair[0].stop()
    with pytest.warns(UserWarning, match="is lost"), pytest.raises(ConnectionError, match=pair[0].url):
        generate(engine)
    with pytest.raises(ConnectionError, match="took the weights"):
        engine.sync_weights(named_base_tensors(model), 2)
    with pytest.raises(ConnectionError, match=r"sglang\.launch_server"):
        bound_to(pair[:1], model, server_timeout=0.1)
    pair[0].start()


def test_settings_arrive_under_sglangs_names() -> None:
    engine = SGLangServer()
    engine.end_token_ids = [1]
    sampling = Sampling(
        top_k=0, guided_decoding_regex="[0-9]+", generation_kwargs={"max_tokens": 3, "min_new_tokens": 2}
    )
    found = engine.settings(sampling.effective())
    assert found["top_k"] == -1 and found["regex"] == "[0-9]+"
    assert found["max_new_tokens"] == 3 and found["min_new_tokens"] == 2
    assert found["stop_token_ids"] == [1]
    with pytest.raises(ConfigError, match=r"generation_kwargs\.min_tokens is not supported"):
        engine.settings(Sampling(generation_kwargs={"min_tokens": 2}))


def test_an_address_is_the_hosts_own_unless_given() -> None:
    assert SGLangServer(host="0.0.0.0", port=7).servers == ["http://127.0.0.1:7"]
    assert SGLangServer(base_url="http://there:8/", host="here").servers == ["http://there:8"]
