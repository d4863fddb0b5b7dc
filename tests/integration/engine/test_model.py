from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.engine.conftest import ROOT
from tests.integration.engine.listener import ONE_THREAD
from workers.engine.step.answer_text import AnswerText
from workers.llama.context import Context
from workers.llama.model import Model, ModelError
from workers.llama.model_params import CACHE_TYPES, FLASH_ATTN
from workers.models.spec import LlamaSettings


def test_facts(stories: Model) -> None:
    assert stories.name == "small stories"
    assert (stories.facts.n_ctx_train, stories.facts.n_vocab, stories.facts.n_params) == (4096, 532, 253120)
    assert (stories.bos_text, stories.eos_text) == ("<s>", "</s>")
    assert stories.chat_template is None
    assert [token for token in range(532) if stories.is_eog(token)] == [2]


@pytest.mark.parametrize("use_mmap", [True, False])
def test_loading_tells_how_far_it_is(demo: Model, use_mmap: bool) -> None:
    told: list[float] = []
    settings = LlamaSettings(n_threads=1, use_mmap=use_mmap)
    Model.load(demo.path, settings, on_progress=told.append).close()
    assert (told[0], told[-1]) == (0.0, 1.0)
    assert told == sorted(told)
    assert len(told) > 10


def test_the_demo_model_brings_its_template(demo: Model) -> None:
    assert demo.chat_template
    assert demo.facts.n_ctx_train >= 512


@pytest.mark.parametrize("text", ["Once upon a time", "Grüße, 世界 🐴!", "", "a\x00b", "<s>"])
def test_text_survives_tokens(any_model: Model, text: str) -> None:
    answer = AnswerText()
    tokens = any_model.tokenize(text, add_special=False, parse_special=False)
    out = "".join(answer.push(any_model.piece(token)) for token in tokens) + answer.finish()
    assert out.removeprefix(" ") == text


def test_control_tokens_are_silent(stories: Model) -> None:
    assert stories.tokenize("<s>", add_special=True, parse_special=True) == [1, 1]
    assert stories.piece(1) == b""
    assert stories.piece(2) == b""


def test_threads_may_tokenise_at_once(stories: Model) -> None:
    texts = [f"There were {number} horses in the paddock. " * 20 for number in range(40)]
    alone = [stories.tokenize(text, add_special=True, parse_special=False) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert (
            list(pool.map(lambda text: stories.tokenize(text, add_special=True, parse_special=False), texts)) == alone
        )


def test_a_broken_file_is_one_clear_line(stories: Model, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    whole = stories.path.read_bytes()
    for content, message in [(whole[:-100_000], "truncated"), (b"hello there", "not a GGUF file")]:
        broken.write_bytes(content)
        with pytest.raises(ModelError, match=message) as caught:
            Model.load(broken, ONE_THREAD)
        assert str(caught.value).startswith(str(broken))
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="there is no such file"):
        Model.load(tmp_path / "missing.gguf", ONE_THREAD)


def test_what_llama_cpp_refuses_is_told_in_its_words(stories: Model, tmp_path: Path) -> None:
    strange = tmp_path / "strange.gguf"
    data = stories.path.read_bytes().replace(
        b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00zebra", 1
    )
    strange.write_bytes(data)
    with pytest.raises(ModelError, match="zebra"):
        Model.load(strange, ONE_THREAD)


SHORT_OF_MEMORY = """
import pathlib, resource, sys
from workers.llama.context import Context
from workers.llama.model import Model, ModelTooLarge
from workers.models.spec import LlamaSettings

settings = LlamaSettings(n_threads=1)
with Model.load(pathlib.Path(sys.argv[1]), settings) as model:
    in_use = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20),) * 2)
    try:
        Context(model, settings, slots=1, kv_tokens=1 << 20)
    except ModelTooLarge as error:
        print(error)
"""


def test_a_cache_that_does_not_fit_is_refused(stories: Model) -> None:
    """In a process of its own with 256 MiB to spare: the cache needs 640."""
    child = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY, stories.path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "no memory for a KV cache of 1,048,576 tokens" in child.stdout
    assert "lower --kv-tokens" in child.stdout


@pytest.mark.parametrize("flash_attn", FLASH_ATTN)
@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_every_setting_reaches_llama_cpp(stories: Model, flash_attn: str, kind: str) -> None:
    """Blocks of 32 do not fit this model's heads of 16: llama.cpp refuses those, and says so."""
    settings = LlamaSettings(
        n_threads=1,
        n_batch=32,
        n_ubatch=32,
        flash_attn=flash_attn,
        cache_type_k=kind,
        cache_type_v=kind,
        use_mmap=False,
    )
    if kind in ("f32", "f16", "bf16"):
        with Context(stories, settings, slots=2, kv_tokens=256) as context:
            context.warm_up()
            assert (context.kv_tokens, context.n_ubatch) == (256, 32)
            assert context.memory.last_position(0) == -1
    else:
        with pytest.raises(ModelError, match="check the `llama` settings"):
            Context(stories, settings, slots=2, kv_tokens=256)


def test_loading_says_nothing(
    stories: Model, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with Model.load(stories.path, ONE_THREAD) as again, Context(again, ONE_THREAD, slots=2, kv_tokens=4096) as context:
        context.warm_up()
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""
