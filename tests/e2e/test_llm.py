"""Needs the extension and the default model. The class LLM as a script uses it."""

import signal
import threading
import time

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, ContextLengthError, InvalidRequestError
from octavo.llm import engine_args

MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def llm():
    return LLM(MODEL, max_model_len=256, kv_cache_memory="64M", max_num_seqs=16, swap_space=4, enforce_eager=True)


def quiet(max_tokens=8, **changes):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **changes)


def test_results_are_in_the_order_of_prompts_whatever_their_lengths(llm):
    prompts = ["Hello, my name is", "The capital of France is", "1 2 3 4", "A"] * 5
    params = [quiet(1 + 7 * i % 12) for i in range(len(prompts))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for output, each in zip(outputs, params, strict=True):
        choice = output.outputs[0]
        assert output.finished
        assert choice.finish_reason in ("length", "stop")
        assert len(choice.token_ids) <= each.max_tokens
        assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)
    assert "Paris" in outputs[1].outputs[0].text + llm.generate("The capital of France is", quiet(), use_tqdm=False)[0].outputs[0].text


def test_prompts_in_every_form_are_the_same_prompt(llm):
    ids = llm.get_tokenizer().encode("Once upon a time")
    forms = ["Once upon a time", ids, {"prompt": "Once upon a time"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, quiet(), use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert len(llm.generate(ids, quiet(), use_tqdm=False)) == 1
    assert llm.generate([], quiet()) == []


def test_the_chat_template_is_applied(llm):
    conversation = [{"role": "user", "content": "Say hello."}]
    one = llm.chat(conversation, quiet(12), use_tqdm=False)
    many = llm.chat([conversation, conversation], quiet(12), use_tqdm=False)
    assert "<|im_start|>user\nSay hello.<|im_end|>" in one[0].prompt
    assert one[0].prompt.endswith("<|im_start|>assistant\n")
    assert [output.outputs[0].text for output in many] == [one[0].outputs[0].text] * 2
    assert one[0].outputs[0].text.strip()
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        llm.chat(conversation, quiet(), use_tqdm=False, continue_final_message=True)
    own = llm.chat(conversation, quiet(1), use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert own[0].prompt == "Say hello.!"


def test_a_script_repeats_itself_and_another_seed_does_not():
    texts = []
    for seed in (0, 0, 1):
        llm = LLM(MODEL, max_model_len=128, kv_cache_memory="32M", seed=seed)
        outputs = llm.generate(["One", "One"], SamplingParams(max_tokens=12, temperature=1.0), use_tqdm=False)
        texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]  # a seed of its own for each request


def test_a_context_that_ends_early_is_told_as_length(llm):
    prompt = llm.get_tokenizer().encode("word " * 250)[:250]
    (output,) = llm.generate([prompt], quiet(100, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(ContextLengthError, match="256"):
        llm.generate([[5] * 256], quiet(), use_tqdm=False)


def test_a_stop_string_ends_the_text_and_frees_the_request(llm):
    (output,) = llm.generate(["1, 2, 3, 4, 5, 6,"], quiet(50, stop=[" 9"]), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == " 9"
    assert " 9" not in output.outputs[0].text
    assert llm.generate(["A"], quiet(1), use_tqdm=False)
    assert llm.stats.num_used_blocks == 0


def test_more_prompts_than_the_queue_holds():
    llm = LLM(MODEL, max_model_len=64, kv_cache_memory="16M", max_num_queued_requests=4, max_num_seqs=4)
    outputs = llm.generate([[i + 20] for i in range(20)], SamplingParams(max_tokens=2, n=2, seed=1), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[i + 20] for i in range(20)]
    assert all(len(output.outputs) == 2 for output in outputs)


def test_ctrl_c_ends_the_call_and_leaves_the_engine_whole(llm):
    before = signal.getsignal(signal.SIGINT)

    def interrupt():
        time.sleep(0.5)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.generate([[5]] * 8, quiet(200, ignore_eos=True), use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is before
    (output,) = llm.generate(["The capital of France is"], quiet(), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert llm.stats.num_running == llm.stats.num_used_blocks == 0


def test_progress_is_shown_unless_told_not_to(llm, capsys):
    llm.generate(["A"], quiet(2), use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["A", "B"], quiet(2))
    shown = capsys.readouterr().err
    assert "Processed prompts" in shown
    assert "2/2" in shown
    assert "tok/s" in shown


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (["a", "b"], [quiet()], "1 for 2"),
        ([[49152]], quiet(), "49152"),
        (["a"], quiet(logprobs=20, stop_token_ids=[70_000]), "70000"),
        ([""], quiet(), "at least one token"),
        (["\ud800"], quiet(), "surrogate"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(llm, prompts, params, words):
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(prompts, params, use_tqdm=False)


def test_methods_that_this_engine_does_not_have_say_so(llm):
    for method in (llm.embed, llm.encode, llm.score):
        with pytest.raises(NotImplementedError, match="not supported"):
            method(["text"])
    with pytest.raises(InvalidRequestError, match="lora_request"):
        llm.generate(["a"], quiet(), lora_request=object())


def test_options_of_other_engines_are_accepted_refused_or_unknown():
    args = engine_args({"model": "m", "swap_space": 4, "max_seq_len_to_capture": 8192, "enable_lora": False, "kv_cache_memory_bytes": 1 << 28})
    assert args.kv_cache_memory == str(1 << 28)
    with pytest.raises(ConfigError, match="enable_lora = True"):
        engine_args({"enable_lora": True})
    with pytest.raises(ConfigError, match="tensor_parallel_size = 2"):
        engine_args({"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="enable_chunked_prefill"):
        engine_args({"enable_chunked_prefill": False})
    with pytest.raises(TypeError, match="max_model_len"):
        engine_args({"max_model_length": 5})
