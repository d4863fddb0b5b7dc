"""Every name, lifetime and channel of Paddock's data in Redis, and the rights of the users that read and write it.

A model's name is the hash tag, so that all names that one script touches lie in one slot of a Redis Cluster. Workers
write only the names marked with `worker`; most others are written by the gateways' scripts (`gateway/store/lua`).

    name                              type    written by   holds
    --------------------------------  ------  -----------  ---------------------------------------------------------
    pd:models                         set     worker       names of models that have had a worker
    pd:keys                           hash    gateway      key id -> its seal, and its record (JSON, SHA-256 only)
    {pd:keys}:subjects                hash    gateway      `team:NAME` and the like -> its seal, and its record (JSON)
    {pd:keys}:changes                 zset    gateway      `key:NAME`, `team:NAME` ... -> version of its last change
    {pd:keys}:position                string  gateway      which changes of the accounts database the records have
    pd:usage                          stream  gateway      usage records of calls that ended (`accounts.protocol.usage`)
    {pd:usage}:batches                hash    gateway      name of a batch of usage -> `sent`, or when it was committed
    {pd:usage}:set-aside              stream  gateway      what came as usage and can't be written to the database
    {pd:limits}:of:<subject>          hash    gateway      what counts towards a subject's limits (`lua/limits.lua`)
    {pd:limits}:log:<gateway>         hash    gateway      how far a gateway process's messages about limits were run
    {pd:limits}:calls:<gateway>       hash    gateway      subject -> calls under way at that gateway process
    {pd:limits}:gateways              zset    gateway      gateway process -> its last sign of life, unix ms
    {pd:limits}:round                 hash    gateway      the round of gateways' reports of what they admitted
    {pd:limits}:used                  zset    gateway      subject that calls counted for -> when, unix ms
    pd:news                           stream  worker       what changes in each worker (`heartbeat.sealed_news`)
    pd:demand                         hash    gateway      gateway process -> calls for models (`GatewayDemand`)
    pd:asked                          hash    gateway, supervisor  model that an admin wants loaded -> unix time
    pd:residency                      hash    supervisor   machine -> its models' states (`MachineModels`)
    pd:machines                       hash    supervisor   machine -> its memory and workers (`MachineReport`)
    pd:machines:models                hash    supervisor   machine -> what its models need (`MachineCatalog`)
    pd:orders                         hash    supervisor   machine -> what is to load and leave (`MachineOrders`)
    pd:planner                        string  supervisor   machine that orders, and a random word; expires
    {pd:planner}:fence                string  supervisor   a count that grows with each planner that is elected
    pd:gateways                       zset    gateway      id of a gateway process -> unix time of its last beat
    pd:gateway:<id>                   string  gateway      heartbeat of a gateway process: unix time, seconds
    pd:calls:<question>               hash    gateway      gateway process -> its calls that were asked for; expires
    pd:stream:{<id>}                  hash    gateway      a stream that may be resumed: team, request, gateway, end
    pd:stream:{<id>}:log              stream  gateway      its events in batches; an entry's id: its last event's number
    pd:stream:{<id>}:readers          string  gateway      a count that grows while another gateway reads the stream
    pd:streams:{<team>}               zset    gateway      id of a resumable stream that runs -> expiry, unix ms
    pd:streams:{<team>}:ended         zset    gateway      id of a resumable stream that has ended -> expiry, unix ms
    pd:streams:{<team>}:sizes         hash    gateway      id of a resumable stream -> bytes; `all`: their sum
    pd:responses:{<team>}             zset    gateway      id of a stored response -> expiry, unix ms
    pd:responses:{<team>}:sizes       hash    gateway      id of a stored response -> bytes; `all`: their sum
    pd:responses:{<team>}:of:<id>     string  gateway      a stored response with its input (JSON)
    pd:{model}:workers                set     worker       ids of workers; the sweep removes those without a record
    pd:{model}:worker:<id>            hash    worker, gateway `beat` (JSON) and its `seal`, and what scripts read
    pd:{model}:worker:<id>:heads      string  worker       prefix hashes of its cache (`heartbeat.pack_heads`)
    pd:{model}:held:<id>              zset    gateway      lease id -> expiry, unix ms: the worker's slots in use
    pd:{model}:calls                  hash    gateway      id of a ticket, grant or lease -> it (`lua/shared.lua`)
    pd:{model}:ledger                 hash    gateway      what teams and workers have, virtual time, last token
    pd:{model}:line                   zset    gateway      ticket id -> rank: class, then virtual finish; who waits
    pd:{model}:expiries               zset    gateway      ticket id -> expiry, unix ms: every ticket, granted or not
    pd:{model}:passed                 hash    gateway      ticket id -> how often it was overtaken, if it was
    pd:{model}:swept                  string  gateway      exists while another sweep would find nothing new
    pd:{model}:adapters               hash    gateway      registered adapter -> `AdapterRecord` (JSON)
    pd:{model}:adapters-removed       hash    gateway      adapter removed lately -> unix time of its removal
    pd:{model}:adapter-scales         hash    gateway      adapter -> scale, for calls that name no adapters
    pd:{model}:supervised             string  supervisor   exists while a supervisor keeps workers of the model
    pd:{model}:unloaded               string  gateway      exists while an admin wants no workers of the model
    pd:fleet                          channel worker       a worker registered, drains or is gone
    pd:calls                          channel gateway      a question to all gateways about their calls
    pd:grants:<gateway>               channel gateway      id of a ticket of that gateway that was granted
    pd:machine:<machine>              channel supervisor   there is something to be read for this machine
    pd:wanted                         channel gateway      a call waits for a model without workers: see `pd:demand`

A worker writes its names to `pd:models` and `pd:{model}:workers` with every heartbeat: a restarted Redis has lost them.
A ticket and the lease that it becomes have one id, made by the gateway, and one record.

There is one Redis user for gateways, one for supervisors and one for workers, each with no more rights than it needs. A
worker parses models and prompts of strangers in C++. If an attacker takes a worker over, its login can't write API
keys, read stored responses, change queues, or say which models are to be loaded: it reaches only names that workers use
for themselves (`_NAMES`). A name that supervisors act upon is never the worker's. The rules are those of Redis 6.2, in
which the right to read a name comes only with the right to write it; scripts run with the rights of their caller.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Literal

HEARTBEAT_INTERVAL_S = 0.5
HEARTBEAT_TTL_S = 5.0
"""Lifetime of a worker's record unless a heartbeat renews it. Once it expired, the sweep frees the worker's leases.

