"""Holds chat templates for models that come without one, by the names that llama-server takes for `--chat-template`.

The templates put the same text around each message as src/llama-chat.cpp of llama.cpp, so that prompts are the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

Turn = tuple[str, str]
"""The text before each message of a role, and the text after it."""


def _text(value: str) -> str:
    """Return a text as a Jinja literal."""
    return json.dumps(value, ensure_ascii=False)


def _written(system: Turn, user: Turn, assistant: Turn, opens: str = "", *, begin: str = "", trim: str = "") -> str:
    """Return a template that puts each message between the texts of its role. `begin`: text before all messages;
    `opens`: text that opens the answer; `trim`: roles whose messages are stripped, or "all". Other roles are left out.
    """
    parts = [f"{{{{ {_text(begin)} }}}}" if begin else "", "{% for message in messages %}"]
    for number, (role, (before, behind)) in enumerate(
        zip(("system", "user", "assistant"), (system, user, assistant), strict=True)
    ):
        word = "elif" if number else "if"
        strip = " | trim" if trim == "all" or role in trim else ""
        parts.append(
            f"{{% {word} message.role == {_text(role)} %}}"
            f"{{{{ {_text(before)} + (message.content{strip}) + {_text(behind)} }}}}"
        )
    parts.append("{% endif %}{% endfor %}")
    if opens:
        parts.append(f"{{% if add_generation_prompt %}}{{{{ {_text(opens)} }}}}{{% endif %}}")
    return "".join(parts)


def _by_role(before: str, middle: str, behind: str, opens: str, *, begin: str = "", trim: bool = False) -> str:
    """Return a template that writes each message as `before`, its role, `middle`, the message, `behind`."""
    strip = " | trim" if trim else ""
    start = f"{{{{ {_text(begin)} }}}}" if begin else ""
    return (
        f"{start}{{% for message in messages %}}{{{{ {_text(before)} + message.role + {_text(middle)} + "
        f"(message.content{strip}) + {_text(behind)} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {_text(opens)} }}}}{{% endif %}}"
    )


def _mistral(lead: str, trail: str, *, trim: bool = False) -> str:
    """Return a template of Mistral's versions 1 and 3, which put the system message into the user's turn."""
    strip = " | trim" if trim else ""
    return (
        "{% set ns = namespace(inside=false) %}{% for message in messages %}"
        f"{{% if not ns.inside %}}{{{{ {_text(lead + '[INST]' + trail)} }}}}{{% set ns.inside = true %}}{{% endif %}}"
        "{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
        f"{{% elif message.role == 'user' %}}{{{{ message.content + {_text(lead + '[/INST]')} }}}}"
        f"{{% else %}}{{{{ {_text(trail)} + (message.content{strip}) + '</s>' }}}}"
        "{% set ns.inside = false %}{% endif %}"
        "{% endfor %}"
    )


def _llama2(system: Turn, *, again: str = "[INST] ", trim: bool = False) -> str:
    strip = " | trim" if trim else ""
    return (
        "{{ '[INST] ' }}{% set ns = namespace(inside=true) %}{% for message in messages %}"
        f"{{% if not ns.inside %}}{{{{ {_text(again)} }}}}{{% set ns.inside = true %}}{{% endif %}}"
        f"{{% set text = message.content{strip} %}}"
        f"{{% if message.role == 'system' %}}{{{{ {_text(system[0])} + text + {_text(system[1])} }}}}"
        "{% elif message.role == 'user' %}{{ text + ' [/INST]' }}"
        "{% else %}{{ text + '</s>' }}{% set ns.inside = false %}{% endif %}{% endfor %}"
    )


def _first_in_user(user: Turn, assistant: Turn, opens: str, *, trim: bool) -> str:
    """Return a template that puts system messages at the beginning of the user's next message."""
    strip = " | trim" if trim else ""
    return (
        "{% set ns = namespace(system='') %}{% for message in messages %}"
        f"{{% if message.role == 'system' %}}{{% set ns.system = ns.system + (message.content{strip}) %}}"
        f"{{% elif message.role == 'assistant' %}}"
        f"{{{{ {_text(assistant[0])} + (message.content{strip}) + {_text(assistant[1])} }}}}"
        f"{{% else %}}{{{{ {_text(user[0])} + (ns.system + '\\n\\n' if ns.system else '') + (message.content{strip}) + "
        f"{_text(user[1])} }}}}{{% set ns.system = '' %}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {_text(opens)} }}}}{{% endif %}}"
    )


