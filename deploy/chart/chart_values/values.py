"""Every value of the chart and what it may be. What each is for stands beside it in `helm/values.yaml`."""

from __future__ import annotations

from chart_values import of_program
from chart_values.kinds import (
    DURATION,
    HOST,
    IMAGE,
    OPTIONAL_DNS,
    Schema,
    budget,
    count_or_share,
    fields,
    flag,
    kubernetes,
    named,
    number,
    one_of,
    placement,
    pods,
    quantity,
    resources,
    several,
    text,
    volume,
    whole,
    with_required,
)


def gateway() -> Schema:
    scaling = fields(
        enabled=flag(),
        min=whole(1),
        max=whole(1),
        cpuPercent=whole(1, 100),
        inFlight=whole(),
        scaleDownS=whole(0, 3600),
    )
    service = fields(
        type=one_of("ClusterIP", "NodePort", "LoadBalancer"), port=whole(1, 65535), annotations=named(text())
    )
    return fields(
        replicas=whole(1),
        settings={"$ref": "#/definitions/gatewaySettings"},
        settleS=whole(0, 300),
        resources=resources(),
        autoscaling=scaling,
        podDisruptionBudget=budget(),
        service=service,
        **pods(),
    )


def worker_fields() -> dict[str, Schema]:
    """Of `workers`, and of each entry of `models`."""
    scaling = fields(
        type=one_of("none", "keda", "hpa", "cpu"),
        min=whole(),
        max=whole(1),
        slotShare={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        waiting=whole(),
        waitS=number(0, above=True),
        cooldownS=whole(0, 86400),
        pollS=whole(1, 300),
        scaleDownS=whole(0, 3600),
        cpuPercent=whole(1, 100),
    )
    return {
        "kind": one_of("Deployment", "StatefulSet"),
        "replicas": whole(),
        "gpus": whole(0, 16),
        "gpuResource": text(r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"),
        "runtimeClassName": text(OPTIONAL_DNS),
        "settings": {"$ref": "#/definitions/workerSettings"},
        "resources": resources(),
        "startupS": whole(10, 86400),
        "rollout": fields(maxSurge=count_or_share(), maxUnavailable=count_or_share()),
        "autoscaling": scaling,
        "podDisruptionBudget": budget(),
        "promptCache": volume("none", "emptyDir", "claim", "existing"),
        "scratch": fields(size=quantity()),
        **pods(),
    }


def model() -> Schema:
    own = {
        "url": text(r"^https?://[^\s\"]+$"),
        "sha256": text("^([0-9a-fA-F]{64})?$"),
        "image": text(IMAGE),
        "modelCache": volume("emptyDir", "claim", "existing"),
    }
    return with_required(fields(**of_program.model_fields(), **own, **worker_fields()), "name")


TAGGED_IMAGE = r"^[^\s:]+(:[0-9]+/[^\s:]+)?:[A-Za-z0-9._-]*[0-9][A-Za-z0-9._-]*$"


def redis() -> Schema:
    return fields(
        bundled=flag(),
        image=text(TAGGED_IMAGE),
        resources=resources(),
        maxmemory=text("^[0-9]+(kb|mb|gb)$"),
        persistence=fields(enabled=flag(), size=quantity(), storageClass=text(OPTIONAL_DNS)),
        external=fields(
            url=text(r"^(redis(s)?(\+(sentinel|cluster))?://[^\s]+)?$"),
            existingSecret=text(OPTIONAL_DNS),
            workersOwnUrl=flag(),
            ports=several(whole(1, 65535)),
        ),
        **placement(),
    )


def accounts() -> Schema:
    return fields(
        enabled=flag(),
        exposed=flag(),
        replicas=whole(1),
        settings={"$ref": "#/definitions/accountsSettings"},
        resources=resources(),
        **pods(),
    )


def postgres() -> Schema:
    return fields(
        bundled=flag(),
        image=text(TAGGED_IMAGE),
        resources=resources(),
        persistence=fields(enabled=flag(), size=quantity(), storageClass=text(OPTIONAL_DNS)),
        external=fields(existingSecret=text(OPTIONAL_DNS), ports=several(whole(1, 65535))),
        **placement(),
    )


METRICS_KEY = r"^[!-~]*$"
"""What a header can hold."""
PASSWORD = "^[A-Za-z0-9._~-]*$"


def secrets() -> Schema:
    key = fields(
        name=text(),
        team=text(),
        sha256=text("^[0-9a-f]{64}$"),
        aliases=several(text()),
        admin=flag(),
        weight={"type": "number", "minimum": 0.001, "maximum": 1000},
        min_priority={"type": "integer", "minimum": -100, "maximum": 100},
        max_tokens={"type": "integer", "minimum": 1},
        answer_timeout_s={"type": "number", "exclusiveMinimum": 0},
    )
    return fields(
        existingSecret=text(OPTIONAL_DNS),
        existingSecretHolds=several(one_of("api-keys", "cache-secret", "hf-token", "metrics-key", "oidc")),
        apiKey=text(),
        workerSecret=text(),
        gatewaySecret=text(),
        # They stand in a URL, or in Redis' configuration, as they are.
        redisPassword=text(PASSWORD),
        redisGatewayPassword=text(PASSWORD),
        redisWorkerPassword=text(PASSWORD),
        postgresPassword=text(PASSWORD),
        cacheSecret=text(),
        hfToken=text(),
        metricsKey=text(METRICS_KEY),
        apiKeys=several(with_required(key, "name", "sha256")),
        oidc={"type": "object"},
    )


def outside() -> dict[str, Schema]:
    """The ways in."""
    return {
        "ingress": fields(
            enabled=flag(),
            className=text(OPTIONAL_DNS),
            annotations=named(text()),
            streaming=flag(),
            hosts=several(text(HOST)),
            tls=several(fields(secretName=text(OPTIONAL_DNS), hosts=several(text(HOST)))),
        ),
        "httpRoute": fields(
            enabled=flag(), parentRefs=several(kubernetes()), hostnames=several(text(HOST)), annotations=named(text())
        ),
    }


def around() -> dict[str, Schema]:
    """What watches and what guards."""
    return {
        "monitoring": fields(
            enabled=flag(),
            gatewayInterval=text(DURATION),
            workerInterval=text(DURATION),
            accountsInterval=text(DURATION),
            labels=named(text()),
            rules=flag(),
            runbook=text(),
            dashboards=flag(),
            dashboardLabels=named(text()),
            dashboardAnnotations=named(text()),
        ),
        "keda": fields(
            prometheusAddress=text(r"^(https?://[^\s]+)?$"),
            matchers=text(),
            authenticationRef=text(OPTIONAL_DNS),
            authModes=text(),
        ),
        "networkPolicy": fields(
            enabled=flag(),
            callers=several(kubernetes()),
            admins=several(kubernetes()),
            scrapers=several(kubernetes()),
            hub=several(kubernetes()),
            gatewayEgress=several(kubernetes()),
            workerEgress=several(kubernetes()),
            accountsEgress=several(kubernetes()),
        ),
    }


NEEDED = (
    *("image", "serviceAccount", "secrets", "accounts", "postgres", "gateway", "workers", "modelCache", "redis"),
    *("ingress", "httpRoute", "monitoring", "keda", "networkPolicy", "ipv6", "test"),
)
"""What `null` takes away from the chart's own values, and templates can't be without. `models` has words of its own."""

NEEDED_WITHIN = {
    "gateway": ("settings", "autoscaling", "service", "podDisruptionBudget"),
    "postgres": ("persistence", "external"),
    "redis": ("persistence", "external"),
    "workers": (
        *("settings", "resources", "rollout", "autoscaling", "podDisruptionBudget"),
        *("promptCache", "scratch"),
    ),
}
"""Value of `NEEDED` -> the mappings within it that templates can't be without."""


def whole_schema() -> Schema:
    """Return the schema of all values, without descriptions."""
    found = _outer_schema()
    for name, needed in NEEDED_WITHIN.items():
        found["properties"][name] = with_required(found["properties"][name], *needed)
    return found


def _outer_schema() -> Schema:
    """Return the schema without what `NEEDED_WITHIN` requires."""
    image = fields(
        registry=text(r"^([a-z0-9][a-z0-9._:/-]*[a-z0-9])?$"),
        tag=text(r"^([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?$"),
        pullPolicy=one_of("IfNotPresent", "Always", "Never"),
        **{name: text(IMAGE) for name in ("accounts", "gateway", "worker", "workerCuda")},
    )
    models: Schema = {**several(model()), "minItems": 1}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of Paddock's chart",
        "required": list(NEEDED),
        **fields(
            enabled=flag(),
            nameOverride=text(),
            fullnameOverride=text(),
            commonLabels=named(text()),
            image=image,
            imagePullSecrets=several(with_required(fields(name=text(OPTIONAL_DNS)), "name")),
            serviceAccount=fields(create=flag(), name=text(OPTIONAL_DNS), annotations=named(text())),
            secrets=secrets(),
            accounts=accounts(),
            postgres=postgres(),
            gateway=gateway(),
            workers=fields(**worker_fields()),
            modelCache=volume("emptyDir", "claim", "existing"),
            models=models,
            aliases=of_program.aliases(),
            default=fields(**of_program.defaults()),
            unknownModel=one_of("refuse", "default"),
            redis=redis(),
            ipv6=flag(),
            test=fields(model=text(), timeoutS=whole(10, 86400)),
            extraObjects=several({"type": ["object", "string"]}),
            **{"global": kubernetes()},
            **outside(),
            **around(),
        ),
        "definitions": of_program.definitions(),
    }
