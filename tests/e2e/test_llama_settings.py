"""A worker process with settings of llama.cpp that reach beyond one context: cores, metadata, control vectors. What
can not be meant is one clear line and a non-zero exit.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.control_vector_files import write_control_vector
from tests.support.stack import DEMO_MODEL, Stack
from workers.protocol.exits import Exit


def affinities(process: psutil.Process) -> set[str]:
    """The cores that each thread of the process, and of those that it started, may run on."""
    tasks = [
        task for one in (process, *process.children(recursive=True)) for task in Path(f"/proc/{one.pid}/task").iterdir()
    ]
    found = [re.search(r"Cpus_allowed_list:\s*(\S+)", (task / "status").read_text()) for task in tasks]
    return {match[1] for match in found if match}


def test_a_worker_and_its_helpers_keep_to_their_cores() -> None:
    core = max(os.sched_getaffinity(0))
    with Stack() as stack:
        worker = stack.worker(DEMO_MODEL, "calm", llama=json.dumps({"cpus": str(core)}))
        process = psutil.Process(worker.popen.pid)
        assert process.children()
        assert affinities(process) == {str(core)}


@pytest.mark.parametrize(
    ("llama", "code", "said"),
    [
        (
            {"cpus": "4095"},
            Exit.USAGE,
            "llama.cpus: this process may run on cores .*, which leaves out 4095; name others",
        ),
        ({"devices": ["Abacus0"]}, Exit.BAD_MODEL, "llama.devices: there is no device Abacus0"),
        ({"override_kv": {"llama.contxt_length": 9}}, Exit.BAD_MODEL, "llama.cpp does not read llama.contxt_length"),
        ({"override_tensor": [{"pattern": "(", "buffer": "CPU"}]}, Exit.BAD_MODEL, "'.' is no regular expression"),
        ({"rope_scaling": "longrope"}, Exit.BAD_MODEL, "the model has no factors for longrope"),
        ({"control_vectors": [{"path": "{}"}]}, Exit.BAD_MODEL, "wrong.gguf: direction.1 has 7 numbers"),
    ],
)
def test_what_can_not_be_meant_is_one_line(tmp_path: Path, llama: dict[str, Any], code: Exit, said: str) -> None:
    wrong = write_control_vector(tmp_path / "wrong.gguf", 7, [1])
    with Stack() as stack:
        settings = json.dumps(llama).replace("{}", str(wrong))
        worker = stack.worker(DEMO_MODEL, "bad", wait=False, llama=settings)
        assert worker.popen.wait(60) == code
        [line] = [line for line in worker.text().splitlines() if line.strip()]
    assert re.search(said, line), line
    assert "Traceback" not in line