def _marked(marks: tuple[str, str, str], end: str, opens: str, **more: str) -> str:
    """Return a template with `marks` before messages of system, user and assistant, and `end` after every message."""
    system, user, assistant = ((mark, end) for mark in marks)
    return _written(system, user, assistant, opens, **more)


_SEP = "<｜end▁of▁sentence｜>"
_GRANITE = _by_role(
    "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n", "<|start_of_role|>assistant<|end_of_role|>"
)
_BAILING = ("<role>SYSTEM</role>", "<role>HUMAN</role>", "<role>ASSISTANT</role>")
_EXAONE = _written(
    *(("[|system|]", "[|endofturn|]\n"), ("[|user|]", "\n"), ("[|assistant|]", "[|endofturn|]\n")),
    "[|assistant|]",
    trim="all",
)
_UNTITLED = "{% if not messages or messages[0].role != 'system' %}{{ TEXT }}{% endif %}"
"""Template that writes a text (put it in place of TEXT) if a conversation does not begin with a system message."""
_SYSTEM_BLOCK = ("<<SYS>>\n", "\n<</SYS>>\n\n")

OF_LLAMA_SERVER: Mapping[str, str] = MappingProxyType(
    {
        "chatml": _by_role("<|im_start|>", "\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
        "llama2": _llama2(("", "\n")),
        "llama2-sys": _llama2(_SYSTEM_BLOCK),
        "llama2-sys-bos": _llama2(_SYSTEM_BLOCK, again="<s>[INST] "),
        "llama2-sys-strip": _llama2(_SYSTEM_BLOCK, trim=True),
        "mistral-v1": _mistral(" ", " "),
        "mistral-v3": _mistral("", " ", trim=True),
        "mistral-v3-tekken": _mistral("", ""),
        "mistral-v7": _written(("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"), ("[INST] ", "[/INST]"), (" ", "</s>")),
        "mistral-v7-tekken": _written(("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), ("[INST]", "[/INST]"), ("", "</s>")),
        "phi3": _by_role("<|", "|>\n", "<|end|>\n", "<|assistant|>\n"),
        "phi4": _by_role("<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
        "falcon3": _by_role("<|", "|>\n", "\n", "<|assistant|>\n"),
        "zephyr": _by_role("<|", "|>\n", "<|endoftext|>\n", "<|assistant|>\n"),
        "gemma": _first_in_user(
            ("<start_of_turn>user\n", "<end_of_turn>\n"),
            ("<start_of_turn>model\n", "<end_of_turn>\n"),
            "<start_of_turn>model\n",
            trim=True,
        ),
        "orion": _first_in_user(("Human: ", "\n\nAssistant: </s>"), ("", "</s>"), "", trim=False),
        "openchat": _marked(
            ("", "GPT4 Correct User: ", "GPT4 Correct Assistant: "), "<|end_of_turn|>", "GPT4 Correct Assistant:"
        ),
        "vicuna": _written(("", "\n\n"), ("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), "ASSISTANT:"),
        "vicuna-orca": _written(("SYSTEM: ", "\n"), ("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), "ASSISTANT:"),
        "deepseek": _written(
            *(("", ""), ("### Instruction:\n", "\n"), ("### Response:\n", "\n<|EOT|>\n")), "### Response:\n"
        ),
        "deepseek2": _written(("", "\n\n"), ("User: ", "\n\n"), ("Assistant: ", _SEP), "Assistant:"),
        "deepseek3": _written(("", "\n\n"), ("<｜User｜>", ""), ("<｜Assistant｜>", _SEP), "<｜Assistant｜>"),
        "deepseek-ocr": "{% for message in messages %}{{ message.content }}{% endfor %}",
        "command-r": _marked(
            (
                "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>",
                "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
                "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            ),
            "<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            trim="all",
        ),
        "llama3": _by_role(
            *("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            trim=True,
        ),
        "chatglm3": _by_role("<|", "|>\n ", "", "<|assistant|>", begin="[gMASK]sop"),
        "chatglm4": _by_role("<|", "|>\n", "", "<|assistant|>\n", begin="[gMASK]<sop>"),
        "glmedge": _by_role("<|", "|>\n", "", "<|assistant|>"),
        "minicpm": _written(("", ""), ("<用户>", "<AI>"), ("", ""), trim="all"),
        "exaone3": _EXAONE,
        "exaone4": _EXAONE,
        "exaone-moe": _by_role("<|", "|>\n", "<|endofturn|>\n", "<|assistant|>\n", trim=True),
        "granite": _GRANITE,
        "granite-4.0": _GRANITE,
        "granite-4.1": _GRANITE,
        "megrez": _by_role("<|role_start|>", "<|role_end|>", "<|turn_end|>", "<|role_start|>assistant<|role_end|>"),
        "bailing": _marked(_BAILING, "", "<role>ASSISTANT</role>"),
        "bailing-think": _marked(_BAILING, "", "<role>ASSISTANT</role><think>"),
        "llama4": _by_role(
            *("<|header_start|>", "<|header_end|>\n\n", "<|eot|>"),
            "<|header_start|>assistant<|header_end|>\n\n",
            trim=True,
        ),
        "smolvlm": _written(
            *(("", "\n\n"), ("User: ", "<end_of_utterance>\n"), ("Assistant: ", "<end_of_utterance>\n")),
            "Assistant:",
            begin="<|im_start|>",
        ),
        "hunyuan-moe": _written(
            ("<|startoftext|>", "<|extra_4|>"), ("<|startoftext|>", "<|extra_0|>"), ("", "<|eos|>")
        ),
        "gpt-oss": _written(
            *(("<|start|>system<|message|>", "<|end|>"), ("<|start|>user<|message|>", "<|end|>")),
            ("<|start|>assistant<|message|>", "<|return|>"),
            "<|start|>assistant",
        ),
        "kimi-k2": _marked(
            (
                "<|im_system|>system<|im_middle|>",
                "<|im_user|>user<|im_middle|>",
                "<|im_assistant|>assistant<|im_middle|>",
            ),
            "<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
        ),
        "seed_oss": _marked(
            ("<seed:bos>system\n", "<seed:bos>user\n", "<seed:bos>assistant\n"),
            "<seed:eos>",
            "<seed:bos>assistant\n",
            trim="assistant",
        ),
        "grok-2": _written(
            *(("System: ", "<|separator|>\n\n"), ("Human: ", "<|separator|>\n\n")),
            ("Assistant: ", "<|separator|>\n\n"),
            "Assistant:",
            trim="system user",
        ),
        "rwkv-world": _written(
            *(("System: ", "\n\n"), ("User: ", "\n\n"), ("Assistant: ", "\n\n")), "Assistant:", trim="all"
        ),
        "gigachat": _written(
            ("", "<|message_sep|>"),
            ("user<|role_sep|>", "<|message_sep|>available functions<|role_sep|>[]<|message_sep|>"),
            ("assistant<|role_sep|>", "<|message_sep|>"),
            "assistant<|role_sep|>",
            begin="<s>",
        ),
        "yandex": (
            "{% for message in messages %}"
            "{% if message.role == 'user' %}{{ ' Пользователь: ' + message.content + '\\n\\n' }}"
            "{% elif message.role == 'assistant' %}{{ ' Ассистент: ' + message.content + '\\n\\n' }}"
            "{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ ' Ассистент:[SEP]' }}{% endif %}"
        ),
        "bailing2": _UNTITLED.replace("TEXT", "'<role>SYSTEM</role>detailed thinking off<|role_end|>'")
        + _marked(_BAILING, "<|role_end|>", "<role>ASSISTANT</role>"),
        "hunyuan-dense": _written(
            ("", "<｜hy_place▁holder▁no▁3｜>"),
            ("<｜hy_User｜>", "<｜hy_Assistant｜>"),
            ("<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁2｜>"),
        ),
        "hunyuan-vl": _written(
            ("", "<｜hy_place▁holder▁no▁3｜>"),
            *(("", "<｜hy_User｜>"), ("", "<｜hy_Assistant｜>")),
            begin="<｜hy_begin▁of▁sentence｜>",
        ),
        "pangu-embedded": _UNTITLED.replace("TEXT", "'[unused9]系统：[unused10]'")
        + _marked(("[unused9]系统：", "[unused9]用户：", "[unused9]助手："), "[unused10]", "[unused9]助手："),
        "monarch": (
            "{% for message in messages %}{{ ('' if loop.first else '<s>') + message.role + '\\n' + message.content }}"
            "{{ '</s>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
        ),
        "solar-open": _by_role("<|begin|>", "<|content|>", "<|end|>", "<|begin|>assistant"),
    }
)
"""Templates by the names that llama-server takes."""

OF_LLAMA_CPP_PYTHON: Mapping[str, str] = MappingProxyType(
    {"llama-2": OF_LLAMA_SERVER["llama2-sys"], "llama-3": OF_LLAMA_SERVER["llama3"]}
)
"""Two of the templates in OF_LLAMA_SERVER, by the names that llama-cpp-python has for them (`chat_format`)."""

NAMED: Mapping[str, str] = MappingProxyType({**OF_LLAMA_SERVER, **OF_LLAMA_CPP_PYTHON})
