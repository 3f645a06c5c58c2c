"""`octavo generate`: prompts in, text out, with the engine in this process. Knows no HTTP."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from octavo.cli.options import NOT_OURS, args_from, dataclass_options, sampling_options, sampling_values
from octavo.cli.options import command as make_command
from octavo.config import EngineArgs
from octavo.errors import ConfigError


@make_command("generate", "Complete each PROMPT and print the text. A prompt of - is read from stdin.")
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option("--prompt", "-p", "more_prompts", multiple=True, metavar="TEXT", help="a prompt; repeatable")
@click.option("--chat/--no-chat", default=False, help="send each prompt as a user's message through the chat template")
@click.option("--json", "as_json", is_flag=True, help="one JSON object per prompt, with token ids and finish reasons")
@sampling_options
@dataclass_options(EngineArgs, skip=(NOT_OURS,))
def command(prompts: tuple[str, ...], more_prompts: tuple[str, ...], chat: bool, as_json: bool, **values: Any) -> None:
    texts = [sys.stdin.read() if text == "-" else text for text in (*prompts, *more_prompts)]
    if not texts:
        raise ConfigError('no prompt: say octavo generate "Once upon a time"')
    args = args_from(EngineArgs, values, skip=(NOT_OURS,))
    given = sampling_values(values)
    import dataclasses
    import secrets

    from octavo.llm import LLM

    # A script wants the same text each time, a person at a terminal another one: --seed brings it back.
    args.seed = secrets.randbits(31)
    llm = LLM(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})
    params = llm.get_default_sampling_params().clone(**given)
    show_progress = len(texts) > 1 and sys.stderr.isatty()
    if chat:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params, use_tqdm=show_progress)
    else:
        outputs = llm.generate(texts, params, use_tqdm=show_progress)
    for text, output in zip(texts, outputs, strict=True):
        if as_json:
            click.echo(json.dumps(_as_dict(text, output), ensure_ascii=False))
            continue
        for choice in output.outputs:
            click.echo(choice.text if chat else text + choice.text)


def _as_dict(text: str, output: Any) -> dict[str, Any]:
    """A RequestOutput for people's scripts: OpenAI's words where there are some."""
    return {
        "prompt": text,
        "prompt_token_ids": list(output.prompt_token_ids),
        "choices": [
            {
                "index": choice.index,
                "text": choice.text,
                "token_ids": list(choice.token_ids),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in output.outputs
        ],
    }
