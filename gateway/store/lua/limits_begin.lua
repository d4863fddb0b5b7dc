-- Gives a gateway process an epoch, under which its messages run from now on, and tells it what it has to report.
--
--   ARGV[1]  id of the gateway process
--   ARGV[2]  its new epoch
--   ARGV[3]  number of the last message that it has an answer to; 0: none
--   ARGV[4]  number of the first one that it has none to
--   ARGV[5]  the `born` that it knows; "": none
--   ARGV[6]  "1": it has been without Redis, and other gateways may have been as well
--   ARGV[7]  how long a round of reports lasts, ms
--   ARGV[8+] the gateway processes that it has seen within a window's length
-- Result: {born, number of the last message that was run, {number of a message from the first on, tick of its call (0:
-- not admitted), number, tick ...}, {subjects with calls under way at the process, as far as counted}}
--
-- A round is a time in which no calls are admitted: every gateway begins anew and reports, so that nothing is admitted
-- by counters that lack something. It is opened if Redis lost counters, which the numbers of messages show, and by a
-- gateway that was without Redis: a replica that is master now may lack the last messages of another gateway.
--
-- Keeps: `born` changes whenever counters were lost, and then only.
local round = call("HMGET", limits_round_key, "id", "until", "born")
local log_key, acked = limits_log_key(ARGV[1]), tonumber(ARGV[3])
local ran = tonumber(call("HGET", log_key, "number"))
local id = format("%d%06d", clock[1], clock[2])

local function open(born, all)
  call("DEL", limits_round_key)
  call("HSET", limits_round_key, "id", id, "until", now + ARGV[7], "born", born, "all", all)
end

if not round[1] or (acked > 0 and (ran or -1) < acked and round[3] == ARGV[5]) then
  for _, process in ipairs(call("ZRANGE", limits_gateways_key, 0, -1)) do call("DEL", limits_calls_key(process)) end
  round[3] = id
  open(id, "1")
elseif ARGV[6] == "1" and tonumber(round[2]) <= now then
  open(round[3], "0")
end
for at = 8, #ARGV do call("HSET", limits_round_key, "seen:" .. ARGV[at], 1) end
call("HSET", limits_round_key, "seen:" .. ARGV[1], 1)
call("ZADD", limits_gateways_key, now, ARGV[1])
call("HSET", log_key, "epoch", ARGV[2], "number", ran or 0)

local outcomes = {}
for number = math.max(ARGV[4], (ran or 0) - OUTCOMES + 1), ran or 0 do
  local of, tick = match(call("HGET", log_key, "o" .. number % OUTCOMES) or "", "^(%d+) (%d+)$")
  if tonumber(of) == number then
    outcomes[#outcomes + 1] = number
    outcomes[#outcomes + 1] = tonumber(tick)
  end
end
return {round[3], ran or 0, outcomes, call("HKEYS", limits_calls_key(ARGV[1]))}
