"""Keys, request ids, CORS, health, metrics, documents: what operators rely on."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from error_bodies import BASE, CHAT, COMPLETIONS, check_error
from played_engine import CONTEXT, MODEL, Served, Server
from prometheus_client.parser import text_string_to_metric_families

from octavo.server.app import routes
from octavo.server.docs import Documents, example
from octavo.server.schema import CompletionRequest

ROUTES = routes(Documents(), with_docs=True)
CLOSED = [(route.method, route.path.replace("{id}", MODEL)) for route in ROUTES if not route.public]
OPEN = [(route.method, route.path) for route in ROUTES if route.public]


# --- keys ---


async def test_only_health_is_open_without_a_key() -> None:
    assert {path for _, path in OPEN} == {"/health", "/ready", "/ping"}


@pytest.mark.parametrize(("method", "path"), [*CLOSED, ("GET", "/nothing"), ("PUT", "/v1/models"), ("GET", "/health/")])
async def test_routes_are_closed(server: Server, method: str, path: str) -> None:
    served = await server(api_key=["sesame", "mellon"])
    answers = []
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic sesame"},
        {"authorization": "sesame"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer sesame2"},
        {"authorization": "Bearer sesam"},
        [("authorization", "Bearer wrong"), ("authorization", "Bearer sesame")],
    ):
        response = await served.http.request(method, path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        if method != "HEAD":
            info = check_error(response.content)
            assert info.type == "authentication_error"
            assert info.code == ("invalid_api_key" if headers else None)
            answers.append(info.message)
    assert len(set(answers)) == 1, "the text must not tell one failure from another"


@pytest.mark.parametrize("key", ["sesame", "mellon"])
async def test_any_key_opens(server: Server, key: str) -> None:
    served = await server(api_key=["sesame", "mellon"])
    for scheme in ("Bearer", "bearer"):
        response = await served.post(CHAT, BASE[CHAT], headers={"authorization": f"{scheme} {key}"})
        assert response.status_code == 200
    for method, path in OPEN:
        assert (await served.http.request(method, path)).status_code == 200


# --- labels ---


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing", CHAT])
async def test_request_id_is_echoed(served: Served, path: str) -> None:
    response = await served.http.get(path, headers={"x-request-id": "my-id:1"})
    assert response.headers["x-request-id"] == "my-id:1"
    fresh = [(await served.http.get(path)).headers["x-request-id"] for _ in range(2)]
    assert fresh[0] != fresh[1]


@pytest.mark.parametrize("label", ["", "x" * 129, "a b", "naïve".encode(), 'a"b', "\x7f"])
async def test_odd_request_ids_are_replaced(served: Served, label: Any) -> None:
    response = await served.http.get("/health", headers={"x-request-id": label})
    assert response.headers["x-request-id"].startswith("req-")


async def test_the_same_request_id_twice_at_once(served: Served) -> None:
    ask = [served.post(CHAT, BASE[CHAT], headers={"x-request-id": "same"}) for _ in range(4)]
    answers = await asyncio.gather(*ask)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len({answer.json()["id"] for answer in answers}) == 4
    assert all("same" not in seen.request_id for seen in served.engine.seen)


async def test_cors(server: Server) -> None:
    anyone = await server()
    response = await anyone.http.get("/v1/models", headers={"origin": "http://a.test"})
    assert response.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" not in (await anyone.http.get("/v1/models")).headers

    some = await server(allowed_origins=["http://a.test"], api_key=["k"])
    ask = {"origin": "http://a.test", "access-control-request-method": "POST"}
    response = await some.http.options(CHAT, headers=ask)
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == "http://a.test"
    assert "authorization" in response.headers["access-control-allow-headers"]
    response = await some.http.options(CHAT, headers={**ask, "origin": "http://b.test"})
    assert "access-control-allow-origin" not in response.headers
    refused = await some.post(CHAT, BASE[CHAT], headers={"origin": "http://a.test"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://a.test"


# --- health ---


async def test_health_and_readiness(server: Server) -> None:
    served = await server(start=False)
    assert (await served.http.get("/health")).status_code == 200
    response = await served.http.get("/ready")
    assert response.status_code == 503 and response.headers["retry-after"]
    assert check_error(response.content).code == "not_ready"

    await served.client.start()
    assert (await served.http.get("/ready")).status_code == 200
    assert (await served.http.head("/ready")).status_code == 200

    served.engine.kill()
    for _ in range(200):
        if served.client.errored:
            break
        await asyncio.sleep(0.01)
    for path in ("/health", "/ready", "/ping"):
        response = await served.http.get(path)
        assert response.status_code == 503
        assert check_error(response.content).code == "engine_dead"


async def test_draining_refuses_new_work_and_lets_the_old_end(served: Served) -> None:
    running = asyncio.create_task(served.post(COMPLETIONS, {**BASE[COMPLETIONS], "prompt": "#hold#"}))
    while not served.engine.running:
        await asyncio.sleep(0.005)
    drained = asyncio.create_task(served.app.drain(5.0))
    await asyncio.sleep(0.01)
    for path in (CHAT, COMPLETIONS):
        response = await served.post(path, BASE[path])
        assert response.status_code == 503 and response.headers["retry-after"]
    assert (await served.http.get("/ready")).status_code == 503
    assert (await served.http.get("/health")).status_code == 200
    served.engine.release()
    assert (await running).status_code == 200
    assert await drained is True


@pytest.mark.parametrize("stream", [False, True])
async def test_what_outlasts_the_drain_gets_an_error(served: Served, stream: bool) -> None:
    body = {**BASE[COMPLETIONS], "prompt": "#hold#", "stream": stream}
    running = asyncio.create_task(served.post(COMPLETIONS, body))
    while not served.engine.running:
        await asyncio.sleep(0.005)
    assert await served.app.drain(0.05) is False
    response = await running
    assert response.status_code == 503
    check_error(response.content)
    assert not served.engine.running


# --- metrics ---


async def scrape(served: Served) -> dict[str, float]:
    """Samples by name and sorted labels but model_name."""
    response = await served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == MODEL
            samples[sample.name + "".join(f"[{key}={value}]" for key, value in sorted(labels.items()))] = sample.value
    return samples


async def test_metrics_of_requests(served: Served) -> None:
    for stream in (False, True):
        await served.post(
            COMPLETIONS, {**BASE[COMPLETIONS], "prompt": ["ab", "cde"], "stream": stream, "max_tokens": 7}
        )
    await served.post(CHAT, {**BASE[CHAT], "messages": [{"role": "user", "content": "#say x#"}], "max_tokens": 50})
    await served.post(CHAT, {**BASE[CHAT], "temperature": 9})
    samples = await scrape(served)
    assert samples["vllm:generation_tokens_total"] == 4 * 7 + 2
    chat_prompt = len(served.engine.seen[-1].prompt_token_ids)
    assert samples["vllm:prompt_tokens_total"] == 2 * 5 + chat_prompt
    assert samples["vllm:request_success_total[finished_reason=length]"] == 4
    assert samples["vllm:request_success_total[finished_reason=stop]"] == 1
    assert samples["vllm:request_success_total[finished_reason=abort]"] == 0
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_decode_time_seconds", "request_params_n",
        "request_params_max_tokens", "request_prompt_tokens", "request_generation_tokens",
    ):  # fmt: skip
        assert samples[f"vllm:{name}_count"] == 5, name
    assert samples["vllm:request_generation_tokens_sum"] == 30
    assert samples["vllm:request_params_max_tokens_bucket[le=10.0]"] == 4
    assert samples["vllm:inter_token_latency_seconds_count"] > 0
    assert samples[f"http_requests_total[handler={CHAT}][method=POST][status=400]"] == 1


async def test_metrics_of_the_engine(served: Served) -> None:
    await served.post(COMPLETIONS, BASE[COMPLETIONS])
    served.engine.held = True
    waiting = asyncio.create_task(served.post(COMPLETIONS, {**BASE[COMPLETIONS], "prompt": "#hold#"}))
    await asyncio.sleep(0.3)
    samples = await scrape(served)
    assert samples["vllm:num_requests_running"] == 1 and samples["vllm:num_requests_waiting"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 4 / 512
    assert samples["vllm:prefix_cache_queries_total"] == 100 and samples["vllm:prefix_cache_hits_total"] == 25
    assert samples["vllm:num_preemptions_total"] == 2
    assert [samples[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens")] == [9, 30, 21]
    assert samples["vllm:iteration_tokens_total_count"] == 4
    assert samples["octavo:itl_target_seconds"] == 0.05
    parts = {key.split("part=")[1].rstrip("]"): value for key, value in samples.items() if "part=" in key}
    assert parts == {"base": 0.003, "decode": 0.001, "decode_context": 0.002, "prompt_token": 0.0007, "prompt_context": 0.0006}
    [info] = [key for key in samples if key.startswith("vllm:cache_config_info")]
    assert "[block_size=16]" in info
    served.engine.release()
    await waiting


async def test_scrape_before_the_engine_is_there(server: Server) -> None:
    served = await server(start=False)
    samples = await scrape(served)
    assert "vllm:num_requests_running" not in samples and samples["vllm:prompt_tokens_total"] == 0


# --- logs ---


async def test_logs_hold_labels_and_counts_and_no_text(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    quiet = await server(api_key=["sesame"])
    headers = {"authorization": "Bearer sesame", "x-request-id": "label-1"}
    private = {"prompt": "#say verysecret# myprivatetext", "max_tokens": 50}
    await quiet.post(COMPLETIONS, {**BASE[COMPLETIONS], **private}, headers=headers)
    assert not [record for record in caplog.records if record.name == "octavo.server"]

    loud = await server(engine={"enable_log_requests": True}, api_key=["sesame"])
    await loud.post(COMPLETIONS, {**BASE[COMPLETIONS], **private}, headers=headers)
    await loud.post(COMPLETIONS, {**BASE[COMPLETIONS], "prompt": "#fail 1# myprivatetext"}, headers=headers)
    await loud.post(COMPLETIONS, {**BASE[COMPLETIONS], "prompt": "myprivatetext", "n": 0}, headers=headers)
    lines = [record.getMessage() for record in caplog.records if record.name == "octavo.server"]
    assert any("200 label-1 11 tokens" in line for line in lines)
    assert any("500 label-1" in line for line in lines) and any("400 label-1" in line for line in lines)
    assert not any(word in caplog.text for word in ("myprivatetext", "verysecret", "sesame"))


# --- the rest ---


async def test_models(served: Served) -> None:
    listed = (await served.http.get("/v1/models")).json()
    [model] = listed["data"]
    assert listed["object"] == "list" and model["id"] == MODEL and model["max_model_len"] == CONTEXT
    assert "secret" not in str(listed)
    assert (await served.http.get(f"/v1/models/{MODEL}")).json() == model
    response = await served.http.get("/v1/models/org/other")
    assert response.status_code == 404 and check_error(response.content).code == "model_not_found"


async def test_tokenize_and_back(served: Served) -> None:
    answer = (await served.post("/tokenize", {"model": MODEL, "prompt": "héy", "return_token_strs": True})).json()
    assert answer["tokens"] == list("héy".encode()) and answer["count"] == 4 and answer["max_model_len"] == CONTEXT
    assert answer["token_strs"][0] == "h"
    back = (await served.post("/detokenize", {"model": MODEL, "tokens": answer["tokens"]})).json()
    assert back == {"prompt": "héy"}

    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    answer = (await served.post("/tokenize", chat)).json()
    assert answer["tokens"] == [258, *b"user\nx", 259, 10] and answer["token_strs"] is None


async def test_version(served: Served) -> None:
    assert (await served.http.get("/version")).json()["version"]


async def test_pages(served: Served) -> None:
    home = await served.http.get("/")
    assert home.status_code == 200 and MODEL in home.text and "curl" in home.text
    docs = await served.http.get("/docs")
    assert all(route.path in docs.text for route in ROUTES)
    for page in (home.text, docs.text):
        assert "//cdn" not in page and "<script" not in page


async def test_openapi(served: Served) -> None:
    document = (await served.http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {route.path for route in ROUTES}
    schemas = document["components"]["schemas"]
    assert set(schemas["CompletionRequest"]["properties"]) == {
        f.encode_name for f in msgspec.structs.fields(CompletionRequest)
    }
    used = set(_refs(document))
    assert used and all(ref.removeprefix("#/components/schemas/") in schemas for ref in used)
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))


def _refs(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [value["$ref"]] if "$ref" in value else [ref for item in value.values() for ref in _refs(item)]
    return [ref for item in value for ref in _refs(item)] if isinstance(value, list) else []


async def test_examples_work_as_they_stand(served: Served) -> None:
    for route in ROUTES:
        body = example(route.path, MODEL)
        if body is not None:
            assert (await served.post(route.path, body)).status_code == 200


async def test_docs_can_be_switched_off(server: Server) -> None:
    served = await server(disable_docs=True)
    assert [(await served.http.get(path)).status_code for path in ("/docs", "/openapi.json")] == [404, 404]


def test_importing_the_server_is_light() -> None:
    code = "import sys, octavo.server.serving; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    heavy = {
        "numpy",
        "torch",
        "fastapi",
        "starlette",
        "pydantic",
        "zmq",
        "octavo.engine",
        "octavo.host",
        "octavo.runner",
        "octavo.ops",
    }
    assert not heavy & loaded
