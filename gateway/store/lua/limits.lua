-- The beginning of every script about limits, put after the key names (made from workers/protocol/keys.py).
--
-- A subject (organisation, team, user, key, alias) has one hash of counters. Its fields:
--   w          its window, of requests and tokens: "born requests tokens head head_tick tail tick r t". The first two
--              counts are sums over the window; r and t those of its newest tick. Ticks are numbers of 250 ms; a window
--              reaches WINDOW ticks back, so that it holds the last minute wherever in a tick that begins. " f" at the
--              end: `f` must be looked at
--   e<number>  the older ticks, from head to tail - 1, oldest first: "tick requests tokens"
--   c          calls under way: "born calls"
--   d, m       tokens of the day and of the month: "begin tokens"; `begin` is the period's, unix seconds
--   b:<period>:<time zone>   money of the period: "begin nano"
--   f          "tick requests tokens": what was in the window by all that is known, told in a round of reports
--   u          "tick requests tokens": the part of `f` that nobody has reported
-- A window and calls under way with another `born` than the round's are those of counters that were lost since.
--
-- A gateway process numbers its messages that change counters (`reserve`, `settle`, `limits_tell`); each runs once, in
-- order, under the epoch that `limits_begin` gave to it. So a process learns whether Redis has lost something that was
-- counted, what became of messages whose answers were lost, and nothing runs that lay in a connection meanwhile.
--
-- Fields of {pd:limits}:log:<gateway>:
--   epoch      whose messages are run; empty: nobody's, as the process was silent for too long
--   number     number of the last message that was run
--   round      the round in which the process reported last
--   o<n>       "number tick", of the last OUTCOMES messages, n = number modulo OUTCOMES: the tick of a call that was
--              admitted, else 0
-- Fields of {pd:limits}:round: id; until (unix ms at which calls are admitted again); born (a new number whenever
-- counters were lost); all ("1": gateways report all they know, as counters were lost); missing ("0", "1"; there once
-- known: whether a process of the last minute has not reported); seen:<gateway>; in:<gateway>
local call, floor, format, match = redis.call, math.floor, string.format, string.match
local TICK, WINDOW, OUTCOMES = 250, 240, 256
local KEPT, KEPT_PERIODS = 86400000, 40 * 86400000 -- lifetimes of counters, ms: those of periods outlive a month

local clock = call("TIME")
local now = clock[1] * 1000 + floor(clock[2] / 1000)