A beat takes two round trips to Redis, each up to 2 s (the worker's patience), and the next begins up to
HEARTBEAT_INTERVAL_S later: a record that lives for less would expire on a slow way, though its worker lives."""

GATEWAY_INTERVAL_S = 1.0
GATEWAY_TTL_S = 5.0

LEASE_TTL_S = 6.0
LEASE_RENEW_S = 2.0
TICKET_TTL_S = 5.0
"""Lifetime of a ticket unless its gateway renews it, by re-reading it; so the tickets of a dead gateway are dropped."""
GRANT_TTL_S = 2.0
"""Seconds in which a gateway has to claim a slot granted to its ticket; after that the slot goes to another ticket."""

SWEEP_INTERVAL_S = 1.0
"""Seconds after which each gateway re-reads its open tickets and sweeps out dead workers and gateways."""

SUPERVISED_INTERVAL_S = 0.5
SUPERVISED_TTL_S = 5.0
"""Lifetime of a model's `supervised` mark unless supervisors renew it. Unmarked models can't be loaded or unloaded."""

STREAM_TTL_S = 6.0
"""Lifetime of a running stream unless its gateway renews it. A setting says how long an ended stream is kept."""
STREAM_RENEW_S = 1.0
STREAM_READERS_TTL_S = 10.0

MODELS = "pd:models"
ACCESS_KEYS = "pd:keys"
ACCESS_SUBJECTS = "{pd:keys}:subjects"
ACCESS_CHANGES = "{pd:keys}:changes"
ACCESS_POSITION = "{pd:keys}:position"
"""In one slot of a Redis Cluster with `pd:keys`, which is its own hash tag."""
USAGE = "pd:usage"
USAGE_GROUP = "ledger"
USAGE_BATCHES = "{pd:usage}:batches"
USAGE_SET_ASIDE = "{pd:usage}:set-aside"
"""Both in one slot of a Redis Cluster with `pd:usage`."""
LIMITS = "{pd:limits}:"
"""The prefix of all names of limits: one script counts a call for all of its subjects."""
LIMITS_GATEWAYS = LIMITS + "gateways"
LIMITS_ROUND = LIMITS + "round"
LIMITS_USED = LIMITS + "used"
LIMITS_PULSE_S = 0.4
"""Seconds between two signs of life of a gateway process about limits."""
LIMITS_TTL_S = 6.0
"""Seconds without a sign of life after which a gateway process's calls are not under way any more."""
FLEET_CHANNEL = "pd:fleet"
NEWS = "pd:news"
NEWS_KEPT = 10_000
"""About how many entries `pd:news` keeps: some seconds' worth of the largest fleet."""
NEWS_INTERVAL_S = 0.2
"""Minimum seconds between two entries of `pd:news` by one worker, and seconds between two readings by a gateway."""
GATEWAYS = "pd:gateways"
DEMAND = "pd:demand"
ASKED = "pd:asked"
RESIDENCY = "pd:residency"
MACHINES = "pd:machines"
MACHINE_MODELS = "pd:machines:models"
ORDERS = "pd:orders"
LIBRARY = "pd:library"
LIBRARY_ORDERS = "pd:library:orders"
PLANNER = "pd:planner"
WANTED_CHANNEL = "pd:wanted"
CALLS_CHANNEL = "pd:calls"
CALLS_FOUND = "pd:calls:"
PLANNER_FENCE = "{pd:planner}:fence"
"""In one slot of a Redis Cluster with `pd:planner`, which is its own hash tag."""


def gateway(gateway_id: str) -> str:
    """Return the name, in Redis, of a gateway's heartbeat. To workers a gateway without a heartbeat is dead."""
    return f"pd:gateway:{gateway_id}"


def limits_subject(subject: str) -> str:
    return f"{LIMITS}of:{subject}"


def limits_log(process: str) -> str:
    return f"{LIMITS}log:{process}"


def limits_calls(process: str) -> str:
    return f"{LIMITS}calls:{process}"


def grants_channel(gateway_id: str) -> str:
    return f"pd:grants:{gateway_id}"


def calls_found(question: str) -> str:
    return CALLS_FOUND + question


def machine_channel(machine: str) -> str:
    return f"pd:machine:{machine}"


def stream(stream_id: str) -> str:
    return f"pd:stream:{{{stream_id}}}"


def stream_log(stream_id: str) -> str:
    return stream(stream_id) + ":log"


def stream_readers(stream_id: str) -> str:
    return stream(stream_id) + ":readers"


def streams(team: str) -> str:
    return f"pd:streams:{{{team}}}"


def streams_ended(team: str) -> str:
    return streams(team) + ":ended"


def stream_sizes(team: str) -> str:
    return streams(team) + ":sizes"


def responses(team: str) -> str:
    return f"pd:responses:{{{team}}}"


def response_sizes(team: str) -> str:
    return responses(team) + ":sizes"


def response(team: str, response_id: str) -> str:
    return responses(team) + f":of:{response_id}"


def model_prefix(model: str) -> str:
    """Return the prefix of all names of one model, hash tag included; the admission scripts get it as their key."""
    return f"pd:{{{model}}}:"


def workers(model: str) -> str:
    return model_prefix(model) + "workers"


def worker(model: str, worker_id: str) -> str:
    return model_prefix(model) + f"worker:{worker_id}"


def worker_heads(model: str, worker_id: str) -> str:
    return worker(model, worker_id) + ":heads"


def worker_leases(model: str, worker_id: str) -> str:
    # Not below the name of `worker`: workers have the right to write everything below that (`_NAMES`).
    return model_prefix(model) + f"held:{worker_id}"


def calls(model: str) -> str:
    return model_prefix(model) + "calls"


def ledger(model: str) -> str:
    return model_prefix(model) + "ledger"


def queue(model: str) -> str:
    return model_prefix(model) + "line"


def tickets(model: str) -> str:
    return model_prefix(model) + "expiries"


def passed(model: str) -> str:
    return model_prefix(model) + "passed"


def swept(model: str) -> str:
    return model_prefix(model) + "swept"


def supervised(model: str) -> str:
    return model_prefix(model) + "supervised"


def unloaded(model: str) -> str:
    return model_prefix(model) + "unloaded"


def adapters(model: str) -> str:
    return model_prefix(model) + "adapters"


def adapters_removed(model: str) -> str:
    return model_prefix(model) + "adapters-removed"


def adapter_scales(model: str) -> str:
    return model_prefix(model) + "adapter-scales"


Role = Literal["gateway", "supervisor", "worker"]
ROLES: tuple[Role, ...] = ("gateway", "supervisor", "worker")

_ANY = "*"
_NAMES: Mapping[Role, tuple[str, ...]] = {
    "gateway": ("pd:*", "{pd:*"),
    "supervisor": (
        worker(_ANY, _ANY),  # to read the heartbeats of its workers, and to remove those of dead ones
        # The mark of the models whose workers it keeps, and which models an admin has unloaded.
        supervised(_ANY),
        unloaded(_ANY),
        # Which models calls wait for, what has become of these, and who decides for all machines.
        DEMAND,
        ASKED,
        RESIDENCY,
        MACHINES,
        MACHINE_MODELS,
        ORDERS,
        PLANNER,
        PLANNER_FENCE,
        # What admins order of its models folder, and what becomes of it.
        LIBRARY,
        LIBRARY_ORDERS,
    ),
    "worker": (
        MODELS,
        NEWS,
        workers(_ANY),
        worker(_ANY, _ANY),
        gateway(_ANY),  # whether the gateway still sends heartbeats
    ),
}
_CHANNELS: Mapping[Role, tuple[str, ...]] = {
    "gateway": ("pd:*",),
    "supervisor": (FLEET_CHANNEL, WANTED_CHANNEL, machine_channel(_ANY)),
    "worker": (FLEET_CHANNEL,),
}

_CONNECTING = (
    "hello select ping echo client|setname client|id command asking readonly readwrite "
    "cluster|slots cluster|nodes cluster|info cluster|keyslot cluster|myid cluster|shards"
)
_COMMANDS: Mapping[Role, str] = {
    "gateway": (
        "del exists get set mget incr incrby expire pexpire pttl time multi exec discard "
        "publish subscribe unsubscribe "
        "hdel hexists hget hgetall hincrby hkeys hlen hmget hscan hset hsetnx hstrlen "
        "sadd scard smembers srandmember srem sscan strlen "
        "xack xadd xautoclaim xdel xgroup|create xgroup|delconsumer xinfo|consumers "
        "xlen xpending xrange xread xreadgroup xrevrange xtrim "
        "zadd zcard zcount zrange zrangebyscore zrank zrem zremrangebyscore "
        "zscore eval evalsha script|load"
    ),
    "supervisor": (
        "del exists get set incrby pexpire unlink hdel hget hgetall hkeys hset hstrlen "
        "publish subscribe unsubscribe multi exec discard"
    ),
    "worker": (
        "del exists type set setrange strlen pexpire hdel hget hgetall hset sadd scard xadd publish multi exec discard"
    ),
}


def user_of(role: Role) -> str:
    """Return the name of the Redis user that a role logs in as."""
    return f"paddock-{role}"


def rules_of(role: Role) -> str:
    """Return the rights of the role's user, in the form of `ACL SETUSER`, `redis.conf` and ACL files; no password."""
    words = ["resetkeys", *(f"~{name}" for name in _NAMES[role])]
    words += ["resetchannels", *(f"&{channel}" for channel in _CHANNELS[role])]
    words += ["-@all", *(f"+{command}" for command in f"{_CONNECTING} {_COMMANDS[role]}".split())]
    return " ".join(words)


def user_line(role: Role, password: str) -> str:
    """Return the line of `redis.conf` or an ACL file that makes the user; it has only the password's SHA-256."""
    return f"user {user_of(role)} on #{_digest(password)} {rules_of(role)}"


def operator_line(password: str) -> str:
    """Return the line of Redis's `default` user, for clients that log in without a user name: it has every right."""
    return f"user default on #{_digest(password)} ~* &* +@all"


def derived_password(secret: str, user: str) -> str:
    """Return a Redis user's default password, derived from a secret known to all who may log in as that user."""
    return hmac.digest(secret.encode(), f"paddock redis {user}".encode(), "sha256").hex()


def _digest(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()
