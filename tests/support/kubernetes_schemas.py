"""What Kubernetes accepts: the schemas of its own kinds, and of kinds that others define.

The first come with the package kubernetes-validate; the others are taken from the Go modules of those who define them,
at pinned versions, and kept in `$XDG_CACHE_HOME/paddock/go/schemas`. A field that a schema does not name is an error,
where the API server would drop it without a word.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing
import yaml

from tests.support import go_tools

PACKAGED = Path(str(files("kubernetes_validate"))) / "kubernetes-json-schema"
DOWNLOAD_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Module:
    """Of Go: where the definitions of some kinds lie."""

    name: str
    version: str
    folder: str


KEDA = Module("github.com/kedacore/keda/v2", "v2.18.1", "config/crd/bases")
PROMETHEUS = Module("github.com/prometheus-operator/prometheus-operator", "v0.85.0", "example/prometheus-operator-crd")
GATEWAY_API = Module("sigs.k8s.io/gateway-api", "v1.4.0", "config/crd/standard")

MODULES = {
    "keda.sh": KEDA,
    "monitoring.coreos.com": PROMETHEUS,
    "gateway.networking.k8s.io": GATEWAY_API,
}


class _Loader(yaml.CSafeLoader):
    """YAML 1.1 reads a bare `=` as a sign of its own; in a schema it is text."""


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(node.value)


_Loader.add_constructor("tag:yaml.org,2002:value", _text)


class NoSchema(Exception):
    """Nobody says what this kind may hold."""


def mistakes(item: dict[str, Any], version: str) -> list[str]:
    """What a cluster of this version would not take, or would drop. Raises NoSchema."""
    group = item["apiVersion"].rpartition("/")[0]
    kind, api = item["kind"], item["apiVersion"]
    check = _custom(MODULES[group], api, kind) if group in MODULES else _core(api, kind, version)
    return [f"{kind} {item['metadata']['name']}: {_place(error)}: {error.message}" for error in _leaves(check, item)]


def _leaves(check: Any, item: dict[str, Any]) -> Iterator[Any]:
    for error in check.iter_errors(item):
        yield jsonschema.exceptions.best_match([error]) if error.context else error


def _place(error: Any) -> str:
    return ".".join(str(part) for part in error.absolute_path)


@cache
def _core(api_version: str, kind: str, version: str) -> jsonschema.Draft202012Validator:
    folder = PACKAGED / f"v{version}.0-local-strict"
    group, _, name = api_version.rpartition("/")
    file = folder / f"{kind.lower()}-{f'{group.partition(chr(46))[0]}-' if group else ''}{name}.json"
    if not file.is_file():
        raise NoSchema(f"Kubernetes {version} knows no {kind} of {api_version}")
    return jsonschema.Draft202012Validator(json.loads(file.read_text()), registry=_definitions(folder))


@cache
def _definitions(folder: Path) -> referencing.Registry[Any]:
    shared = referencing.Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
    return shared @ referencing.Registry()


@cache
def _custom(module: Module, api_version: str, kind: str) -> jsonschema.Draft202012Validator:
    file = _cached(module)
    if not file.is_file():
        _extract(module, file)
    known = json.loads(file.read_text())
    if f"{api_version}/{kind}" not in known:
        raise NoSchema(f"{module.name} {module.version} defines no {kind} of {api_version}")
    return jsonschema.Draft202012Validator(known[f"{api_version}/{kind}"])


def _cached(module: Module) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paddock" / "go" / "schemas"
    return folder / f"{module.name.replace('/', '_')}-{module.version}.json"


def _extract(module: Module, file: Path) -> None:
    """Every kind of a module, once. Skips the test where the module can't be had."""
    program = go_tools.go()
    if program is None:
        pytest.skip(f"the schemas of {module.name} are not here, and there is no Go to fetch them with")
    command = [str(program), "mod", "download", "-json", f"{module.name}@{module.version}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, cwd="/", check=False)
    told = json.loads(done.stdout or "{}")
    if "Dir" not in told:
        pytest.skip(f"{module.name}@{module.version} can't be fetched: {told.get('Error', done.stderr.strip())}")
    found = {}
    for path in sorted(Path(told["Dir"], module.folder).glob("*.yaml")):
        for definition in yaml.load_all(path.read_text(), _Loader):
            if definition and definition.get("kind") == "CustomResourceDefinition":
                spec = definition["spec"]
                for version in spec["versions"]:
                    name = f"{spec['group']}/{version['name']}/{spec['names']['kind']}"
                    found[name] = _strict(version["schema"]["openAPIV3Schema"])
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(found))
    os.replace(fresh, file)


def _strict(schema: Any) -> Any:
    """As the API server reads it: unknown fields are none, and some values may be numbers or text."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    found = {key: _strict(value) for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and not is_open:
        found["additionalProperties"] = False
    return found
